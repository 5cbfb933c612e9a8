"""Lines of `headway why` about a job of many ranks: where it hung, machines that stand out, MFU, cost of its groups.

Each function takes the `headway.why/2` object and returns sentences, [] when
there is nothing to say.

>>> job_lines(Why.of({"mfu": {"mfu": 0.412, "hfu": 0.55, "flops_per_s_per_device": 1.28e14, "recompute": "full",
...                           "peak_flops_per_s": 3.12e14, "formula": "6 N", "device": "A100"}}))
['MFU 41.2 %, HFU 55.0 % with full recomputation: 128 TFLOP/s of 312 per A100; FLOPs: 6 N']
>>> job_lines(Why.of({"group_creation": {"groups": 3, "calls": 9, "seconds": 2.0}}))
['3 process groups were created in 9 calls: 2 s on the slowest rank']
"""

from __future__ import annotations

from headway.report.answers import Why
from headway.report.figures import clean, percent, plural, seconds

SLOW_CREATION_S = 1.0
"""Creation of groups is told from here on, or when the job has several."""


def job_lines(why: Why) -> list[str]:
    """Return every line, in order: hang, machines, MFU, groups."""
    told: list[str] = []
    if why.hang:
        from headway.report.page.hang import sentences

        told += [f"Hung: {line}" for line in sentences(why.hang)]
    if why.machines.slowdown:
        from headway.report.page.machines import machine_lines

        told += [f"Machines: {line}" for line in machine_lines(why.machines)]
    return [*told, *mfu_lines(why), *_creation(why)]


def mfu_lines(why: Why) -> list[str]:
    """Return MFU with what it rests on, or the rate alone and why there is no MFU."""
    entry = why.mfu
    if entry is None:
        return []
    rate, formula = entry.flops_per_s_per_device / 1e12, f"FLOPs: {clean(entry.formula)}"
    if entry.mfu is None:
        return [f"MFU is not known: {clean(entry.reason)}. {rate:.3g} TFLOP/s per device; {formula}"]
    again = clean(entry.recompute)
    hfu = f", HFU {percent(entry.hfu)} with {again} recomputation" if again != "none" else ""
    peak = f"{entry.peak_flops_per_s / 1e12:.4g} per {clean(entry.device)}"
    return [f"MFU {percent(entry.mfu)}{hfu}: {rate:.3g} TFLOP/s of {peak}; {formula}"]


def _creation(why: Why) -> list[str]:
    """Return what creating process groups cost, where it is worth a line."""
    entry = why.group_creation
    if entry is None or (entry.calls < 2 and entry.seconds < SLOW_CREATION_S):
        return []
    what = f"{plural(entry.groups, 'process group')} {'was' if entry.groups == 1 else 'were'} created"
    return [f"{what} in {plural(entry.calls, 'call')}: {seconds(entry.seconds)} on the slowest rank"]
