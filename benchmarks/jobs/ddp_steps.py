"""Two-rank gloo DDP training of a small network, in one configuration or in several that take turns.

`--settings FILE` names configurations (bucket size, a layer done twice, a codec or a hook for gradients) that take
turns, block by block, in one process: every one of them meets the same noise. Forward of layer i is
annotated 'layer.<i>'. The answer file holds the unprofiled seconds of every step.
"""

import argparse
import itertools
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function


class Named(nn.Module):
    """A layer whose forward is annotated with its name, and which can do all of its work `times` times."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name, self.inner, self.times = name, inner, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer; more than once, the results and so the work of backward are averaged."""
        with record_function(self.name):
            y = self.inner(x)
            for _ in range(self.times - 1):
                y = (y + self.inner(x)) * 0.5
            return y


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add."""
        return x + self.inner(x)


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend; x is [batch, sequence, width]."""
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Pooled(nn.Module):
    """Mean over the pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pool."""
        return x.mean((2, 3))


def mlp() -> tuple[list[nn.Module], torch.Tensor]:
    """Return layers and a batch: 5 x 2.4 MB and 2 smaller ones."""
    sizes = [256, 768, 768, 768, 768, 768, 128]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return list(layers), torch.randn(48, 256)


def conv() -> tuple[list[nn.Module], torch.Tensor]:
    """Return layers and a batch; batch norm makes DDP broadcast buffers in every forward."""

    def block(a: int, b: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    layers = [block(3, 32, 2), block(32, 64, 2), block(64, 128, 2), block(128, 256, 2), block(256, 384, 2)]
    return [*layers, block(384, 384, 1), nn.Sequential(Pooled(), nn.Linear(384, 100))], torch.randn(3, 3, 64, 64)


def transformer() -> tuple[list[nn.Module], torch.Tensor]:
    """Return layers and a batch: 4 blocks of width 256."""
    width = 256
    blocks = [
        nn.Sequential(
            Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, 4))),
            Residual(nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )),
        )
        for _ in range(4)
    ]  # fmt: skip
    return [nn.Linear(64, width), *blocks, nn.Linear(width, 512)], torch.randn(1, 32, 64)


MODELS = {"mlp": mlp, "conv": conv, "transformer": transformer}


def build(name: str, setting: dict[str, Any]) -> tuple[Any, Any, torch.Tensor]:
    """Return the wrapped network, its optimizer and its batch."""
    torch.manual_seed(0)
    layers, batch = MODELS[name]()
    named = [Named(f"layer.{index}", layer) for index, layer in enumerate(layers)]
    if "slow_layer" in setting:
        named[setting["slow_layer"]].times = 2
    size = setting.get("bucket_mb", "default")
    model = DistributedDataParallel(nn.Sequential(*named), bucket_cap_mb=None if size == "default" else float(size))
    hook_up(model, setting)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), batch


def hook_up(model: Any, setting: dict[str, Any]) -> None:
    """Give the model the codec of the setting, or one of torch's hooks: 'fp16' or 'powersgd'."""
    if "codec" in setting:
        from headway.comm import compress

        compress(model, setting["codec"])
    elif setting.get("hook") == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif setting.get("hook") == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def train(model: Any, optimizer: Any, batch: torch.Tensor, steps: int) -> list[float]:
    """Take `steps` steps and return the seconds of each."""
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Train, and write the seconds of every step of every setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--settings", default="", help="JSON file: a list of {bucket_mb, slow_layer, codec, hook}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--answer", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = [{}]
    if options.settings:
        with open(options.settings) as file:
            settings = json.load(file)
    jobs = [build(options.model, setting) for setting in settings]
    seconds: list[list[list[float]]] = [[] for _ in settings]
    for turn in range(options.rounds):
        for place in range(len(settings)):
            # Each round begins with another one: none is always the first, or always after the same one.
            index = (place + turn) % len(settings)
            # The first steps of a configuration build its buckets anew, the first one of a turn meets cold caches.
            train(*jobs[index], steps=4 if turn == 0 else 1)
            seconds[index].append(train(*jobs[index], steps=options.steps))
    if options.answer and dist.get_rank() == 0:
        with open(options.answer, "w") as file:
            json.dump(seconds, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
