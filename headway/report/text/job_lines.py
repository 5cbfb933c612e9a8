"""Lines of `headway why` about a job of many ranks: where it hung, machines that stand out, MFU, cost of its groups.

Each function takes the `headway.why/2` object and returns sentences, [] when
there is nothing to say.

>>> job_lines({"mfu": {"mfu": 0.412, "hfu": 0.55, "flops_per_s_per_device": 1.28e14, "recompute": "full",
...                    "peak_flops_per_s": 3.12e14, "formula": "6 N", "device": "A100"}})
['MFU 41.2 %, HFU 55.0 % with full recomputation: 128 TFLOP/s of 312 per A100; FLOPs: 6 N']
>>> job_lines({"group_creation": {"groups": 3, "calls": 9, "seconds": 2.0}})
['3 process groups were created in 9 calls: 2 s on the slowest rank']
"""

from __future__ import annotations

from headway.report.figures import Json, clean, finite, percent, plural, seconds

SLOW_CREATION_S = 1.0
"""Creation of groups is told from here on, or when the job has several."""


def job_lines(why: Json) -> list[str]:
    """Return every line, in order: hang, machines, MFU, groups."""
    hang, machines = why.get("hang"), why.get("machines")
    told: list[str] = []
    if hang:
        from headway.report.page.hang import sentences

        told += [f"Hung: {line}" for line in sentences(hang)]
    if machines:
        from headway.report.page.machines import machine_lines

        told += [f"Machines: {line}" for line in machine_lines(machines)]
    return [*told, *mfu_lines(why), *_creation(why)]


def mfu_lines(why: Json) -> list[str]:
    """Return MFU with what it rests on, or the rate alone and why there is no MFU."""
    entry = why.get("mfu")
    if not entry:
        return []
    rate = (finite(entry.get("flops_per_s_per_device")) or 0.0) / 1e12
    formula = f"FLOPs: {clean(entry.get('formula'))}"
    if entry.get("mfu") is None:
        return [f"MFU is not known: {clean(entry.get('reason'))}. {rate:.3g} TFLOP/s per device; {formula}"]
    again = clean(entry.get("recompute", "none"))
    hfu = f", HFU {percent(entry.get('hfu'))} with {again} recomputation" if again != "none" else ""
    peak = (finite(entry.get("peak_flops_per_s")) or 0.0) / 1e12
    device = clean(entry.get("device"))
    return [f"MFU {percent(entry['mfu'])}{hfu}: {rate:.3g} TFLOP/s of {peak:.4g} per {device}; {formula}"]


def _creation(why: Json) -> list[str]:
    """Return what creating process groups cost, where it is worth a line."""
    entry = why.get("group_creation")
    if not entry or (entry["calls"] < 2 and entry["seconds"] < SLOW_CREATION_S):
        return []
    what = f"{plural(entry['groups'], 'process group')} {'was' if entry['groups'] == 1 else 'were'} created"
    return [f"{what} in {plural(entry['calls'], 'call')}: {seconds(entry['seconds'])} on the slowest rank"]
