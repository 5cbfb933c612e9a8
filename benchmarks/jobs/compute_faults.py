"""Scripts of a few lines with one planted fault each, made from one table, and sound ones without.

A script trains for SECONDS. Run as `python compute_faults.py NAME ROUNDS`, this file trains the script NAME as it is
and with the edit that is asked for, turn and turn about in one process, and prints one JSON line: how many times as
long an example took without the edit, for each round; CPU time of one thread, lower quartile of the steps of a round.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

IMPORTS = """
import math, os, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

torch.set_num_threads(1)
torch.manual_seed(0)
"""
LOOP = """
def train_step():
    x = draw()
    loss_of(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    return len(x)

end, steps = time.perf_counter() + float(os.environ.get("SECONDS", "4")), 0
while time.perf_counter() < end or steps < 12:
    train_step()
    steps += 1
"""


class PlantedFault(NamedTuple):
    """A script and what is wrong with it."""

    cause: str
    """Cause that `headway why` has to name first; '' for a sound script."""

    code: str
    """`draw`, `model`, `loss_of` and `optimizer`."""

    line: str = ""
    """What the printed line has to contain."""

    edits: tuple[tuple[str, str], ...] = ()
    """Text of `code` -> text in its place."""

    @property
    def mended(self) -> "PlantedFault":
        """The sound script."""
        code = self.code
        for text, better in self.edits:
            if text not in code:
                raise ValueError(f"the script has no {text!r} to replace")
            code = code.replace(text, better)
        return PlantedFault("", code)

    @property
    def script(self) -> str:
        """The whole text."""
        return f"{IMPORTS}{self.code}{LOOP}"


SGD = "SGD(model.parameters(), lr=1e-3)"
FUSED_SGD = f"{SGD[:-1]}, fused=True)"


def trained(model: str, size: str, optimizer: str = SGD, *, step: str = "pass") -> str:
    """Return a script's code: a model on made-up numbers of a size, its mean square as the loss."""
    return f"""
{model}
def draw():
    return torch.randn({size})

def loss_of(x):
    {step}
    return model(x).float().square().mean()

optimizer = torch.optim.{optimizer}
"""


NARROW = """
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(24)])
"""
BLOCKS = """
block = lambda: nn.TransformerEncoderLayer({width}, 4, {inner}, dropout=0.0, batch_first=True)
model = nn.Sequential(*[block() for _ in range({layers})])
"""
ATTENTION = """
class Attention(nn.Module):
    def __init__(self, width=64, heads=2):
        super().__init__()
        self.heads, self.project, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("late", torch.ones(1024, 1024, dtype=torch.bool).triu(1))
        self.register_buffer("bias", torch.zeros(1024, 1024).masked_fill(self.late, -1e9))

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        {scores}
        return x + self.out(y.transpose(1, 2).reshape(n, length, width))

model = nn.Sequential(Attention(), Attention())
"""
SCORES = "scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])"
SOFTMAX = "y = scores.softmax(-1) @ v"
FUSED = "y = F.scaled_dot_product_attention(q, k, v, is_causal={causal})"
RECOMPUTED = """
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[{layer} for _ in range({count})])

    def forward(self, x):
        {loop}

model = Stack()
"""
BY_LAYER = """for layer in self.layers:
            x = {call}
        return x"""
WIDE = "nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))"
IN_BFLOAT16 = 'with torch.autocast("cpu", torch.bfloat16): y = model(x)'
CONVOLVING = """
def stage(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

model = nn.Sequential({stages}, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear({width}, 10))
"""


def convolving(stages: str) -> str:
    """Return a network of convolutions, whose last stage ends in as many channels as are written last."""
    return CONVOLVING.format(stages=stages, width=stages.rstrip(")").rpartition(" ")[2])


def attention(scores: str, *, causal: bool) -> PlantedFault:
    """Return a script whose attention is written out."""
    lines = f"{SCORES}\n        {scores}\n        {SOFTMAX}"
    code = trained(ATTENTION.format(scores=lines), "2, 1024, 64")
    return PlantedFault(
        "compute.attention", code, "scaled_dot_product_attention", ((lines, FUSED.format(causal=causal)),)
    )


def recomputed(layer: str, count: int, call: str, better: str, size: str) -> PlantedFault:
    """Return a script that checkpoints its layers where memory has room, in bfloat16."""
    loop = BY_LAYER.format(call=call) if "layer" in call else f"return {call}"
    code = trained(RECOMPUTED.format(layer=layer, count=count, loop=loop), size)
    code = code.replace("return model(x)", f"{IN_BFLOAT16}\n    return y")
    return PlantedFault("compute.recompute", code, "checkpoint", ((call, better),))


def optimizer(model: str, size: str, update: str) -> PlantedFault:
    """Return a script whose update loops over its tensors."""
    return PlantedFault(
        "compute.optimizer", trained(model, size, update), "fused=True", ((update, f"{update[:-1]}, fused=True)"),)
    )


def in_float64(model: str, size: str) -> PlantedFault:
    """Return a script that computes in float64."""
    code = trained(f"{model}\nmodel.double()", size).replace(f"randn({size})", f"randn({size}).double()")
    return PlantedFault("compute.precision", code, "float32", ((".double()", ".float()"),))


def without_bfloat16(model: str, size: str) -> PlantedFault:
    """Return a script that does not use the processor's units for bfloat16."""
    edit = (("return model(x)", f"{IN_BFLOAT16}\n    return y"),)
    return PlantedFault("compute.precision", trained(model, size), "bfloat16", edit)


def channels_first(stages: str, size: str) -> PlantedFault:
    """Return a script that convolves in bfloat16, channels first."""
    code = trained(convolving(stages), size).replace("return model(x)", f"{IN_BFLOAT16}\n    return y")
    edits = (
        ("def draw", "model.to(memory_format=torch.channels_last)\n\ndef draw"),
        ("    pass", "    x = x.to(memory_format=torch.channels_last)"),
    )
    return PlantedFault("compute.layout", code, "channels_last", edits)


def few_examples(model: str, size: str, more: str) -> PlantedFault:
    """Return a script whose batch has few examples; no line is printed for a batch that no DataLoader makes."""
    return PlantedFault("compute.batch", trained(model, size), "", ((f"randn({size})", f"randn({more})"),))


PAIRS = """
    z, total = model(x).float(), 0.0
    for a in z:
        for b in z:
            total = total + (a - b).square().sum()
    return total"""
AT_ONCE = """
    z = model(x).float()
    return (z[:, None] - z[None]).square().sum()"""
CELLS = """
class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(16, 32)

    def forward(self, x):
        h = c = torch.zeros(len(x), 32)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return h

model = Cells()
"""
LAYER = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]

model = Layer()
"""
PAIRED = """
class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Embedding(20000, 32), nn.Embedding(20000, 32)

    def forward(self, x):
        return (self.one(x[:, 0]) * self.other(x[:, 1])).sum(1)

model = Paired()
"""
ROWS = "nn.Embedding(20000, 32)"
ADAM = "Adam(model.parameters(), lr=1e-3)"


def in_a_loop(code: str, *edits: tuple[str, str]) -> PlantedFault:
    """Return a script that goes through a Python loop where one call would do."""
    return PlantedFault("compute.loop", code, "", edits)


def looked_up() -> PlantedFault:
    """Return a script whose updates go over all rows of its embeddings."""
    code = trained(PAIRED, "64, 2", ADAM).replace("torch.randn(64, 2)", "torch.randint(20000, (64, 2))")
    edits = ((ROWS, "nn.Embedding(20000, 32, sparse=True)"), (ADAM, "SparseAdam(model.parameters(), lr=1e-3)"))
    return PlantedFault("compute.embedding", code, "sparse=True", edits)


MADE = """
maker = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 256))
critic = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
of_critic = torch.optim.SGD(critic.parameters(), lr=1e-3, fused=True)

def draw():
    return torch.randn(64, 256)

def loss_of(x):
    made = maker(torch.randn(64, 32))
    of_critic.zero_grad()
    (critic(x).mean() - critic(made.detach()).mean()).backward()
    of_critic.step()
    return critic(made).mean()

optimizer = torch.optim.SGD(maker.parameters(), lr=1e-3, fused=True)
"""
APART = """critic.requires_grad_(False)
    loss = critic(made).mean()
    critic.requires_grad_(True)
    return loss"""
WEIGHTED = """
class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]

model = nn.Sequential(Weighted(), Weighted())
"""


def transferred() -> PlantedFault:
    """Return a script that trains the head of a network, and computes gradients of all of it."""
    code = trained(MLP, "128, 256", "SGD(model[-1].parameters(), lr=1e-3, fused=True)")
    frozen = "for p in model[:-1].parameters(): p.requires_grad_(False)\noptimizer ="
    return PlantedFault("compute.unused", code, "requires_grad_(False)", (("optimizer =", frozen),))


def called_again() -> PlantedFault:
    """Return a script that calls its model a second time on each batch, for its accuracy."""
    code = trained(MLP, "128, 256", FUSED_SGD).replace("def draw", "newest = []\n\ndef draw")
    code = code.replace("    pass\n", "    newest[:] = [x]\n")
    second = "    hits = [(model(x).argmax(1) == 0).sum() for x in newest]\n"
    code = code.replace("    return torch", f"{second}    return torch")
    return PlantedFault("compute.repeat", code, "", ((second, ""),))


MLP = "model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))"
FAULTS: dict[str, PlantedFault] = {
    "adamw, narrow layers": optimizer(NARROW, "32, 64", "AdamW(model.parameters(), lr=1e-3)"),
    "adam, small transformer": optimizer(
        BLOCKS.format(width=32, inner=64, layers=12), "32, 4, 32", "Adam(model.parameters(), lr=1e-3)"
    ),
    "sgd with momentum, narrow layers": optimizer(NARROW, "16, 64", "SGD(model.parameters(), lr=1e-3, momentum=0.9)"),
    "adagrad, narrow layers": optimizer(NARROW, "32, 64", "Adagrad(model.parameters(), lr=1e-3)"),
    "adamw, large layers": optimizer(
        "model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 16))",
        "32, 64",
        "AdamW(model.parameters(), lr=1e-3)",
    ),
    "attention, mask filled in": attention("scores = scores.masked_fill(self.late, -1e9)", causal=True),
    "attention, mask added": attention("scores = scores + self.bias", causal=True),
    "attention, mask by where": attention("scores = torch.where(self.late, -1e9, scores)", causal=True),
    "attention, no mask": attention("pass", causal=False),
    "checkpoint, not reentrant": recomputed(
        WIDE, 6, "checkpoint(layer, x, use_reentrant=False)", "layer(x)", "256, 256"
    ),
    "checkpoint, reentrant": recomputed(
        WIDE,
        6,
        "checkpoint(layer, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)",
        "layer(x)",
        "256, 256",
    ),
    "checkpoint_sequential": recomputed(
        WIDE, 6, "checkpoint_sequential(self.layers, 2, x, use_reentrant=False)", "self.layers(x)", "256, 256"
    ),
    "checkpoint, transformer": recomputed(
        "nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)",
        4,
        "checkpoint(layer, x, use_reentrant=False)",
        "layer(x)",
        "4, 64, 128",
    ),
    "float64, perceptron": in_float64(MLP, "128, 256"),
    "float64, transformer": in_float64(BLOCKS.format(width=128, inner=256, layers=2), "4, 64, 128"),
    "no bfloat16, perceptron": without_bfloat16(
        "model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64))",
        "256, 512",
    ),
    "no bfloat16, convolutions": without_bfloat16(
        convolving("stage(3, 32), stage(32, 64), stage(64, 64)"), "8, 3, 32, 32"
    ),
    "no bfloat16, transformer": without_bfloat16(BLOCKS.format(width=256, inner=1024, layers=1), "8, 64, 256"),
    "a batch of one": few_examples(MLP, "1, 256", "4, 256"),
    "loss, pair by pair": in_a_loop(
        trained(NARROW, "24, 64", FUSED_SGD).replace("    return model(x).float().square().mean()", PAIRS),
        (PAIRS, AT_ONCE),
    ),
    "cells, step by step": in_a_loop(trained(CELLS, "32, 60, 16", FUSED_SGD), (CELLS, LAYER)),
    "anomaly detection": PlantedFault(
        "compute.anomaly",
        trained(NARROW, "64, 64", FUSED_SGD, step="torch.autograd.set_detect_anomaly(True)"),
        "set_detect_anomaly(False)",
        (("anomaly(True)", "anomaly(False)"),),
    ),
    "embeddings, all rows": looked_up(),
    "a backbone that is not trained": transferred(),
    "a critic in the other's step": PlantedFault(
        "compute.unused", MADE, "requires_grad_(False)", (("return critic(made).mean()", APART),)
    ),
    "accuracy by a second call": called_again(),
    "attention, asked for weights": PlantedFault(
        "compute.attention",
        trained(WEIGHTED, "2, 1024, 64"),
        "need_weights=False",
        (("self.attention(x, x, x)", "self.attention(x, x, x, need_weights=False)"),),
    ),
    "a batch of two": few_examples(BLOCKS.format(width=64, inner=128, layers=4), "2, 8, 64", "8, 8, 64"),
}
"""Name -> script with a fault."""

SOUND: dict[str, PlantedFault] = {
    "fused, narrow layers": PlantedFault(
        "", trained(NARROW, "128, 64", "AdamW(model.parameters(), lr=1e-3, fused=True)")
    ),
    "attention by one call": PlantedFault(
        "", trained(ATTENTION.format(scores=FUSED.format(causal=True)), "2, 1024, 64")
    ),
    "channels last in bfloat16": channels_first("stage(3, 32), stage(32, 64)", "8, 3, 32, 32").mended,
    "a value each step": PlantedFault("", trained(NARROW, "128, 64", FUSED_SGD, step="float(x.sum().item())")),
    "gradients set to zero": PlantedFault(
        "",
        trained(NARROW, "128, 64", FUSED_SGD).replace(
            "optimizer =", "for p in model.parameters(): p.grad = torch.zeros_like(p)\noptimizer ="
        ),
    ),
    "one layer after the other": PlantedFault(
        "",
        trained(NARROW, "128, 64", FUSED_SGD).replace(
            "return model(x)", "for layer in model: x = layer(x)\n    return x"
        ),
    ),
    "an odd vocabulary": PlantedFault(
        "",
        trained(
            "model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 257))",
            "128, 32",
            FUSED_SGD,
        ),
    ),
}
"""Name -> script that has none; what wins nothing on a CPU is among them."""


ROUND_S = 0.4
"""Seconds of a round of each."""


def stepping(fault: PlantedFault) -> Callable[[], int]:
    """Return a function that makes a step of a script and returns its examples."""
    names: dict[str, object] = {}
    exec(f"{IMPORTS}{fault.code}{LOOP.partition('end, steps')[0]}", names)  # a script of the table above
    step = names["train_step"]
    assert callable(step)
    return step


def round_s(step: Callable[[], int]) -> float:
    """Return the CPU time of an example, lower quartile of the steps of a round."""
    taken, end = list[float](), time.perf_counter() + ROUND_S
    while time.perf_counter() < end or len(taken) < 4:
        begin = time.thread_time()
        examples = step()
        taken.append((time.thread_time() - begin) / examples)
    return sorted(taken)[len(taken) // 4]


def main() -> None:
    """Train both forms in turn, one round of each first that does not count."""
    fault = FAULTS[sys.argv[1]]
    plain, mended = stepping(fault), stepping(fault.mended)
    pairs = [(round_s(plain), round_s(mended)) for _ in range(int(sys.argv[2]) + 1)]
    print(json.dumps([before / after for before, after in pairs[1:]]))


if __name__ == "__main__":
    main()
