"""The best batch of a recorded job: its measured noise and times, what a batch would be worth, and the plan for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.cluster.adaptive.speed import BatchLimits, NoiseScale, best_batch, fit_speed, gain
from headway.core.errors import FormatError, InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.files.safe_files import read_json
from headway.core.units import NS_PER_S
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS
from headway.trace.events.loader_facts import active_settings, applied_rows
from headway.trace.recording.runs import Run

BATCH, NOISE = "cluster.batch", "cluster.noise"
"""Names of the remedy, and of what measures for it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run says. Times are seconds, sizes examples."""

    num_hosts: int
    """Hosts of the job."""

    num_replicas: int
    """Ranks, each with a copy of the model."""

    microbatch_size: int
    """Examples of a rank and backward."""

    accumulation: int
    """Backwards before the last one of an update."""

    own_batch_size: int
    """Batch of the script's own loader, per rank."""

    initial_batch: int
    """Batch of all ranks that the learning rate was chosen for."""

    compute_s: float
    """A step without what it waits for other ranks."""

    step_s: float
    """A step."""

    predicted: float | None = None
    """Useful examples per second that the plan in force promised."""

    @property
    def batch_size(self) -> int:
        """Examples of all ranks in one update."""
        return self.num_replicas * self.microbatch_size * (self.accumulation + 1)


def measured_of(run: Run, *, batch_size: int = 0) -> Measured:
    """Read a run; `batch_size` per rank where no loader says it. Raises `InputError` where something is missing."""
    ledger = Ledger.of(run)
    rate, facts = steps_per_s(ledger), run.facts
    if not rate > 0:
        raise InputError(f"{run.path} has no step: its speed is unknown. Record a run that trains.")
    if not batch_size:
        calls = ledger.loader_calls
        loaders = facts.loaders.items()
        sized = sorted((-calls.get(int(group), 0), one.batch_size) for group, one in loaders if one.batch_size)
        if not sized:
            raise InputError(f"no loader of {run.path} says its batch size. Pass --batch-size, examples per rank.")
        batch_size = int(sized[0][1] or 0)
    changed = facts.in_force.get(BATCH, {})
    waits = [BUCKETS.index(bucket) for bucket in ("comm", "straggler")]
    steps = ledger.step_ns[:, 1:] if ledger.step_ns.shape[1] > 1 else ledger.step_ns
    sync_s = float(steps[waits].sum(axis=0).mean()) / (ledger.devices * NS_PER_S) if steps.size else 0.0
    ranks, accumulation = facts.world_size, int(changed.get("accumulation", 0))
    # An update of several backwards: the times of one of them.
    step_s = max(1 / rate - accumulation * (1 / rate - sync_s) / (accumulation + 1), 1e-9)
    return Measured(
        len(set(ledger.hosts.values())) or 1, ranks, int(changed.get("batch_size", batch_size)), accumulation,
        batch_size, int(changed.get("initial_batch", ranks * batch_size)), max(step_s - sync_s, 1e-9), step_s,
        changed.get("predicted_useful"),
    )  # fmt: skip


def noise_of(run: Run, measured: Measured) -> NoiseScale:
    """Put the ranks' norms together: the mean of the local ones per step, beside the norm of the mean.

    Raises `FormatError` on rows that are not samples.
    """
    noise = NoiseScale(measured.initial_batch)
    by_step: dict[int, list[list[Any]]] = {}
    for path in sorted((run.path / "applied").glob("r*.json")):
        tree = read_json(path, fix="Record the run again.")
        applied = tree.get("remedies") if isinstance(tree, dict) else None
        for sample in active_settings(applied_rows(applied)).get(NOISE, {}).get("samples") or ():
            if not (isinstance(sample, list) and len(sample) == 5):
                raise FormatError(f"{path} has the sample {sample!r}; five numbers are a sample. Record it again.")
            by_step.setdefault(int(sample[0]), []).append(sample)
    for _, rows in sorted(by_step.items()):
        _, _, total, per_rank, biased = rows[0]
        ranks = 1 if biased else measured.num_replicas
        if len(rows) < ranks:
            continue  # a rank whose samples ended earlier
        count = int(per_rank) * ranks
        size = measured.microbatch_size * count
        # What was not finite is null in JSON: the step is skipped, and counted.
        local, mean = (np.nan if None in each else float(np.mean(each)) for each in ([r[1] for r in rows], [total]))
        noise.add(local=local, total=mean, count=count, batch_size=size, biased=bool(biased))
    return noise


def now_of(measured: Measured, noise: NoiseScale) -> dict[str, Any]:
    """Return what the present batch is worth; without a noise scale every example counts the same."""
    known = noise.noise_scale is not None
    sqr, var = (noise.sqr, max(noise.var, 0.0)) if known else (0.0, 1.0)
    worth = measured.initial_batch * float(gain(measured.batch_size / measured.initial_batch, sqr=sqr, var=var))
    step_s = measured.step_s + measured.accumulation * measured.compute_s
    return {
        "batch_size": measured.batch_size, "num_replicas": measured.num_replicas,
        "useful_examples_per_s": worth / step_s, "microbatch_size": measured.microbatch_size,
        "accumulation": measured.accumulation, "step_s": step_s, "initial_batch": measured.initial_batch,
        "own_batch_size": measured.own_batch_size, "predicted_useful_examples_per_s": measured.predicted,
    }  # fmt: skip


class BatchesCompared(NamedTuple):
    """Two runs of one job with unlike batches."""

    sentence: str
    """What the other batch made of the useful examples per second."""

    useful_examples_per_s: tuple[float, float]
    """Of both; (0, 0) where they are not known."""

    batch_size: tuple[int, int]
    """Examples of all ranks in one update, of both; (0, 0) where they are not known."""


def learned(before: Run, after: Run) -> BatchesCompared | None:
    """Say what another batch made of the useful examples per second; None where the second run had no other batch.

    Both are judged by the noise scale of the second run, or the first one's where it has none; without any, every
    example counts the same.
    """
    planned = BATCH in after.facts.in_force
    try:
        pair = [measured_of(run) for run in (before, after)]
        noise = noise_of(after, pair[1])
        noise = noise if noise.noise_scale is not None else noise_of(before, pair[0])
    except InputError as cause:
        return BatchesCompared(f"useful examples per second are unknown: {cause}", (0, 0), (0, 0)) if planned else None
    if not planned and pair[0].batch_size == pair[1].batch_size:
        return None
    # What a script's other batch is worth is said against the first run's, as a plan says it against its own.
    pair[1] = pair[1] if planned else replace(pair[1], initial_batch=pair[0].initial_batch)
    first, second = (now_of(each, noise) for each in pair)
    rates = float(first["useful_examples_per_s"]), float(second["useful_examples_per_s"])
    promised = second["predicted_useful_examples_per_s"]
    text = (
        f"batch {first['batch_size']} -> {second['batch_size']}: useful examples per second {rates[0]:,.0f} -> "
        f"{rates[1]:,.0f} ({rates[1] / rates[0]:.2f}x)" + (f", promised {promised:,.0f}" if promised else "")
        + ("" if noise.noise_scale is not None else ", each counted in full: no noise scale was measured")
        + "; steps per second do not judge another batch"
    )  # fmt: skip
    return BatchesCompared(text, rates, (first["batch_size"], second["batch_size"]))


def batch_answer(
    runs: Sequence[Run], *, batch_size: int = 0, largest: int = 0, micro_most: int = 0, devices: int = 0
) -> dict[str, object]:
    """Return the best batch of a job from its runs, the first of which is the one to change.

    `largest` batch of all ranks (0: 16 times the initial one), `micro_most` examples that fit a device (0: not
    limited), `devices` that may be used (0: as many as the first run). Raises `InputError`.
    """
    rows = [measured_of(run, batch_size=batch_size) for run in runs]
    first, noise = rows[0], noise_of(runs[0], rows[0])
    columns = [(m.num_hosts, m.num_replicas, m.microbatch_size, m.compute_s, m.step_s) for m in rows]
    speed = fit_speed(*zip(*columns, strict=True))
    top = largest or 16 * first.initial_batch
    limits = BatchLimits(first.initial_batch, top, 1, micro_most or top)
    # Without an estimate every example counts the same: throughput.
    known = noise.noise_scale is not None
    sqr, var = (max(noise.sqr, 0.0), max(noise.var, 0.0)) if known else (0.0, 1.0)
    most = max(m.num_replicas for m in rows)
    sizes = sorted({first.num_replicas, devices or first.num_replicas, *(2**k for k in range(12) if 2**k <= 2 * most)})
    sizes = [size for size in sizes if size <= top]
    per_host = -(-first.num_replicas // first.num_hosts)
    hosts = [-(-size // per_host) for size in sizes]
    found = best_batch(speed, limits, np.array(hosts), np.array(sizes), sqr=sqr, var=var, two_alone=False)
    table = [
        {
            "num_replicas": size, "num_hosts": host, "microbatch_size": int(micro), "accumulation": int(extra),
            "batch_size": int(size * micro * (extra + 1)), "useful_examples_per_s": float(useful),
            "step_s": float(speed.step_s(host, size, micro, extra)),
        }
        for size, host, useful, micro, extra in zip(sizes, hosts, *found, strict=True)
    ]  # fmt: skip
    allowed = [row for row in table if row["num_replicas"] <= (devices or first.num_replicas)]
    best = max(allowed, key=lambda row: float(row["useful_examples_per_s"]))
    now = now_of(first, noise)
    return {
        "schema": "headway.cluster-batch/1", "noise_scale": noise.noise_scale,
        "basis": "useful examples per second" if known else "throughput only: the run has no noise scale",
        "biased": noise.biased, "noise_steps": noise.num_steps, "skipped_steps": noise.skipped,
        "best": best, "now": now, "table": table, "speed": asdict(speed), "num_configurations": len(set(columns)),
    }  # fmt: skip


def write_batch_plan(answer: dict[str, Any], path: Path, baseline: str) -> str:
    """Write the plan for `headway run --apply`: measure the noise, or change the batch and measure on.

    Returns what it does, in words. The batch changes only where the noise is known.
    """
    measure = Remedy(NOISE, {})
    best, now = answer["best"], answer["now"]
    if answer["noise_scale"] is None:
        write_plan(PlanFile((measure,), baseline=baseline), path)
        return "measures the noise scale"
    parameters = {
        "batch_size": best["microbatch_size"], "own_batch_size": now["own_batch_size"],
        "accumulation": best["accumulation"], "initial_batch": now["initial_batch"],
        "noise_scale": max(answer["noise_scale"], 1e-9), "predicted_useful": best["useful_examples_per_s"],
    }  # fmt: skip
    write_plan(PlanFile((Remedy(BATCH, parameters, allow="lossy"), measure), baseline=baseline), path)
    return f"changes the batch of each rank to {best['microbatch_size']}"
