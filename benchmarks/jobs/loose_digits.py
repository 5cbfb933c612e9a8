"""Digits on ranks with labels of their own: synchronous (DDP), or loosely synchronised, by setting.

Run by `benchmarks/loose_skew.py` on every rank of a pool. A setting is {rule, control, observe, travel_steps, skew,
norm, seed, steps}; with `observe` models travel, and the rule stays as it is. Rule 'ddp' is DistributedDataParallel;
'mean' averages the gradients of all partitions in the first rank, which is the same for a network without statistics of
batches, and takes a tenth of the time. At skew 1 a partition has 10 / ranks labels; of a smaller skew the rest is dealt
evenly.
"""

import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.comm import SkewController, loose, swap_norm
from headway.core.rng import stream

BATCH, RATE, MOMENTUM, PROBE = 20, 0.05, 0.9, 200


def digits(path: str) -> tuple[torch.Tensor, ...]:
    """Return 1,437 training and 360 test images [n, 64] with their labels, by a seeded permutation."""
    with np.load(path) as found:
        images, labels = (torch.tensor(found[key]) for key in ("images", "labels"))
    order = torch.from_numpy(stream(0, "digits").permutation(len(labels)))
    images, labels = images.float().view(-1, 64)[order] / 16, labels.long()[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def partition(labels: torch.Tensor, rank: int, ranks: int, skew: float) -> torch.Tensor:
    """Return the examples of a rank: of a share `skew` those with its labels, of the others every `ranks`-th."""
    draws = torch.from_numpy(stream(0, "skew").random(len(labels)))
    by_label, evenly = labels * ranks // 10, torch.arange(len(labels)) % ranks
    return (torch.where(draws < skew, by_label, evenly) == rank).nonzero().view(-1)


def network(norm: str) -> nn.Module:
    """Return a network of 64 hidden units with BatchNorm, or what `swap_norm` makes of it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    return swap_norm(model) if norm == "group" else model


def averaged(setting: dict[str, Any], data: tuple[torch.Tensor, ...], ranks: int) -> dict[str, Any]:
    """Train with the mean gradient of all partitions; return the accuracy after each of `setting["steps"]`."""
    x, y, test_x, test_y = data
    rows = [partition(y, rank, ranks, setting["skew"]) for rank in range(ranks)]
    draws = [torch.Generator().manual_seed(1000 * setting["seed"] + rank) for rank in range(ranks)]
    torch.manual_seed(setting["seed"])
    net, accuracies = network("group"), {}
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in range(1, max(setting["steps"]) + 1):
        own = [rows[r][torch.randint(len(rows[r]), (BATCH,), generator=draws[r])] for r in range(ranks)]
        batch = torch.cat(own)  # equal shares: the mean over all of them is the mean of the ranks' means
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
        if step in setting["steps"]:
            accuracies[step] = accuracy_of(net, test_x, test_y)
    return accuracies


def accuracy_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of examples that a network classifies."""
    net.eval()
    with torch.no_grad():
        accuracy = float((net(x).argmax(1) == y).double().mean())
    net.train()
    return accuracy


def trained(path: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Train once; return the accuracy of the mean of all models, bytes per step as a share of the model's, travels."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # BatchNorm, which is what is shown
    data = digits(path)
    x, y, test_x, test_y = data
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), setting["steps"]
    if setting["rule"] == "mean":
        return averaged(setting, data, setting["partitions"])
    rows = partition(y, rank, ranks, setting["skew"])
    torch.manual_seed(setting["seed"])
    net = network(setting.get("norm", "group"))
    size = sum(p.numel() for p in net.parameters())
    if setting["rule"] == "ddp":
        model: Any = DistributedDataParallel(net)  # with the running statistics of the first rank, as it comes
    else:
        model = loose(
            net, setting["rule"], control=setting["control"] or setting["observe"],
            probe=(x[rows[:PROBE]], y[rows[:PROBE]]), travel_steps=setting["travel_steps"],
            update_scale=1 / ranks if setting["rule"].startswith("gaia") else 1.0,
        )  # fmt: skip
    if setting["observe"]:
        model.synchronising.controller = SkewController((float(setting["rule"].partition(":")[2]),))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    draws = torch.Generator().manual_seed(1000 * setting["seed"] + rank)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=draws)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    facts: Any = {"sent_bytes": 4 * size * steps, "travels": []}
    if setting["rule"] != "ddp":
        facts = model.synchronising.facts
        model.synchronising.close()
    with torch.no_grad():
        for parameter in net.parameters():
            dist.all_reduce(parameter.div_(ranks))
    sent = torch.tensor(float(facts["sent_bytes"]), dtype=torch.float64)
    dist.all_reduce(sent.div_(ranks))
    travels = [[row[key] for key in ("theta", "accuracy_loss", "bytes_share", "step")] for row in facts["travels"]]
    return {
        "accuracy": accuracy_of(net, test_x, test_y), "saving": 4 * size * steps / float(sent), "travels": travels,
    }  # fmt: skip


def all_trained(path: str, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each setting, one after the other."""
    return [trained(path, setting) for setting in settings]
