"""Steps of three models that were never measured, predicted from a calibration of this host.

Claim: the median error of the predicted step (forward, backward, SGD) is at most 15 %. Operators of each calibrated
model that multiply matrices or convolve, predicted from the other models: the median error is at most 15 %, and below
the roofline's. Peer: a roofline with the highest rates of FLOPs and of bytes that any of those operators reached, one
operator after the other. One thread; quiet times, which a tenth of the calls keep below.
"""

import json
import statistics
import sys
import time

import numpy as np
import torch
from torch import nn

from headway.cost.learned.cost_table import step_costs
from headway.cost.learned.operators import Operator, OperatorModel
from headway.cost.runtime.calibration import here, made_model, measure, quiet_s
from headway.cost.runtime.graph import graph_of, step_of

MODELS, STEP_S, BAR = 48, 1.0, 0.15


class Residual(nn.Module):
    """A small residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(channels, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
            for _ in range(4)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.stem(images))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden.mean((2, 3)))


class Mixer(nn.Module):
    """An MLP mixer: products along positions and along channels."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(positions, 2 * positions), nn.GELU(), nn.Linear(2 * positions, positions))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.across(self.norm(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.within(self.norm(hidden))


UNSEEN = {
    "residual": lambda: (Residual(24), (torch.randn(16, 3, 24, 24),)),
    "mixer": lambda: (Mixer(48, 128), (torch.randn(16, 48, 128),)),
    "encoder": lambda: (nn.TransformerEncoderLayer(160, 4, 512, 0.0, batch_first=True), (torch.randn(8, 40, 160),)),
}


def roofline(known: OperatorModel, wanted: list[Operator]) -> np.ndarray:
    """Return [m] seconds: the longer of FLOPs and bytes at the highest rates that were measured."""
    work = np.array([(op.flops, op.read_bytes + op.written_bytes) for op in known.operators])
    # A view reads nothing of what its inputs and outputs hold: rates are of operators of matrix products alone.
    rates = (work[work[:, 0] > 0] / known.measured_s[work[:, 0] > 0, None]).max(0)
    return (np.array([(op.flops, op.read_bytes + op.written_bytes) for op in wanted]) / rates).max(1)


def main() -> int:
    """Print one JSON line."""
    begin = time.process_time()
    here(1)
    models = [measure(number, *made_model(number)) for number in range(MODELS)]
    learned = step_costs(models)
    errors: list[tuple[float, float]] = []
    for left_out in models:
        rest = [model for model in models if model is not left_out]
        known = OperatorModel(
            [op for model in rest for op in model.operators], np.array([s for model in rest for s in model.seconds])
        )
        names = {op.name for op in known.operators}
        judged = [(op, s) for op, s in zip(left_out.operators, left_out.seconds, strict=True)
                  if op.flops and op.name in names]  # fmt: skip
        wanted, seconds = [op for op, _ in judged], np.array([s for _, s in judged])
        errors += zip(np.abs(known.seconds(wanted) / seconds - 1), np.abs(roofline(known, wanted) / seconds - 1),
                      strict=True)  # fmt: skip
    operator_error, operator_roofline = np.median(errors, axis=0).tolist()
    rows = []
    for name, make in UNSEEN.items():
        module, inputs = make()
        wanted = graph_of(module, inputs).operators
        predicted_s, (low, high) = learned.scaled(float(learned.operators.seconds(wanted).sum()))
        measured_s = quiet_s(step_of(module, inputs), STEP_S, limit=float("inf"))
        rows.append({
            "model": name, "measured_ms": 1e3 * measured_s, "predicted_ms": 1e3 * predicted_s,
            "low_ms": 1e3 * low, "high_ms": 1e3 * high, "error": predicted_s / measured_s - 1,
            "roofline_error": float(roofline(learned.operators, wanted).sum()) / measured_s - 1,
        })  # fmt: skip
    error = statistics.median(abs(row["error"]) for row in rows)
    met = error <= BAR and operator_error <= min(BAR, operator_roofline)
    print(json.dumps({
        "bench": "cost_steps", "baseline": "roofline of measured rates", "models": MODELS,
        "median_error": round(error, 3),
        "roofline_median_error": round(statistics.median(abs(row["roofline_error"]) for row in rows), 3),
        "product_median_error": round(operator_error, 3), "product_roofline_error": round(operator_roofline, 3),
        "products": len(errors), "cpu_s": round(time.process_time() - begin, 1),
        "claim": "median error of steps <= 15 %, of matrix products and convolutions <= 15 % and below the roofline's",
        "met": met, "rows": [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
