"""Train GPT-2 (124M, 8 x 1024 tokens) or ResNet-50 (64 images) with torch's defaults, or with edits of a few lines.

MODEL is gpt2 or resnet50, EDITS a comma list of tf32, autocast, channels_last, cudnn_benchmark, fused_optimizer and
compile, STEPS how many; on a host without a device both are small. Prints one JSON line: seconds of a step, over the
second half of them with the device done at both ends, the loss of the last one, and the bytes that were reserved.
"""

import json
import os
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

MODEL, STEPS = os.environ.get("MODEL", "gpt2"), int(os.environ.get("STEPS", "40"))
EDITS = set(filter(None, os.environ.get("EDITS", "").split(",")))
ON_DEVICE = torch.cuda.is_available()
PLACE = "cuda" if ON_DEVICE else "cpu"
WIDTH, LAYERS, HEADS, VOCABULARY, TOKENS = (768, 12, 12, 50257, 1024) if ON_DEVICE else (64, 2, 2, 257, 32)
torch.manual_seed(0)


class Block(nn.Module):
    """One block of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states [n, t, WIDTH]."""
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class Gpt2(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, t, VOCABULARY]."""
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(hidden)))


def batch_of_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [8, 1024] and the following ones."""
    tokens = torch.randint(0, VOCABULARY, (8, TOKENS + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def batch_of_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 64 images and labels."""
    side, count = (224, 64) if ON_DEVICE else (32, 4)
    return torch.randn(count, 3, side, side), torch.randint(0, 1000, (count,))


if MODEL == "gpt2":
    model: nn.Module = Gpt2()
    batch = batch_of_tokens
else:
    from torchvision.models import resnet50

    model, batch = resnet50(), batch_of_images
model = model.to(PLACE)
if "tf32" in EDITS:
    torch.set_float32_matmul_precision("high")
if "cudnn_benchmark" in EDITS:
    torch.backends.cudnn.benchmark = True
if "channels_last" in EDITS:
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
if "compile" in EDITS:
    model.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if "fused_optimizer" in EDITS else None)
batches = [tuple(part.to(PLACE) for part in batch()) for _ in range(4)]
begin = time.perf_counter()
for step in range(STEPS):
    if step == STEPS // 2 and ON_DEVICE:
        torch.cuda.synchronize()
    if step == STEPS // 2:
        begin = time.perf_counter()
    x, y = batches[step % 4]
    if "channels_last" in EDITS:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast(PLACE, torch.bfloat16) if "autocast" in EDITS else nullcontext():
        scores = model(x)
    loss = functional.cross_entropy(scores.float().flatten(0, -2), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
last = loss.item()
step_s = (time.perf_counter() - begin) / (STEPS - STEPS // 2)
print(json.dumps({"step_s": step_s, "loss": last, "reserved": torch.cuda.max_memory_reserved() if ON_DEVICE else None}))
