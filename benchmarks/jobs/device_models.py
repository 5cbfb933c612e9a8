"""Training loops of four kinds on a CUDA device: a transformer, an LSTM, a UNet, a step that is one CUDA graph.

    python device_models.py KIND --steps 200 [--turn FILE] [--kernels FILE]

`--kernels` profiles the second half of the steps and writes how long kernels ran there, ns a step. `--small` takes
models that a CPU can train, for the emulated device of tests/accelerator.py.
"""

import argparse
import fcntl
import json
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.jobs.device_sleeps import kernels


class Repeated(Dataset):
    """`size` examples, the rows of a tensor over and over."""

    def __init__(self, rows, size):
        self.rows, self.size = rows, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.rows[index % len(self.rows)]


class Block(torch.nn.Module):
    """Causal attention and a feed-forward network, each behind a norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class Transformer(torch.nn.Module):
    """A decoder of the size of GPT-2 small, whose head shares the embedding."""

    def __init__(self, vocabulary=50304, length=1024, layers=12, width=768, heads=12):
        super().__init__()
        self.token, self.place = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("places", torch.arange(length))

    def forward(self, tokens):
        x = self.token(tokens) + self.place(self.places)
        return self.norm(self.blocks(x)) @ self.token.weight.T


class Steps(torch.nn.Module):
    """Two LSTM cells, one step of time after the other: many short kernels."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = torch.nn.LSTMCell(width, width), torch.nn.LSTMCell(width, width)

    def forward(self, x):
        one = two = None
        for moment in x.unbind(1):
            one = self.first(moment, one)
            two = self.second(one[0], two)
        return two[0]


class UNet(torch.nn.Module):
    """Three resolutions, with what the way down saw beside what comes up."""

    def __init__(self, width):
        super().__init__()

        def twice(before, behind):
            layers = [torch.nn.Conv2d(before, behind, 3, padding=1), torch.nn.BatchNorm2d(behind), torch.nn.ReLU()]
            layers += [torch.nn.Conv2d(behind, behind, 3, padding=1), torch.nn.BatchNorm2d(behind), torch.nn.ReLU()]
            return torch.nn.Sequential(*layers)

        self.down = torch.nn.ModuleList([twice(3, width), twice(width, 2 * width)])
        self.bottom = twice(2 * width, 4 * width)
        self.up = torch.nn.ModuleList([twice(6 * width, 2 * width), twice(3 * width, width)])
        self.head = torch.nn.Conv2d(width, 1, 1)

    def forward(self, x):
        seen = []
        for part in self.down:
            x = part(x)
            seen.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for part in self.up:
            x = part(torch.cat([functional.interpolate(x, scale_factor=2.0), seen.pop()], 1))
        return self.head(x)


def eager(model, loss_of, *, reads=False):
    """Return a step of a model that is trained as it stands."""
    model = model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(x):
        loss = loss_of(model, x.to("cuda", non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if reads:
            loss.item()

    return step


def transformer(small):
    shape = {"vocabulary": 64, "length": 8, "layers": 2, "width": 16, "heads": 2} if small else {}
    length = shape.get("length", 1024)

    def loss_of(model, tokens):
        with torch.autocast("cuda", torch.bfloat16, enabled=not small):
            logits = model(tokens[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return eager(Transformer(**shape), loss_of), torch.randint(64, (64, length + 1)), 8


def lstm(small):
    width, length = (8, 4) if small else (128, 32)
    step = eager(Steps(width), lambda model, x: model(x).square().mean(), reads=True)
    return step, torch.randn(256, length, width), 32


def unet(small):
    width, size = (2, 8) if small else (32, 128)
    step = eager(UNet(width), lambda model, x: (model(x) - x.mean(1, keepdim=True)).square().mean())
    return step, torch.randn(64, 3, size, size), 8


def graph(small):
    """A whole step, its update in it, captured after torch's notes on CUDA graphs; when small, a replay of no graph."""
    width, batch = (8, 4) if small else (2048, 256)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(8))
    ).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, capturable=not small)
    static, last = torch.randn(batch, width).to("cuda"), torch.zeros(()).to("cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = model(static).square().mean()
        loss.backward()
        optimizer.step()
        last.copy_(loss.detach())

    if small:
        step()
        replay = lambda: torch.cuda.graphs.CUDAGraph.replay(model)  # noqa: E731  # the emulated device asks for none
    else:
        side, whole = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(whole):
            step()
        replay = whole.replay

    def replayed(x):
        static.copy_(x, non_blocking=True)
        replay()
        last.item()  # else nothing holds the host back: a replay takes few places in the launch queue

    return replayed, torch.randn(4, batch, width), None


KINDS = {"transformer": transformer, "lstm": lstm, "unet": unet, "graph": graph}


def profile():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def main():
    """Train, and say how long kernels ran in a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--turn", type=Path, help="train while no other job has locked this file")
    parser.add_argument("--kernels", type=Path, help="write how long kernels run in a step to this path")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if options.kernels:
        with profile():  # a graph shows its kernels where the profiler's library was there when it was captured
            torch.ones(8).to("cuda").sum().item()
    step, rows, batch_size = KINDS[options.kind](options.small)
    size = options.steps * (batch_size or 1)
    batches = iter(DataLoader(Repeated(rows, size), batch_size, pin_memory=not options.small))
    turn = options.turn.open("a") if options.turn else None
    if turn is not None:
        fcntl.flock(turn, fcntl.LOCK_EX)  # until the loop is done
    profiled = options.steps // 2 if options.kernels else 0
    for _ in range(options.steps - profiled):
        step(next(batches))
    torch.cuda.synchronize()
    if options.kernels:
        with profile() as seen:
            for _ in range(profiled):
                step(next(batches))
            torch.cuda.synchronize()
        work = kernels(seen, 0)
        options.kernels.write_text(json.dumps({"steps": profiled, "work": work}))
    if turn is not None:
        turn.close()


if __name__ == "__main__":
    main()
