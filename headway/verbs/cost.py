"""`headway cost transfer`: a new device's latencies from a few of its measurements and those of other devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.core.tables import pick
from headway.cost.learned.latency_table import LatencyTable
from headway.cost.learned.predictors import PREDICTORS, Transfer, mape, standardised
from headway.cost.learned.selection import SELECTIONS
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, uncut
from headway.verbs.output import emit

PEERS = ("ridge", "one_hot")
"""Predictors that the answer always compares with."""


def transfer(
    *, data: Path, target: str, sources: str = "", samples: int = 10, seed: int = 0, predictor: str = "kernel",
    select: str = "clusters", json: bool = False,
) -> int:  # fmt: skip
    """Predict a device's latencies from a few of its samples, and say how wrong the predictions of the others are.

    The file holds every sample's latency on the target too: those that were
    not chosen are what the error is measured on.

    Example: `headway cost transfer --data fbnet.npz --target raspi4 --samples 10`

    Parameters
    ----------
    data
        NPZ file of ops [n, layers], op_names, settings [s] and latency_ms [s, n].
    target
        The setting that stands for the new device.
    sources
        Settings that are known in full, separated by commas; all others by default.
    samples
        Samples that are measured on the new device, at least 2.
    seed
        Seed of the choice of samples and of the learned weights.
    predictor
        kernel, ridge or one_hot.
    select
        How the samples are chosen: clusters (of the sources' latencies) or random.
    json
        Print one JSON object instead of text.
    """
    pick(PREDICTORS, predictor, "predictor")
    choose = pick(SELECTIONS, select, "selection")
    table = LatencyTable.read(data)
    (target_s,) = table.rows([target])
    names = [name.strip() for name in sources.split(",") if name.strip()]
    names = names or [name for name in table.settings if name != target]
    if target in names:
        raise InputError(f"{target} is the target and a source; drop it from --sources.")
    if not 2 <= samples < len(target_s):
        raise InputError(f"--samples is {samples}; pass at least 2 and at most {len(target_s) - 1}.")
    if not names:
        raise InputError(f"{data} has no setting but {target}; at least one source is needed. Add one.")
    source_s = table.rows(names)
    chosen = choose(standardised(source_s), samples, stream(seed, "chosen samples"))
    known = Transfer(source_s, table.one_hot(), chosen, target_s[chosen], seed)
    errors = {name: mape(PREDICTORS[name](known), target_s, chosen) for name in {predictor, *PEERS}}
    result = {
        "schema": "headway.cost-transfer/1", "target": target, "sources": names, "mape": errors[predictor],
        "peers": {name: errors[name] for name in PEERS}, "predictor": predictor, "select": select,
        "chosen": chosen.tolist(),
    }  # fmt: skip
    emit(result, lambda screen: _transfer_screen(result, len(target_s), screen), as_json=json)
    return 0


def _transfer_screen(result: Mapping[str, Any], num_samples: int, screen: ScreenOptions) -> str:
    rows = grid("left", "right")
    add_row(rows, "predictor", "mean error, %", style="dim")
    add_row(rows, result["predictor"], f"{result['mape']:.2f}", style="bold")
    for name, error in result["peers"].items():
        if name != result["predictor"]:
            add_row(rows, name, f"{error:.2f}")
    measured = len(result["chosen"])
    text = (
        f"{result['target']} from {measured} measured samples (chosen by {result['select']}) and "
        f"{len(result['sources'])} other settings; errors on the {num_samples - measured:,} samples not chosen."
    )
    return draw([paragraph(text), "", uncut(rows)], **screen)
