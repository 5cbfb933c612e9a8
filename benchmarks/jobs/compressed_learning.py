"""Data-parallel training of a small network with and without compressed gradients: digits, or a byte GPT.

`--settings FILE` is a JSON list of {task, codec, feedback, optimizer, seed, steps}; codec '' trains plain. All run one
after the other in one process group; the answer file gets the final loss on all training data, and the accuracy on the
test data (digits) or the loss on text that was not trained on (gpt). Matrices are compressed, vectors travel raw.
"""

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from headway.comm import Lans, compress

BATCH, CONTEXT, WIDTH = 32, 64, 32


class Gpt(nn.Module):
    """Three causal blocks of width 32 over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.out = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, CONTEXT, 256] logits of [batch, CONTEXT] bytes."""
        h = self.token(x) + self.place.weight
        return self.out(self.blocks(h, mask=self.mask, is_causal=True))


def digits(path: str) -> tuple[torch.Tensor, ...]:
    """Return 1,437 training and 360 test images with their labels, by a seeded permutation."""
    with np.load(path) as found:
        images, labels = (torch.tensor(found[key]) for key in ("images", "labels"))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images.float().view(len(labels), -1)[order] / 16, labels.long()[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return [examples, CONTEXT + 1] bytes of the standard library's sources: to train on, and to test on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    rows = rows[: len(rows) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order[512:]], rows[order[:512]]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def trained(setting: dict[str, Any], data: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Train one network; returns its final losses and accuracy."""
    x, y, test_x, test_y = data
    torch.manual_seed(setting["seed"])
    digit = setting["task"] == "digits"
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)) if digit else Gpt()
    model = DistributedDataParallel(net)
    handle = None
    if setting["codec"]:
        plan = {name: setting["codec"] for name, p in net.named_parameters() if p.dim() > 1}
        handle = compress(model, plan, feedback=setting.get("feedback", True), min_bytes=0)
    rate = setting.get("lr", 3e-3)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "lans": Lans}
    optimizer = kinds[setting["optimizer"]](model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, setting["steps"]) if not digit else None
    draws = torch.Generator().manual_seed(1000 * setting["seed"] + dist.get_rank())
    for _ in range(setting["steps"]):
        rows = torch.randint(len(x), (BATCH if digit else 16,), generator=draws)
        loss_of(model, x[rows], y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    if handle is not None:
        handle.close()
    with torch.no_grad():
        return {
            "train_loss": float(loss_of(net, x[:1437], y[:1437])), "test_loss": float(loss_of(net, test_x, test_y)),
            "accuracy": float((net(test_x).argmax(-1) == test_y).float().mean()),
        }  # fmt: skip


def main() -> None:
    """Train every setting and write the answers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True)
    parser.add_argument("--digits", default="")
    parser.add_argument("--answer", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = json.loads(Path(options.settings).read_text())
    sets: dict[str, tuple[torch.Tensor, ...]] = {}
    if any(setting["task"] == "digits" for setting in settings):
        sets["digits"] = digits(options.digits)
    if any(setting["task"] == "gpt" for setting in settings):
        whole, test = text()
        sets["gpt"] = whole[:, :-1], whole[:, 1:], test[:, :-1], test[:, 1:]
    found = [trained(setting, sets[setting["task"]]) for setting in settings]
    if dist.get_rank() == 0:
        Path(options.answer).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
