"""A training loop composed by a seed, of parts that each take a known time; the loop's own clock writes the truth down.

`python mixes.py SEED --truth FILE`. What a seed chooses:

    evaluation   before, between or after the steps; with a loader of its own or batches made by hand; eval() with
                 no_grad(), only no_grad(), or only eval()
    script       between the steps: batches made by hand, steps of an environment, a checkpoint or a metric writer
    update       SGD, SGD with a closure, LBFGS with a closure; over 1 to 4 backward passes
    teacher      a second model, in eval mode under no_grad(), whose forward belongs to the step

The accelerator is a sleep in the model's forward. FILE receives seconds by line of the ledger. The script's parts begin
after the first update, for before it everything is start-up. The clock around `optimizer.step()` also sees what a
recorder does behind the update, in its wrapper of that call: no clock of a script can tell the two apart.
"""

import argparse
import contextlib
import json
import os
import pickle
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH = 32, 16


@dataclass(frozen=True)
class Mix:
    """What one seed chooses; all `_s` are seconds of one call."""

    evaluations: tuple[str, ...]
    """Which of before, between, after."""
    eval_mode: str
    """both, no_grad, or eval."""
    eval_loader: bool
    eval_batches: int
    eval_s: float
    scripts: dict[str, float]
    """get_batch, environment, save, metrics -> seconds; a get_batch takes the training loader's place."""
    input_s: float
    update: str
    """sgd, sgd closure, or lbfgs."""
    accumulate: int
    forward_s: float
    teacher_s: float
    steps: int


def mix_of(seed):
    """Return the mix of a seed."""
    rng = random.Random(seed)
    update = rng.choice(["sgd", "sgd", "sgd closure", "lbfgs"])
    every = {"get_batch": (0.004, 0.012), "environment": (0.004, 0.012), "save": (0.05, 0.12), "metrics": (0.003, 0.01)}
    return Mix(
        evaluations=tuple(when for when in ("before", "between", "after") if rng.random() < 0.6),
        eval_mode=rng.choice(["both", "both", "no_grad", "eval"]),
        eval_loader=rng.random() < 0.5,
        eval_batches=rng.randint(10, 25),
        eval_s=rng.uniform(0.005, 0.02),
        scripts={name: rng.uniform(*bounds) for name, bounds in every.items() if rng.random() < 0.45},
        input_s=rng.uniform(0.002, 0.01),
        update=update,
        accumulate=1 if update == "lbfgs" else rng.choice([1, 1, 2, 4]),
        forward_s=rng.uniform(0.004, 0.01),
        teacher_s=rng.choice([0.0, 0.0, rng.uniform(0.002, 0.006)]),
        steps=12 if update == "lbfgs" else 40,
    )


class Sleeper(nn.Module):
    """A small network whose forward takes a known time."""

    def __init__(self, forward_s):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.forward_s = forward_s

    def forward(self, x):
        time.sleep(self.forward_s)
        return self.net(x)


class Examples(Dataset):
    """Examples of which the first of each batch sleeps."""

    def __init__(self, batches, batch_s):
        self.batches, self.batch_s = batches, batch_s

    def __len__(self):
        return self.batches * BATCH

    def __getitem__(self, index):
        if index % BATCH == 0:
            time.sleep(self.batch_s)
        return torch.full((WIDTH,), index % 7 / 7.0), torch.tensor([index % 3 / 3.0])


class Training:
    """The composed loop and its clock."""

    def __init__(self, mix, folder):
        self.mix, self.folder = mix, folder
        self.spent, self.blocks = defaultdict(float), []
        self.model, self.teacher = Sleeper(mix.forward_s), Sleeper(mix.teacher_s).eval()
        parameters = self.model.parameters()
        self.optimizer = (
            torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)
            if mix.update == "lbfgs"
            else torch.optim.SGD(parameters, 0.01)
        )
        self.validation = DataLoader(Examples(mix.eval_batches, mix.eval_s), BATCH)
        self.taken = 0

    @contextlib.contextmanager
    def clock(self, line):
        """Add the seconds of a block to a line, and note when it ran."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            self.spent[line] += (end - start) / 1e9
            self.blocks.append((line, start, end))

    def batches(self):
        """Yield training batches, from a loader or made by hand."""
        count = self.mix.steps * self.mix.accumulate
        if "get_batch" in self.mix.scripts:
            for index in range(count):
                with self.clock("host.script"):
                    self.script("get_batch")
                    batch = torch.full((BATCH, WIDTH), index % 7 / 7.0), torch.zeros(BATCH, 1)
                yield batch
            return
        loader = iter(DataLoader(Examples(count, self.mix.input_s), BATCH))
        for _ in range(count):
            with self.clock("input"):
                batch = next(loader)
            yield batch

    def script(self, name):
        """Spend the time of one part of the script, once training has begun."""
        if self.taken and name in self.mix.scripts:
            time.sleep(self.mix.scripts[name])

    def between(self):
        """Do what the script does after an update."""
        with self.clock("host.script"):
            self.script("environment")
            self.script("metrics")
            if self.taken % 10 == 0 and "save" in self.mix.scripts:
                self.script("save")
                with open(os.path.join(self.folder, "model.pkl"), "wb") as file:
                    pickle.dump({name: value.tolist() for name, value in self.model.state_dict().items()}, file)

    def loss(self, batch):
        """Run the forward passes of one batch."""
        x, y = batch
        with self.clock("useful.forward"):
            target = y
            if self.mix.teacher_s:
                with torch.no_grad():
                    target = self.teacher(x)
            return nn.functional.mse_loss(self.model(x), target) / self.mix.accumulate

    def gradients(self, batches):
        """Return the loss over `batches`, with gradients."""
        self.optimizer.zero_grad()
        for batch in batches:
            loss = self.loss(batch)
            with self.clock("useful.backward"):
                loss.backward()
        return loss

    def update(self, batches):
        """Take one step; the optimizer's own part is its step less the closures."""
        if self.mix.update == "sgd":
            loss = self.gradients(batches)
            with self.clock("useful.optimizer"):
                self.optimizer.step()
            return loss

        def closure():
            with self.clock("closure"):
                return self.gradients(batches)

        inside = self.spent["closure"]
        with self.clock("useful.optimizer"):
            loss = self.optimizer.step(closure)
        self.spent["useful.optimizer"] -= self.spent["closure"] - inside
        return loss

    def evaluate(self):
        """Run the validation batches forward."""
        with self.clock("eval"):
            if self.mix.eval_mode != "no_grad":
                self.model.eval()
            with torch.no_grad() if self.mix.eval_mode != "eval" else contextlib.nullcontext():
                for x, _ in self.validation if self.mix.eval_loader else self.by_hand():
                    self.model(x)
            if self.mix.eval_mode != "no_grad":
                self.model.train()

    def by_hand(self):
        """Yield validation batches without a loader."""
        for index in range(self.mix.eval_batches):
            time.sleep(self.mix.eval_s)
            yield torch.full((BATCH, WIDTH), index % 7 / 7.0), None

    def run(self):
        """Train."""
        if "before" in self.mix.evaluations:
            self.evaluate()
        batches = self.batches()
        for step in range(self.mix.steps):
            loss = self.update([next(batches) for _ in range(self.mix.accumulate)])
            self.taken += 1
            if step + 1 < self.mix.steps:
                self.between()
                if "between" in self.mix.evaluations and self.taken == self.mix.steps // 2:
                    self.evaluate()
        if "after" in self.mix.evaluations:
            self.evaluate()
        print("loss", loss.item().hex())


def main():
    """Run the mix of a seed and write its truth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--truth")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(mix_of(options.seed), folder)
        training.run()
    if options.truth:
        with open(options.truth, "w") as file:
            json.dump({"steps": training.taken, "seconds": training.spent, "blocks": training.blocks}, file)


if __name__ == "__main__":
    main()
