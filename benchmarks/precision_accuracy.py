"""What a plan of precisions for one slow rank keeps of accuracy, beside int8 for all of its operators.

Claim: two ranks, rank 1 lowered, 3 seeds: under the plan that the allocator makes, the mean accuracy on held-out
examples or the mean of their loss is no worse than with rank 1 all in int8, with fewer operators lowered (QSync
publishes +0.27 to 1.03 points). A network on digits; with `--full` also a GPT on the bytes of Python's library. Float32
and torch.autocast (bf16, both ranks) beside it. The times behind the plan are made up (rank 1 takes 1.6 times as long;
bf16 half, int8 a third of float32): this processor has no instructions for either. Accuracy is measured, speed is not.
"""

import contextlib
import itertools
import json
import os
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from headway.model.precision.apply import lower, names_of
from headway.model.precision.proposal import PhaseOfRank, planned

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.data.public import public
from tests.made.pool import RankPool

SEEDS, BATCH, HELD_OUT, SLOW = 3, 32, 360, 1.6
SPEED = {"float32": 1.0, "bf16": 0.5, "int8": 1 / 3}
FORWARD_S = 1e-3
STEPS = {"digits": 400, "gpt": 300}
WIDTH, LENGTH, HEADS, DEPTH = 48, 24, 4, 2
"""Of the GPT: numbers per byte, bytes in a row, heads, blocks."""


class Block(nn.Module):
    """Causal attention and two linear layers, each behind a norm."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inside, self.outside = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows):
        """Return [n, LENGTH, WIDTH] behind the block."""
        parts = self.inside(self.norms[0](rows)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        rows = rows + self.outside(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return rows + self.narrow(F.gelu(self.wide(self.norms[1](rows))))


class Bytes(nn.Module):
    """A byte and its place as numbers."""

    def __init__(self):
        """Make the tables."""
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))

    def forward(self, rows):
        """Return [n, LENGTH, WIDTH]."""
        return self.byte(rows) + self.place


def model_of(task, seed):
    """Return a network of five linear layers, or a GPT of nine."""
    torch.manual_seed(seed)
    if task == "gpt":
        return nn.Sequential(Bytes(), *(Block() for _ in range(DEPTH)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    sizes = [64, 64, 64, 64, 64]
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def examples_of(task):
    """Return inputs and what is to be said of them, the held-out ones last."""
    draw = np.random.default_rng(0)
    if task == "digits":
        data = np.load(public("digits/digits.npz"))
        order = draw.permutation(len(data["labels"]))
        return (data["images"][order] / 16).astype(np.float32), data["labels"][order].astype(np.int64)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files)[:1_000_000], np.uint8).astype(np.int64)
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    rows = np.concatenate([draw.permutation(rows[:-HELD_OUT]), rows[-HELD_OUT:]])
    return rows[:, :-1].copy(), rows[:, 1:].copy()


def loss_of(logits, labels):
    """Return the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def figures(tensor):
    """Return numbers, sum of squares, largest."""
    return tensor.numel(), float(tensor.square().sum()), float(tensor.abs().max())


def plan_of(task, images, labels):
    """Return rank 1's plan, of statistics on 10 batches of a fresh model and the made-up times."""
    model, tables = model_of(task, 0), {}
    for name, layer in names_of(model).items():
        if isinstance(layer, nn.Linear):
            rows = tables[name] = {"input": [], "weight": [], "gradient": []}

            def ran(layer, inputs, output, rows=rows):
                rows["input"].append(figures(inputs[0].detach()))
                rows["weight"].append(figures(layer.weight.detach()))
                output.register_hook(lambda gradient: rows["gradient"].append(figures(gradient)))

            layer.register_forward_hook(ran)
    for batch in range(10):
        part = slice(batch * BATCH, (batch + 1) * BATCH)
        loss_of(model(images[part]), labels[part]).backward()

    def phase(bits, rank, slow):
        forward = dict.fromkeys(tables, slow * SPEED[bits] * FORWARD_S)
        backward = {name: 2 * seconds for name, seconds in forward.items()}
        step = [sum(forward.values()) + slow * FORWARD_S, sum(backward.values()), FORWARD_S]
        wire = [(1 << 14, 1e-4), (1 << 22, 1e-3)]
        return PhaseOfRank(
            rank, list(tables), {}, forward, backward, dict.fromkeys(tables, 1 << 14), tables, step, sum(step), wire
        )

    phases = {bits: {0: phase(bits, 0, 1.0), 1: phase(bits, 1, SLOW)} for bits in SPEED}
    return {row["name"]: row["precision"] for row in planned(phases).operators if row["rank"] == 1}


def train(task, images, labels, operators, autocast, seed):
    """Train on this rank; return accuracy and loss on the held-out examples, in float32, rank 0's."""
    torch.set_num_threads(1)
    images, labels = torch.tensor(images), torch.tensor(labels)
    rank, model = dist.get_rank(), model_of(task, seed)
    ddp = nn.parallel.DistributedDataParallel(model)
    for name, bits in operators.items() if rank == 1 else ():
        if bits != "float32":
            lower(names_of(model)[name], bits)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
    draw, count = torch.Generator().manual_seed(100 * seed + rank), len(images) - HELD_OUT
    lowered = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    for _ in range(STEPS[task]):
        rows = torch.randint(count, (BATCH,), generator=draw)
        optimizer.zero_grad()
        with lowered:
            loss = loss_of(ddp(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits = model(images[count:])
        right = (logits.argmax(-1) == labels[count:]).float().mean()
        return float(right), float(loss_of(logits, labels[count:]))


def measured(task, pool):
    """Train each way with each seed; return what was lowered and what came of it."""
    images, labels = examples_of(task)
    plan = plan_of(task, torch.tensor(images[: 10 * BATCH]), torch.tensor(labels[: 10 * BATCH]))
    int8 = dict.fromkeys(plan, "int8")
    ways = {"float32": ({}, False), "plan": (plan, False), "int8": (int8, False), "autocast": ({}, True)}
    scores = {way: [] for way in ways}
    for seed in range(SEEDS):
        for way, (operators, autocast) in ways.items():
            scores[way].append(pool.run(train, 2, task, images, labels, operators, autocast, seed, timeout_s=600)[0])
    means = {way: [statistics.mean(column) for column in zip(*rows, strict=True)] for way, rows in scores.items()}
    lowered = sum(bits != "float32" for bits in plan.values())
    met = lowered < len(plan) and (means["plan"][0] >= means["int8"][0] or means["plan"][1] <= means["int8"][1])
    return {
        "plan": plan, "lowered": lowered, "of": len(plan), "met": met,
        "accuracy": {way: round(mean[0], 4) for way, mean in means.items()},
        "loss": {way: round(mean[1], 4) for way, mean in means.items()},
        "loss_by_seed": {way: [round(row[1], 4) for row in rows] for way, rows in scores.items()},
        "accuracy_by_seed": {way: [round(row[0], 4) for row in rows] for way, rows in scores.items()},
    }  # fmt: skip


def main() -> None:
    """Train on each task, print one JSON line; exit 3 where the bar is missed."""
    pool, tasks = RankPool(), ("digits", "gpt") if "--full" in sys.argv else ("digits",)
    rows = {task: measured(task, pool) for task in tasks}
    met = all(row["met"] for row in rows.values())
    print(json.dumps({
        "bench": "precision_accuracy", **rows, "times_made_up": True,
        "claim": "accuracy or loss no worse than int8 on rank 1, fewer lowered", "met": met,
    }))  # fmt: skip
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
