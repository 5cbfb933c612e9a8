"""Callbacks for other libraries' trainers: what they mark, what they log, and that they change nothing.

Each test needs its library, which headway does not ask for: the pins are in benchmarks/peers/frameworks.txt.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import headway
from headway.integrations.trainer_report import TrainerReport
from headway.trace.recording.runs import Run
from tests.datasets import Sized
from tests.paths import ROOT, python_path
from tests.training import small, train

FIGURES = {"headway/step_s", "headway/steps_per_s", "headway/goodput"}


class Slow(Sized):
    """Examples that take their time."""

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((16,), float(index))


def seconds_of(path, name):
    """Return the durations of a name in a run folder."""
    trace = Run.open(path).trace
    return (trace.events["duration_ns"][trace.named(name)] / 1e9).tolist()


def epochs_of(path):
    """Return the epochs that were marked."""
    trace = Run.open(path).trace
    return trace.events["corr"][trace.named("epoch")].tolist()


def test_a_report_gives_its_last_figures_once_when_training_ends(tmp_path):
    report = TrainerReport(every_s=1000.0)
    with headway.run(tmp_path / "run"):
        report.begin()
        report.epoch(0)
        train(*small(), 3)
        report.begin_evaluation()
        figures, again = report.end(), report.end()

    assert set(figures) >= FIGURES
    assert again == {}
    assert (len(seconds_of(tmp_path / "run", "eval.mark")), epochs_of(tmp_path / "run")) == (1, [0])


def test_a_report_without_a_recording_says_and_does_nothing(capsys):
    report = TrainerReport()
    report.begin()
    report.epoch(0)
    report.begin_evaluation()
    report.end_evaluation()
    report.ask()

    assert (report.take(), report.end()) == ({}, {})
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_trainer_marks_and_logs(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from headway.integrations import TransformersCallback

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(16, 1)

        def forward(self, x):
            return {"loss": self.net(x).square().mean()}

    def fit(path, callback):
        transformers.set_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=8, num_train_epochs=2, logging_steps=2,
            eval_strategy="epoch", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=0.0,
            label_names=[], prediction_loss_only=True,
        )  # fmt: skip
        collate = {"data_collator": lambda rows: {"x": torch.stack(rows)}}
        trainer = transformers.Trainer(Model(), arguments, train_dataset=Slow(64), eval_dataset=Slow(100), **collate)
        with headway.run(path):
            if callback:
                trainer.add_callback(TransformersCallback(trainer, every_s=0.01))
            trainer.train()
        history = trainer.state.log_history
        return history, [row["loss"] for row in history if "loss" in row]

    history, losses = fit(tmp_path / "run", True)
    _, plain = fit(tmp_path / "plain", False)
    figures = [row for row in history if set(row) >= FIGURES]

    assert losses == plain
    assert figures[-1]["step"] == 16
    marks = seconds_of(tmp_path / "run", "eval.mark")
    assert len(marks) == 2
    assert min(marks) > 0.1
    assert epochs_of(tmp_path / "run") == [0, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_trainer_marks_and_logs(tmp_path):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    from lightning.pytorch.loggers import CSVLogger

    from headway.integrations import LightningCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(16, 1)

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def validation_step(self, batch, index):
            self.log("val", self.net(batch).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-4)

    logger = CSVLogger(tmp_path / "csv")
    with headway.run(tmp_path / "run"):
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=logger, callbacks=[LightningCallback(every_s=0.01)],
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
            default_root_dir=tmp_path,
        )  # fmt: skip
        loaders = [torch.utils.data.DataLoader(Slow(size), 8) for size in (64, 100)]
        trainer.fit(Model(), *loaders)
    written = (tmp_path / "csv").rglob("metrics.csv")

    assert set(next(written).read_text().splitlines()[0].split(",")) >= FIGURES
    marks = seconds_of(tmp_path / "run", "eval.mark")
    assert len(marks) == 2
    assert min(marks) > 0.1
    assert epochs_of(tmp_path / "run") == [0, 1]


@pytest.mark.slow
def test_keras_marks_evaluation_and_epochs_and_hands_figures_to_later_callbacks(tmp_path):
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    script = """
        import numpy as np, keras, headway
        from headway.integrations import KerasCallback
        from headway.integrations.trainer_report import TrainerReport
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x, y = np.zeros((64, 8), "f"), np.zeros((64, 1), "f")
        with headway.run("run"):
            ours = KerasCallback(every_s=0.01)
            ours._report.take = lambda: {"headway/goodput": 0.5}
            history = model.fit(x, y, epochs=2, validation_data=(x, y), verbose=0, callbacks=[ours])
            model.evaluate(x, y, verbose=0, callbacks=[ours])
        print(sorted(history.history), history.history["headway/goodput"])
        """
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=110)

    assert answer.stdout == "['headway/goodput', 'loss', 'val_loss'] [0.5, 0.5]\n", answer.stderr
    assert len(seconds_of(tmp_path / "run", "eval.mark")) == 3
    assert epochs_of(tmp_path / "run") == [0, 1]
