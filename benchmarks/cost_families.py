"""Steps of five ordinary models of five families, whose operators a calibration has in part.

Claim: an LSTM, a GPT with slices and dropout, a vision transformer with a class token, a convolutional net with average
and max pooling, a perceptron with batch norm and dropout: the step (forward, backward, SGD) is predicted within 15 % by
the median, and 4 of 5 lie inside the printed interval. Each is predicted, then measured; one thread. --costs FILE takes
a calibration of this host; otherwise 36 models are calibrated first (40 s).
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from headway.cost.cost_table import add_line
from headway.cost.torch_calibration import here, made_model, measure, quiet_s, step_of
from headway.verbs.models.cost import learned_step

MODELS, BATCH, BAR, FAMILIES = 36, 16, 0.15, ("lstm", "gpt", "vit", "pooled", "mlp")


class Lstm(nn.Module):
    """Two layers of LSTM that predict tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(2000, 128), nn.Linear(192, 2000)
        self.lstm = nn.LSTM(128, 192, 2, batch_first=True)

    def forward(self, tokens):
        out, _ = self.lstm(self.embedding(tokens[:, :-1]))
        return functional.cross_entropy(self.head(out).flatten(0, 1), tokens[:, 1:].flatten())


class Attention(nn.Module):
    """Causal attention of one matrix product, split."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    """Attention and perceptron, normalised before."""

    def __init__(self, width, heads, drop):
        super().__init__()
        self.ln1, self.attention, self.ln2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(drop))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """Tokens shifted by slices, dropout."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 160), nn.Embedding(64, 160)
        self.blocks, self.norm = nn.Sequential(*[Block(160, 4, 0.1) for _ in range(3)]), nn.LayerNorm(160)
        self.head = nn.Linear(160, 1000, bias=False)

    def forward(self, ids):
        x, y = ids[:, :-1], ids[:, 1:]
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return functional.cross_entropy(self.head(self.norm(self.blocks(h))).reshape(-1, 1000), y.reshape(-1))


class Vit(nn.Module):
    """Patches behind a class token."""

    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 128, 8, 8), nn.Parameter(torch.zeros(1, 1, 128))
        self.places = nn.Parameter(torch.zeros(1, 17, 128))
        self.blocks, self.head = nn.Sequential(*[Block(128, 4, 0.0) for _ in range(4)]), nn.Linear(128, 10)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat((self.token.expand(len(x), -1, -1), h), 1) + self.places
        return self.head(self.blocks(h)[:, 0])


def lstm(batch):
    """A recurrent net."""
    return Lstm(), torch.randint(0, 2000, (batch, 33))


def gpt(batch):
    """A GPT."""
    return Gpt(), torch.randint(0, 1000, (batch, 65))


def vit(batch):
    """A vision transformer."""
    return Vit(), torch.randn(batch, 3, 32, 32)


def pooled(batch):
    """A VGG-like net: average and max pooling, dropout."""
    layers, before = [], 3
    for k, channels in enumerate((32, 64, 96)):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2) if k % 2 else nn.MaxPool2d(2)]
        before = channels
    head = [nn.Flatten(), nn.Dropout(0.3), nn.Linear(96 * 16, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers, *head), torch.randn(batch, 3, 32, 32)


def mlp(batch):
    """Tabular: wide perceptron with batch norm and dropout."""
    body = [layer for _ in range(3) for layer in (nn.LazyLinear(400), nn.BatchNorm1d(400), nn.SiLU(), nn.Dropout(0.2))]
    net = nn.Sequential(*body, nn.LazyLinear(1))
    x = torch.randn(batch, 100)
    net(x)
    return net, x


def main() -> None:
    """Print one JSON line; exit 3 when the claim does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--costs", type=Path)
    costs = parser.parse_args().costs
    host = here(1)
    if costs is None:
        costs = Path(tempfile.mkdtemp()) / "costs.jsonl"
        add_line(costs, host)
        for number in range(MODELS):
            add_line(costs, measure(number, *made_model(number)))
    sys.modules["cost_families"] = sys.modules["__main__"]
    rows = []
    for name in FAMILIES:
        found = learned_step(f"cost_families:{name}", BATCH, costs, 1)
        module, inputs = globals()[name](BATCH)
        measured_s = quiet_s(step_of(module, (inputs,)), 1.5, limit=float("inf"))
        low_s, high_s = found.interval
        rows.append({
            "model": name, "predicted_ms": round(1e3 * found.step_s, 2), "measured_ms": round(1e3 * measured_s, 2),
            "error": round(found.step_s / measured_s - 1, 3), "inside": low_s <= measured_s <= high_s,
        })  # fmt: skip
    median, inside = statistics.median(abs(row["error"]) for row in rows), sum(row["inside"] for row in rows)
    met = median <= BAR and inside >= 4
    result = {
        "bench": "cost_families", "baseline": "measured steps", "models": rows, "median_error": median,
        "inside": inside, "met": met, "claim": "<= 15 % by the median, 4 of 5 inside the interval",
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
