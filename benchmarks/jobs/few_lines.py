"""Train a small model on the CPU, with one edit of a few lines or none: MODEL, EDIT and STEPS say what.

Prints one JSON line: the lower quartile of its steps behind the first third, s, and the loss of step 30, or the last.
"""

import json
import os
import time

import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)
torch.manual_seed(0)


class Conv(nn.Module):
    """Three convolutions with norms, 32 x 32 images."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32), (32, 64), (64, 64)]
        self.layers = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(*size, 3, padding=1), nn.BatchNorm2d(size[1]), nn.ReLU()) for size in sizes
        ])  # fmt: skip
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 10]."""
        return self.last(self.layers(x).mean((2, 3)))


class Transformer(nn.Module):
    """Two blocks, 64 tokens of 96 numbers."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.last = nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 10]."""
        return self.last(self.blocks(x).mean(1))


class Narrow(nn.Module):
    """Many small layers: updates and elementwise work decide."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(24)]
        self.layers = nn.Sequential(*layers, nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 10]."""
        return self.layers(x)


MODELS = {"conv": (Conv, (16, 3, 32, 32)), "transformer": (Transformer, (8, 64, 96)), "narrow": (Narrow, (32, 64))}

kind, shape = MODELS[os.environ.get("MODEL", "conv")]
edit = os.environ.get("EDIT", "")
model = kind()
if edit == "channels_last":
    model = model.to(memory_format=torch.channels_last)
if edit == "compile":
    model.compile()
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if edit == "fused_optimizer" else None)
times, losses = [], []
for _ in range(int(os.environ.get("STEPS", "100"))):
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    begin = time.perf_counter()
    if edit == "channels_last" and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    loss = functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - begin)
    losses.append(loss.detach())
counted = sorted(times[len(times) // 3 :])
print(json.dumps({"step_s": counted[len(counted) // 4], "loss": losses[:30][-1].item()}))
