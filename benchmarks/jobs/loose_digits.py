"""Digits on ranks with labels of their own: synchronous (DDP), or loosely synchronised, by setting.

Run by `benchmarks/loose_skew.py` on every rank of a pool. A setting is {rule, control, skew, norm, seed, steps}; rule ''
is DistributedDataParallel. At skew 1 a partition has 10 / ranks labels; of a smaller skew the rest is dealt evenly.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.comm import loose, swap_norm
from headway.core.rng import stream

BATCH, RATE, MOMENTUM, TRAVEL_STEPS, PROBE = 20, 0.05, 0.9, 100, 200


def digits(path: str) -> tuple[torch.Tensor, ...]:
    """Return 1,437 training and 360 test images [n, 1, 8, 8] with their labels, by a seeded permutation."""
    with np.load(path) as found:
        images, labels = (torch.tensor(found[key]) for key in ("images", "labels"))
    order = torch.from_numpy(stream(0, "digits").permutation(len(labels)))
    images, labels = images.float().view(-1, 1, 8, 8)[order] / 16, labels.long()[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def partition(labels: torch.Tensor, rank: int, ranks: int, skew: float) -> torch.Tensor:
    """Return the examples of a rank: of a share `skew` those with its labels, of the others every `ranks`-th."""
    draws = torch.from_numpy(stream(0, "skew").random(len(labels)))
    by_label, evenly = labels * ranks // 10, torch.arange(len(labels)) % ranks
    return (torch.where(draws < skew, by_label, evenly) == rank).nonzero().view(-1)


def network(norm: str) -> nn.Module:
    """Return two convolutions with BatchNorm, or what `swap_norm` makes of it."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip
    return swap_norm(model) if norm == "group" else model


def trained(path: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Train once; return the accuracy of the mean of all models, bytes per step as a share of the model's, travels."""
    torch.set_num_threads(1)
    x, y, test_x, test_y = digits(path)
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), setting["steps"]
    rows = partition(y, rank, ranks, setting["skew"])
    torch.manual_seed(setting["seed"])
    net = network(setting.get("norm", "group"))
    size = sum(p.numel() for p in net.parameters())
    if setting["rule"]:
        probe = (x[rows[:PROBE]], y[rows[:PROBE]])
        gaia = setting["rule"].startswith("gaia")
        model: Any = loose(
            net, setting["rule"], control=setting.get("control", False), probe=probe, travel_steps=TRAVEL_STEPS,
            update_scale=1 / ranks if gaia else 1.0,
        )  # fmt: skip
    else:
        model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    draws = torch.Generator().manual_seed(1000 * setting["seed"] + rank)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=draws)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    facts = {"sent_bytes": 4 * size * steps, "travels": []}
    if setting["rule"]:
        facts = model.synchronising.facts
        model.synchronising.close()
    for tensor in [*net.parameters(), *(one for one in net.buffers() if one.is_floating_point())]:
        dist.all_reduce(tensor.data.div_(ranks))
    net.eval()
    with torch.no_grad():
        accuracy = float((net(test_x).argmax(1) == test_y).double().mean())
    sent = torch.tensor(float(facts["sent_bytes"]), dtype=torch.float64)
    dist.all_reduce(sent.div_(ranks))
    travels = [[row["theta"], round(row["accuracy_loss"], 3), round(row["bytes_share"], 4)] for row in facts["travels"]]
    return {"accuracy": accuracy, "share": float(sent) / (4 * size * steps), "travels": travels}


def all_trained(path: str, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each setting, one after the other."""
    return [trained(path, setting) for setting in settings]
