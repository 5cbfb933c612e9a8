"""Machines by speed: the heat maps of the page, and the lines on the terminal that name those that stand out.

The heat maps come from `headway.ledger.machines.MachineTimes`, the text from
the `machines` entry of a `headway.why/2` object.

>>> slow = {"machine": "d", "ranks": [6, 7], "slowdown": 1.4, "sigmas": 40.0, "lost_s": 3.2}
>>> entry = {"slowdown": {"a": 1.0, "b": 1.0, "c": 1.01, "d": 1.4}, "outliers": [slow]}
>>> machine_lines(MachinesRow.of(entry))[0]
'd computes 1.40x as long as its peers (2 ranks): the job waited for it 3.20 s at most'
"""

from __future__ import annotations

import numpy as np

from headway.core.units import clean, count, device_seconds, finite, plural, speedup
from headway.ledger.machines import BASES, LEAST_MACHINES, MachineTimes
from headway.report.page.charts import HeatMap
from headway.report.page.sections import section, text
from headway.why.answer import MachinesRow

MOST_OUTLIERS = 5
"""Machines named; the rest is counted."""


def machine_lines(entry: MachinesRow) -> list[str]:
    """Return one sentence per machine that stands out, or the one that says none does; [] where too few compare."""
    known = {name: value for name, raw in entry.slowdown.items() if (value := finite(raw))}
    if len(known) < LEAST_MACHINES:
        return []
    odd = entry.outliers
    lines = [
        f"{clean(row.machine)} computes {speedup(row.slowdown)} as long as its peers "
        f"({plural(len(row.ranks), 'rank')}): the job waited for it {device_seconds(row.lost_s)} at most"
        for row in odd[:MOST_OUTLIERS]
    ]
    if len(odd) > MOST_OUTLIERS:
        lines.append(f"and {count(len(odd) - MOST_OUTLIERS)} more of {count(len(known))} machines")
    if not lines:
        slowest = max(known, key=lambda name: known[name])
        lines = [f"none stands out of {count(len(known))}; the slowest is {clean(slowest)}, {speedup(known[slowest])}"]
    return lines


def machines_part(entry: MachinesRow) -> str:
    """Return the sentences as a section of the page, '' without machines."""
    lines = machine_lines(entry)
    body = "".join(f"<li>{text(line)}</li>" for line in lines)
    lead = f"Mean forward and backward time, {BASES.get(entry.basis, '')}." if lines else ""
    return section("machines", "Machines", lead, f"<ul>{body}</ul>" if lines else "")


def machine_heat_maps(times: MachineTimes | None, where: dict[int, tuple[int, int]]) -> list[HeatMap]:
    """Return forward and backward slowdowns as matrices.

    `where` maps ranks to (dp, pp); with it there is a dp x pp map per pass,
    else one with a row per rank, of machine after machine.
    """
    if times is None or len(times.ranks) < 2:
        return []
    if all(rank in where for rank in times.ranks.tolist()):
        return [_grid(times, where, column, name) for column, name in enumerate(("forward", "backward"))]
    order = np.argsort(times.machine_of, kind="stable")
    names = [f"{rank}" for rank in times.ranks.tolist()]
    if len(times.machines) < len(names):
        names = [f"{name} ({times.machines[m]})" for name, m in zip(names, times.machine_of.tolist(), strict=True)]
    ordered = tuple(names[index] for index in order.tolist())
    title = "Mean time of a forward and of a backward against ranks with the same work"
    return [HeatMap(title, times.slowdown[order], "rank", "", ordered, ("forward", "backward"))]


def _grid(times: MachineTimes, where: dict[int, tuple[int, int]], column: int, name: str) -> HeatMap:
    """Return the dp x pp map of one pass; of several ranks in one place the slowest."""
    dps, pps = (sorted({place[axis] for place in where.values()}) for axis in (0, 1))
    values = np.full((len(dps), len(pps)), np.nan)
    for rank, slowdown in zip(times.ranks.tolist(), times.slowdown[:, column].tolist(), strict=True):
        place = dps.index(where[rank][0]), pps.index(where[rank][1])
        values[place] = np.fmax(values[place], slowdown)
    title = f"Mean {name} time of each worker against the median of its stage"
    return HeatMap(title, values, "dp", "pp", tuple(map(str, dps)), tuple(map(str, pps)))
