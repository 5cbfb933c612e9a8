"""Operators and steps of models that were left out, predicted from a calibration of this host.

Claim: of operators of models that are left out together, an eighth at a time, the median error is at most 15 %, below a
roofline's, and not above gradient-boosted trees' (scikit-learn, where it is installed); and of three models of other
kinds than those calibrated, the step (forward, backward, SGD) is predicted within 15 % by the median. Peer of both: a
roofline with the highest rates of FLOPs and of bytes that any matrix product or convolution reached, one operator after
the other. One thread in float32 and bfloat16, with --full two threads too, interleaved model by model; the three steps
are measured four times on the way, and the median counts, so that they meet the load that the calibration met.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from headway.cost.cost_table import CostTable, MeasuredModel, Operator, OperatorModel, operators_of, step_costs
from headway.cost.torch_calibration import here, made_model, measure

MODELS, ROUNDS, FOLDS, BAR = 48, 4, 8, 0.15
FULL = "--full" in sys.argv
VARIANTS = [(threads, dtype) for threads in ((1, 2) if FULL else (1,)) for dtype in ("float32", "bfloat16")]
CLASSES = {
    "matmul": ("mm", "addmm", "bmm"), "convolution": ("convolution", "convolution_backward"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu",
                  "_scaled_dot_product_flash_attention_for_cpu_backward"),
    "norm": ("native_layer_norm", "native_batch_norm", "native_layer_norm_backward", "native_batch_norm_backward",
             "_log_softmax", "_log_softmax_backward_data"),
    "embedding": ("embedding", "embedding_dense_backward"),
}  # fmt: skip


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
    "residual": lambda: (Residual(24), torch.randn(16, 3, 24, 24)),
    "mixer": lambda: (Mixer(48, 128), torch.randn(16, 48, 128)),
    "encoder": lambda: (nn.TransformerEncoderLayer(160, 4, 512, 0.0, batch_first=True), torch.randn(8, 40, 160)),
}


def class_of(op: Operator) -> str | None:
    """Return the class of an operator that computes; None for views and what is rare."""
    named = next((name for name, members in CLASSES.items() if op.name in members), None)
    return named or ("element-wise" if op.kind == "pointwise" else None)


def roofline(known: OperatorModel, wanted: list[Operator]) -> np.ndarray:
    """Return [m] seconds: the longer of FLOPs and bytes at the highest rates that were measured."""
    work = np.array([(op.flops, op.read_bytes + op.written_bytes) for op in known.operators])
    # A view reads nothing of what its inputs and outputs hold: rates are of operators of matrix products alone.
    rates = (work[work[:, 0] > 0] / known.measured_s[work[:, 0] > 0, None]).max(0)
    return (np.array([(op.flops, op.read_bytes + op.written_bytes) for op in wanted]) / rates).max(1)


def trees(known: OperatorModel, wanted: list[Operator]) -> np.ndarray:
    """Return [m] seconds by gradient-boosted trees on the same features and the names; NaN without scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        return np.full(len(wanted), np.nan)
    from sklearn.ensemble import GradientBoostingRegressor

    names = sorted({op.name for op in known.operators})

    def rows(operators: list[Operator]) -> np.ndarray:
        return np.array([[*op.features(), *(float(op.name == name) for name in names)] for op in operators])

    model = GradientBoostingRegressor(n_estimators=300, max_depth=4, subsample=0.7, random_state=0)
    return np.exp(model.fit(rows(list(known.operators)), np.log(known.measured_s)).predict(rows(wanted)))


PEERS = {"kernel": lambda known, wanted: known.seconds(wanted), "roofline": roofline, "trees": trees}


def operator_errors(models: list[MeasuredModel]) -> dict[str, list[np.ndarray]]:
    """Return class -> errors of each of `PEERS`, [3] an operator; models of a fold are predicted from the others."""
    found: dict[str, list[np.ndarray]] = {}
    for fold in range(FOLDS):
        # Kinds of models take turns by three: a fold holds two of each kind.
        known = operators_of([model for model in models if model.model // 3 % FOLDS != fold])
        names = {op.name for op in known.operators}
        rows = [
            (op, seconds)
            for model in models
            if model.model // 3 % FOLDS == fold
            for op, seconds in zip(model.operators, model.seconds, strict=True)
            if class_of(op) and op.name in names
        ]
        wanted, seconds = [op for op, _ in rows], np.array([s for _, s in rows])
        errors = np.stack([np.abs(predict(known, wanted) / seconds - 1) for predict in PEERS.values()], axis=1)
        for op, row in zip(wanted, errors, strict=True):
            found.setdefault(str(class_of(op)), []).append(row)
    return found


def medians(rows: list[np.ndarray]) -> list[float | None]:
    """Return the median error of each predictor; None for what was not installed."""
    return [None if np.isnan(value) else round(float(value), 3) for value in np.median(rows, axis=0)]


def answer(models: list[MeasuredModel], rounds: list[list[MeasuredModel]]) -> dict[str, object]:
    """Return the figures of one variant."""
    by_class = operator_errors(models)
    together = medians([row for rows in by_class.values() for row in rows])
    learned = step_costs(CostTable(here(torch.get_num_threads()), models, []))
    rows = []
    for name, model, *others in zip(UNSEEN, *rounds, strict=True):
        measured_s = float(np.median([each.step_s for each in (model, *others)]))
        calls = np.array(model.calls)
        step_s, (low, high) = learned.step(float(learned.operators.seconds(model.operators) @ calls), int(calls.sum()))
        roofline_s = float(roofline(learned.operators, model.operators) @ calls)
        rows.append({
            "model": name, "measured_ms": 1e3 * measured_s, "predicted_ms": 1e3 * step_s, "low_ms": 1e3 * low,
            "high_ms": 1e3 * high, "error": step_s / measured_s - 1, "roofline_error": roofline_s / measured_s - 1,
        })  # fmt: skip
    left_out = [roofline(operators_of([m for m in models if m is not model]), model.operators) @ np.array(model.calls)
                / model.step_s for model in models]  # fmt: skip
    return {
        "operator_error": together[0], "operator_roofline": together[1], "operator_trees": together[2],
        "classes": {name: [len(rows), *medians(rows)] for name, rows in sorted(by_class.items())},
        "step_error": round(float(np.median([abs(row["error"]) for row in rows])), 3),
        "step_roofline": round(float(np.median([abs(row["roofline_error"]) for row in rows])), 3),
        "left_out_step_error": round(float(np.median(np.abs(1 / learned.ratios - 1))), 3),
        "left_out_step_roofline": round(float(np.median(np.abs(np.array(left_out) - 1))), 3),
        "factor": round(learned.factor, 3), "call_us": round(1e6 * learned.call_s, 2),
        "dropped": sum(model.dropped for model in models),
        "steps": [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
    }  # fmt: skip


def measure_unseen(make: Callable[[], tuple[nn.Module, torch.Tensor]], dtype: str) -> MeasuredModel:
    """Measure a model that is not calibrated."""
    module, given = make()
    precision = getattr(torch, dtype)
    return measure(0, module.to(precision), (given.to(precision),), dtype=dtype)


def main() -> int:
    """Print one JSON line."""
    begin = time.process_time()
    taken: dict[tuple[int, str], list[MeasuredModel]] = {variant: [] for variant in VARIANTS}
    rounds: dict[tuple[int, str], list[list[MeasuredModel]]] = {variant: [] for variant in VARIANTS}
    for number in range(MODELS):
        for threads, dtype in VARIANTS:
            here(threads)
            taken[threads, dtype].append(measure(number, *made_model(number, dtype=dtype), dtype=dtype))
            if number % (MODELS // ROUNDS) == MODELS // ROUNDS // 2:
                rounds[threads, dtype].append([measure_unseen(make, dtype) for make in UNSEEN.values()])
    load = os.getloadavg()[1]
    here(1)
    found = {f"{threads} {dtype}": answer(taken[threads, dtype], rounds[threads, dtype]) for threads, dtype in VARIANTS}
    first = found["1 float32"]
    bars = [BAR, first["operator_roofline"], first["operator_trees"] or BAR]
    met = first["operator_error"] <= min(bars) and first["step_error"] <= BAR
    print(json.dumps({
        "bench": "cost_steps", "baseline": "roofline of measured rates; gradient-boosted trees", "models": MODELS,
        **{name: value for name, value in first.items() if name.endswith(("error", "roofline", "trees"))},
        "cpu_s": round(time.process_time() - begin, 1), "load_5_min": round(load, 1),
        "claim": "median error of operators <= 15 %, the roofline's and the trees'; of three steps <= 15 %",
        "met": met, "variants": found,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
