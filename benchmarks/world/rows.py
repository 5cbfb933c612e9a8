"""The rows of `headway bench world`: what is run, how, and what a correct account of it says.

A row of a framework runs a script of `jobs/`; a row of a public script runs it from a checkout (owner/name under the
folder that --scripts names), in a copy, unedited. Every row takes a few seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from world import data


@dataclass(frozen=True, slots=True)
class Row:
    """One script, and the truth of it."""

    environment: str
    """Pins under benchmarks/peers/world/."""

    package: str
    """What the row is about: the package whose version is shown, or "owner/name" of a checkout."""

    script: str
    """File in jobs/, or path within the checkout."""

    steps: int
    """Training steps of each device."""

    arguments: tuple[str, ...] = ()

    cwd: str = "."
    """Folder of the checkout to start in."""

    devices: int = 1

    counted: str = "updates"
    """The clock's count that confirms the steps: updates or backwards."""

    per_step: int = 1
    """How many of those make one step."""

    spans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Kind -> functions: "eval", "script" (between steps), "either" (a rollout is one or the other)."""

    standins: tuple[str, ...] = ()

    env: Mapping[str, str] = field(default_factory=dict)

    prepare: Callable[[Path], None] | None = None
    """Writes the made-up data set into the copy of the checkout."""

    launch: tuple[str, ...] = ()
    """Launch options of `headway run`."""

    scalars: bool = False
    """Whether the script writes its losses to TensorBoard files: they are compared with what it prints."""

    @property
    def public(self) -> bool:
        """Tell whether the script comes from a checkout."""
        return "/" in self.package


FRAMEWORKS = {
    "Hugging Face Trainer": Row(
        "world/transformers", "transformers", "transformers_trainer.py", 20,
        spans={"eval": ("transformers.trainer:Trainer.evaluate",)},
    ),
    "Accelerate": Row(
        "world/accelerate", "accelerate", "accelerate_loop.py", 20, spans={"eval": ("__main__:evaluate",)},
    ),
    "Lightning": Row(
        "world/lightning", "lightning", "lightning_fit.py", 40,
        spans={"eval": ("lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.run",)},
    ),
    "Lightning, ddp 2": Row(
        "world/lightning", "lightning", "lightning_fit.py", 20, ("2",), devices=2,
        spans={"eval": ("lightning.pytorch.loops.evaluation_loop:_EvaluationLoop.run",)},
    ),
    "Keras 3, torch": Row(
        "world/keras", "keras", "keras_fit.py", 80, counted="backwards",
        spans={"eval": ("keras.src.backend.torch.trainer:TorchTrainer.evaluate",)},
    ),
    "fastai": Row(
        "world/fastai", "fastai", "fastai_learner.py", 80, counted="backwards",
        spans={"eval": ("fastai.learner:Learner._do_epoch_validate",)},
    ),
    "skorch": Row(
        "world/skorch", "skorch", "skorch_fit.py", 80, spans={"eval": ("__main__:Regressor.validation_pass",)},
    ),
    "PyTorch Geometric": Row(
        "world/torch_geometric", "torch-geometric", "geometric_loop.py", 60, spans={"eval": ("__main__:evaluate",)},
    ),
    "sentence-transformers": Row(
        "world/sentence_transformers", "sentence-transformers", "sentence_trainer.py", 40,
        spans={"eval": ("transformers.trainer:Trainer.evaluate",)},
    ),
    "stable-baselines3 PPO": Row(
        "world/stable_baselines3", "stable_baselines3", "sb3_ppo.py", 64,
        spans={"either": ("stable_baselines3.common.on_policy_algorithm:OnPolicyAlgorithm.collect_rollouts",)},
    ),
    "Ray Train, 2 workers": Row(
        "world/ray", "ray", "ray_train.py", 40, devices=2, env={"WORLD_WRITE_S": "0"},  # Ray kills its workers
    ),
}  # fmt: skip
"""Frameworks from the package index."""

EXAMPLES = {
    "examples/mnist": Row(
        "world/scripts", "pytorch/examples", "main.py", 40, ("--epochs", "2", "--no-accel"), cwd="mnist",
        spans={"eval": ("__main__:test",)}, standins=("torchvision",),
    ),
    "examples/vae": Row(
        "world/scripts", "pytorch/examples", "main.py", 30, ("--epochs", "3", "--no-accel"), cwd="vae",
        spans={"eval": ("__main__:test",)}, standins=("torchvision",), prepare=data.results,
    ),
    "examples/regression": Row(
        "world/scripts", "pytorch/examples", "main.py", 0, cwd="regression", counted="backwards",
        spans={"script": ("__main__:get_batch",)}, env={"WORLD_SEED": "1"},
    ),
    "examples/mnist_hogwild": Row(
        "world/scripts", "pytorch/examples", "main.py", 20, ("--epochs", "1"), cwd="mnist_hogwild", devices=2,
        spans={"eval": ("train:test",)}, standins=("torchvision",),
    ),
    "examples/time_sequence_prediction": Row(
        "world/scripts", "pytorch/examples", "train.py", 3, ("--steps", "3"), cwd="time_sequence_prediction",
        env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}, prepare=data.sine_waves,
    ),
    "examples/reinforce": Row(
        "world/scripts", "pytorch/examples", "reinforce.py", 22, cwd="reinforcement_learning", standins=("gymnasium",),
        spans={"either": ("gymnasium:CartPole.step",)},
    ),
    "examples/gcn": Row(
        "world/scripts", "pytorch/examples", "main.py", 60, ("--epochs", "60", "--no-accel"), cwd="gcn",
        spans={"eval": ("__main__:test",)}, standins=("requests",),
    ),
    "examples/dcgan": Row(
        "world/scripts", "pytorch/examples", "main.py", 10,
        ("--dataset", "fake", "--niter", "1", "--workers", "0", "--manualSeed", "1", "--ngf", "8", "--ndf", "8"),
        cwd="dcgan", per_step=2, standins=("torchvision",), env={"WORLD_IMAGES": "640"},
    ),
    "examples/mnist_forward_forward": Row(
        "world/scripts", "pytorch/examples", "main.py", 8,
        ("--epochs", "4", "--no_accel", "--train_size", "400", "--test_size", "200", "--log-interval", "1"),
        cwd="mnist_forward_forward", standins=("torchvision",), env={"WORLD_SEED": "1"},
        spans={"eval": ("__main__:Net.predict",)},
    ),
    "examples/word_language_model": Row(
        "world/scripts", "pytorch/examples", "main.py", 38,
        ("--data", "data/tiny", "--epochs", "2", "--emsize", "32", "--nhid", "32", "--nlayers", "1",
         "--log-interval", "1"),
        cwd="word_language_model", counted="backwards", spans={"eval": ("__main__:evaluate",)}, prepare=data.sentences,
    ),
}  # fmt: skip
"""pytorch/examples."""

REPOSITORIES = {
    "minGPT adder": Row(
        "world/scripts", "karpathy/minGPT", "projects/adder/adder.py", 41,
        ("--trainer.max_iters=41", "--trainer.num_workers=0"), spans={"eval": ("__main__:batch_end_callback",)},
    ),
    "makemore": Row(
        "world/scripts", "karpathy/makemore", "makemore.py", 501,
        ("--max-steps", "501", "--num-workers", "0", "--n-layer", "1", "--n-head", "2", "--n-embd", "16",
         "--batch-size", "8"),
        spans={"eval": ("__main__:evaluate", "__main__:print_samples")},
    ),
    "nanoGPT": Row(
        "world/scripts", "karpathy/nanoGPT", "train.py", 61,
        ("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--dtype=float32", "--eval_iters=20",
         "--eval_interval=20", "--log_interval=1", "--block_size=64", "--batch_size=8", "--n_layer=2", "--n_head=2",
         "--n_embd=64", "--max_iters=60", "--lr_decay_iters=60", "--dropout=0.0"),
        spans={"eval": ("__main__:estimate_loss",), "script": ("__main__:get_batch",)}, prepare=data.characters,
    ),
    "x-transformers train_copy": Row(
        "world/scripts", "lucidrains/x-transformers", "train_copy.py", 12, standins=("tqdm",),
        env={"WORLD_STEPS": "12", "WORLD_SEED": "1"},
        spans={"eval": ("x_transformers.x_transformers:XTransformer.generate",)},
    ),
    "cleanrl PPO": Row(
        "world/scripts", "vwxyzjn/cleanrl", "cleanrl/ppo.py", 32, ("--total-timesteps", "1024", "--no-cuda"),
        scalars=True,
    ),
}  # fmt: skip
"""Single repositories."""

ROWS = {**FRAMEWORKS, **EXAMPLES, **REPOSITORIES}
