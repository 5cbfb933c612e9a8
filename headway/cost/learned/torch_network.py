"""The published predictor of a new device's latencies, trained on the other devices and on the device's own samples.

After *CDMPP* (arXiv 2311.09690): leaves pass a transformer encoder that all samples share, then a flattening layer of
their leaf count; a second branch reads the device; both are added and decoded. Labels are Box-Cox transformed, the loss
is 1000 * MSE + MAPE, and the embeddings of source and target samples are drawn together by the central moment
discrepancy. Differences: a device without a data sheet is one-hot, and the sizes are those of two CPU cores. It is a
peer of the predictors in numpy; nothing chooses it by default.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import nn

from headway.core.rng import stream
from headway.cost.learned.predictors import Floats, TransferTask, box_cox, box_cox_inverse, box_cox_power

WIDTH, LAYERS, HEADS, BATCH, RATE = 32, 2, 4, 128, 2e-3
"""Sizes of the encoder, examples of a step, Adam's learning rate at the start of each phase."""

SOURCE_STEPS, TARGET_STEPS = 1500, 150
"""Steps on the sources alone, then with the target's samples."""

MOMENTS = 5
"""Highest order that the discrepancy compares (K)."""

PULL = 0.1
"""Weight of the discrepancy in the loss of the second phase."""


class LeafEncoder(nn.Module):
    """Encodes [b, leaves, kinds] leaves; those that are alike differ by their place in the order of the tree only."""

    place: torch.Tensor
    """[leaves, WIDTH] Sines and cosines of the place, added to a leaf."""

    def __init__(self, leaves: int, kinds: int) -> None:
        super().__init__()
        self.leaf = nn.Linear(kinds, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        angle = torch.arange(leaves)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("place", torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1))

    def forward(self, leaves: torch.Tensor) -> torch.Tensor:
        """Return [b, leaves, WIDTH]."""
        encoded: torch.Tensor = self.encoder(self.leaf(leaves) + self.place)
        return encoded


class _Network(nn.Module):
    """Predicts [b] labels of samples on [b] devices."""

    def __init__(self, leaves: int, kinds: int, devices: int) -> None:
        super().__init__()
        # One flattening layer per leaf count in the paper; all samples of a table have the same.
        self.embedding = nn.Sequential(LeafEncoder(leaves, kinds), nn.Flatten(), nn.Linear(leaves * WIDTH, 2 * WIDTH))
        self.device = nn.Sequential(nn.Linear(devices, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 2 * WIDTH))
        self.decoder = nn.Sequential(nn.ReLU(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 1))

    def forward(self, embedding: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        label: torch.Tensor = self.decoder(embedding + self.device(device))
        return label.squeeze(1)


class Trained:
    """A network that knows the sources; every new device starts from a copy of it."""

    def __init__(self, task: TransferTask) -> None:
        """Train on `task.source_s`; leaves at the end that no sample has (padding) are dropped."""
        leaves = torch.from_numpy(task.one_hot.reshape(len(task.one_hot), task.num_leaves, -1)).float()
        used = leaves.any(dim=2).any(dim=0).nonzero()
        self._leaves = leaves[:, : int(used.max()) + 1 if len(used) else 1]
        self._power = box_cox_power(task.source_s.ravel())
        labels = box_cox(task.source_s, self._power)
        self._low, self._span = float(labels.min()), max(float(np.ptp(labels)), 1e-12)
        self._source = self._label(task.source_s)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            self._model = _Network(self._leaves.shape[1], self._leaves.shape[2], len(task.source_s) + 1)
        self._train(self._model, SOURCE_STEPS, stream(task.seed, "network", "sources"))

    def seconds(self, task: TransferTask) -> Floats:
        """Train a copy on with the samples of the new device; return [n] its seconds."""
        model = copy.deepcopy(self._model)
        mine = torch.from_numpy(task.chosen), self._label(task.measured_s)
        self._train(model, TARGET_STEPS, stream(task.seed, "network", "target"), mine)
        with torch.no_grad():
            device = torch.eye(len(self._source) + 1)[-1].expand(len(self._leaves), -1)
            found = model(model.embedding(self._leaves), device).double().numpy()
        return box_cox_inverse((found - 0.5) * self._span + self._low, self._power)

    def _label(self, seconds: Floats) -> torch.Tensor:
        """Return labels between 0.5 and 1.5 on the sources: a relative error needs labels above 0."""
        return torch.from_numpy((box_cox(seconds, self._power) - self._low) / self._span + 0.5).float()

    def _train(
        self,
        model: _Network,
        steps: int,
        rng: np.random.Generator,
        mine: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Take `steps` on the sources, and on the new device's samples (indices, labels) where they are given."""
        devices = torch.eye(len(self._source) + 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            which, rows = (torch.from_numpy(rng.integers(n, size=BATCH)) for n in self._source.shape)
            there = model.embedding(self._leaves[rows])
            loss = _loss(model(there, devices[which]), self._source[which, rows])
            if mine is not None:
                chosen, label = mine
                drawn = torch.from_numpy(rng.integers(len(chosen), size=min(BATCH, len(chosen))))
                here = model.embedding(self._leaves[chosen[drawn]])
                own = _loss(model(here, devices[-1].expand(len(drawn), -1)), label[drawn])
                loss = loss + own + PULL * _discrepancy(there, here)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
            optimizer.step()
            schedule.step()


def _loss(predicted: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    error = predicted - label
    return 1000 * error.square().mean() + (error / label).abs().mean()


def _discrepancy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return |difference of the means| + sum over k = 2 .. `MOMENTS` of |difference of the k-th central moments|.

    Of [n, d] and [m, d] embeddings; norms are Euclidean (Zellinger et al., arXiv 1702.08811, without its ranges).
    """
    means = [each.mean(0) for each in (source, target)]
    centred = [each - mean for each, mean in zip((source, target), means, strict=True)]
    total: torch.Tensor = torch.linalg.vector_norm(means[0] - means[1])
    for order in range(2, MOMENTS + 1):
        first, second = (each.pow(order).mean(0) for each in centred)
        total = total + torch.linalg.vector_norm(first - second)
    return total
