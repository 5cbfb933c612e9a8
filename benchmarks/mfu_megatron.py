"""MFU of the published training runs of a 175 G parameter model, from batch, devices and step time alone.

Claim: the eight Megatron-LM rows of MegaScale's table 2 (arXiv 2402.15627) come out within 0.3 points under the paper's
own convention ("megatron": 4.5 V h for the output layer); `exact` counts its 6 V h. The eight MegaScale rows have no
claim: sliding-window attention does less work than the formula counts. The baseline is the usual 6 N per token
(N = parameters), which leaves attention out.
"""

import csv
import json
import sys
from pathlib import Path

from headway.cost.specs import shipped
from headway.cost.transformer import Transformer, flops_per_token, mfu

TABLE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "megascale_table_2.csv"
FORMULA = "6 L M + 12 L s h + 4.5 V h per token, forward and backward, nothing computed twice"
MODEL = Transformer(96, 12288, 96, sequence=2048, vocabulary=64000)
DEVICE, DTYPE, CLAIM_POINTS = "A100-SXM4-80GB", "bf16", 0.3


def rows() -> list[dict[str, str]]:
    """Return the published rows."""
    lines = (line for line in TABLE.read_text().splitlines() if not line.startswith("#"))
    return list(csv.DictReader(lines))


def compare(row: dict[str, str]) -> dict[str, object]:
    """Return one row: published, ours and the baseline's MFU, in percent."""
    devices, tokens_per_s = int(row["devices"]), int(row["batch"]) * MODEL.sequence / float(row["step_s"])
    device = shipped().device(DEVICE)
    ours, exact = (
        mfu(tokens_per_s * flops_per_token(MODEL, counted) / devices, device.peak(DTYPE))
        for counted in ("megatron", "exact")
    )
    plain = mfu(6.0 * MODEL.num_parameters * tokens_per_s / devices, device.peak(DTYPE))
    assert ours is not None
    assert plain is not None
    assert exact is not None
    return {
        "system": row["system"], "batch": int(row["batch"]), "devices": devices,
        "published": float(row["mfu_percent"]), "ours": round(100 * ours, 2), "baseline": round(100 * plain, 2),
        "exact": round(100 * exact, 2),
    }  # fmt: skip


def main() -> None:
    """Compute every row and print one JSON line; exit 3 when the claim is missed."""
    table = [compare(row) for row in rows()]
    off = {
        system: {kind: max(abs(row[kind] - row["published"]) for row in table if row["system"] == system)
                 for kind in ("ours", "baseline")}
        for system in ("Megatron-LM", "MegaScale")
    }  # fmt: skip
    met = off["Megatron-LM"]["ours"] <= CLAIM_POINTS
    result = {
        "bench": "mfu_megatron", "baseline": "6 N per token", "formula": FORMULA,
        "tflops_per_token": flops_per_token(MODEL, "megatron") / 1e12, "worst_points": off, "rows": table,
        "claim": f"Megatron-LM rows within {CLAIM_POINTS} points", "met": met,
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
