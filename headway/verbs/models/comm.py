"""`headway comm plan`: the best buckets for a recorded data-parallel job, searched on its replayed step.

`headway comm bench`, `headway comm overlap`: what codecs cost on this host; what hiding a collective wins.

`headway comm options` and `comm strategy`: the ways to compress a gradient, and a plan of one for each.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.comm import EXACT_RANKS
from headway.comm.compression.advise import MEASURED, measure
from headway.comm.compression.options import COSTS
from headway.comm.compression.options import options as tree
from headway.comm.compression.strategy_search import (
    Pricing,
    PublishedSetup,
    read_codecs,
    read_models,
    read_setups,
    search,
)
from headway.comm.overlap.advise import OVERLAP_FILE, SCHEMA
from headway.comm.overlap.advise import measure as measure_forms
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, granted, write_plan
from headway.core.files.safe_files import read_json
from headway.core.tables import pick
from headway.core.units import format_fraction, format_seconds, plural
from headway.cost.codecs import read_codec
from headway.cost.collectives import read_shape
from headway.plan.optimiser import optimise
from headway.plan.proposal import MIN_SPEEDUP
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph, uncut
from headway.report.terminal import render_optimised
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.ddp.ddp_step import RecordedStep, recorded_step
from headway.sim.whatif import ResolvedEdits
from headway.verbs.shared.output import emit
from headway.verbs.shared.run_options import GivenPath, OutPath, RunPath, run_at

EQUIVALENT = "result-equivalent"
"""The grant under which gradients are summed in another order."""


def plan(
    run: RunPath | None = None, /, *, out: OutPath | None = None, ranks: int | None = None, allow: str | None = None,
    json: bool = False,
) -> int:  # fmt: skip
    """Search for the gradient buckets under which RUN's step is shortest, and write a plan that `run --apply` takes.

    Example: `headway comm plan headway-runs/train-1 -o comm-plan.json`

    Args:
      run: A run folder with deep windows; the newest one by default.
      out: The plan file; RUN/comm-plan.json by default.
      ranks: Plan for so many ranks on equal links instead of the recorded ones (simulated).
      allow: 'result-equivalent' admits what more than two ranks need: they add gradients in the order of their buckets.
      json: Print one JSON object (schema headway.comm-plan/1) instead of text.
    """
    grant = EQUIVALENT if EQUIVALENT in granted(allow) else None
    recorded = run_at(run)
    replay = DdpReplay.from_run(recorded)
    step = recorded_step(replay)
    found = optimise(step if ranks is None else on_ranks(step, ranks))
    made, note = found.plan_file(), f"Simulated: {ranks} ranks on links like the recorded one."
    if ranks is None:
        made, note = confirmed(made, replay, str(recorded.path.resolve()))
    made = replace(made, remedies=tuple(replace(remedy, allow=grant) for remedy in made.remedies))
    if made.remedies and grant is None and found.after.num_ranks > EXACT_RANKS:
        note += " More than two ranks add gradients in another order: plan with --allow result-equivalent to apply it."
    path = out or recorded.path / "comm-plan.json"
    worth = bool(made.remedies) and (made.predicted_speedup or 1.0) >= MIN_SPEEDUP
    if worth:
        write_plan(made, path)
    answer: dict[str, Any] = {
        **found.to_json(), "schema": "headway.comm-plan/1", "ranks": found.after.num_ranks,
        "path": str(path) if worth else None, "confirmed_speedup": made.predicted_speedup if ranks is None else None,
        "interval": None if made.interval is None else list(made.interval), "note": note,
    }  # fmt: skip
    source, written = str(recorded.path), answer["path"] or ""
    return emit(answer, lambda s: render_optimised(answer, source=source, plan_path=written, **s), as_json=json)


def confirmed(made: PlanFile, replay: DdpReplay, baseline: str) -> tuple[PlanFile, str]:
    """Return the plan with what the replay of all threads predicts for it, and that in words.

    The search sees one worker's mean step; the replay sees every thread of every window, but knows one size for all
    buckets only. So what it gives for the best such size is what the plan promises.
    """
    sizes = [remedy.parameters["bucket_mb"] for remedy in made.remedies if remedy.name == "comm.bucket"]
    if not sizes:
        return replace(made, baseline=baseline), ""
    ratio, (low, high) = replay.ratio(ResolvedEdits(bucket_mb=sizes[0]))
    speedup, interval = 1 / ratio, (1 / high, 1 / low)
    remedies = tuple(
        replace(remedy, predicted_speedup=speedup, interval=interval) if remedy.name == "comm.bucket" else remedy
        for remedy in made.remedies
    )
    note = (
        f"The replay of all threads gives {speedup:.2f}x ({interval[0]:.2f} to {interval[1]:.2f}) for buckets of "
        f"{sizes[0]:.3g} MiB: that is what the plan promises."
    )
    return PlanFile(remedies, predicted_speedup=speedup, interval=interval, baseline=baseline), note


def on_ranks(step: RecordedStep, ranks: int) -> RecordedStep:
    """Return the step on more or fewer ranks, each hop as before. Raises `InputError` below 2."""
    if ranks < 2:
        raise InputError(f"--ranks is {ranks}; gradients are summed over at least 2. Pass 2 or more.")
    return replace(step, num_ranks=ranks)


def bench(*, codecs: str = "", out: OutPath | None = None, json: bool = False) -> int:
    """Measure encoding and decoding of gradients, which `headway plan --allow lossy` and `whatif compress=` replay.

    Example: `headway comm bench --codecs sign,topk:0.01 -o headway-runs/train-1/codecs.json`

    Args:
      codecs:
        Names, separated by commas: half, bfloat16, sign, topk:0.01, randomk:0.01, shared-randomk:0.01, dither:4,
        natural:4, int8.
      out: The file; codecs.json in this directory by default. Put it into a run folder to predict from.
      json: Print one JSON object (schema headway.comm-bench/1) instead of text.
    """
    names = [name.strip() for name in codecs.split(",")] if codecs else list(MEASURED)
    for name in names:
        read_codec(name)
    path = out or Path("codecs.json")
    measure(list(dict.fromkeys(names)), path)
    answer = read_json(path)
    return emit(answer, lambda screen: _screen(answer, screen), as_json=json)


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Draw the row of each codec's largest size."""
    rows = headed("codec", "numbers", "encode", "decode", "of fp32")
    largest = max(row["numel"] for row in answer["rows"])
    for row in answer["rows"]:
        if row["numel"] == largest:
            share = format_fraction(row["wire_bytes"] / (4 * row["numel"]), 2)
            times = (format_seconds(row["encode_s"]), format_seconds(row["decode_s"]))
            add_row(rows, row["codec"], f"{row['numel']:,}", *times, share)
    return draw([uncut(rows), "", paragraph(f"All sizes: {answer['path']}")], **screen)


def overlap(*, shapes: str, ranks: int = 2, out: OutPath | None = None, again: bool = False, json: bool = False) -> int:
    """Time a matmul beside its all-gather or reduce-scatter in every form, and choose one: plain unless 5 % are won.

    Example: `headway comm overlap --shapes 512x1024x4096,rs:512x4096x1024 --json`

    Args:
      shapes:
        MxKxN, separated by commas: the matmul of one rank. The M rows are gathered from all ranks; rs:MxKxN scatters
        the M rows of the sum over ranks instead.
      ranks: Processes on this host, over gloo; a rank that a launcher started measures with the launcher's ranks.
      out:
        The table of what was measured; overlap.json in this directory by default. Put it into a run folder to predict
        from.
      again: Measure the shapes anew that the table has already.
      json: Print one JSON object (schema headway.comm-overlap/1) instead of text.
    """
    read = [read_shape(name) for name in shapes.split(",")]
    path = out or Path(OVERLAP_FILE)
    table = measure_forms(read, path, ranks=ranks, again=again)
    rows = [row for shape in dict.fromkeys(read) if (row := table.of(shape)) is not None]
    forms = [
        {
            "shape": row.shape, "chosen": row.chosen, "plain_s": row.seconds("plain"),
            "chosen_s": row.seconds(row.chosen), "ideal_s": row.ideal_s,
        }
        for row in rows
    ]  # fmt: skip
    facts: dict[str, Any] = {
        "schema": SCHEMA, "rows": forms, "ranks": table.ranks, "device": table.device, "dtype": table.dtype,
        "path": str(path),
    }  # fmt: skip
    if os.environ.get("RANK", "0") == "0":  # of a launcher's ranks one speaks
        emit(facts, lambda screen: _choices(facts, screen), as_json=json)
    return 0


def _choices(facts: Mapping[str, Any], screen: ScreenOptions) -> str:
    rows = headed("shape", "chosen", "plain", "chosen", "ideal", "", align="left left right right right right")
    for row in facts["rows"]:
        times = (format_seconds(row[name]) for name in ("plain_s", "chosen_s", "ideal_s"))
        add_row(rows, row["shape"], row["chosen"], *times, f"{row['plain_s'] / row['chosen_s']:.2f}x")
    note = f"{facts['ranks']} ranks, {facts['dtype']} on {facts['device']}. Ideal: the longer of matmul and collective."
    return draw([uncut(rows), "", paragraph(f"{note} Kept in {facts['path']}.")], **screen)


NAMES = ("raw", "half", "between hosts", "two-level", "on the CPU")
"""What the options of the published costs do."""


def options(*, devices: str = "gpu,cpu", json: bool = False) -> int:
    """List every way to bring the gradients of one tensor together, with and without a codec (Espresso's tree).

    Example: `headway comm options --devices gpu`

    Args:
      devices: What encodes and decodes: gpu, cpu, or gpu,cpu.
      json: Print one JSON object (schema headway.comm-options/1) instead of text.
    """
    found = list(tree(tuple(word.strip() for word in devices.split(","))))
    answer = {"schema": "headway.comm-options/1", "count": len(found), "options": found}
    return emit(answer, lambda screen: "\n".join([*found, f"{len(found)} options."]), as_json=json)


def strategy(
    *, models: Path, setups: Path, model: str, cost: str, options: GivenPath | None = None,
    codecs: GivenPath | None = None, json: bool = False,
) -> int:  # fmt: skip
    """Search the option of each gradient under which an iteration is shortest (simulated).

    Example: `headway comm strategy --models models.json --setups setups.json --model vgg16 --cost published-gpu`

    Args:
      models:
        A file {MODEL: {"tensors": [[NAME, NUMBERS], ...], "gap_us": [...]}}, tensors in the order in which backward
        completes them.
      setups:
        A file [{"model", "codec", "hosts", "ranks_per_host", "inside": "pcie" or "nvlink", "wire_fraction",
        "two_level"}, ...], one for each model.
      model: Its name.
      cost: What a plan costs: published-gpu, published-cpu (Espresso's artifact), or stages (every option of the tree).
      options: Price the plan of this file, as --json prints it or a bare list, and search none.
      codecs:
        A file {CODEC: {"total_us": [4], "decode_us": [4]}}; codecs.json beside SETUPS by default, or the published
        times.
      json: Print one JSON object (schema headway.comm-strategy/1) instead of text.
    """
    wanted = None if options is None else _options(options)
    pricing = _pricing(models, setups, model, cost, codecs, wanted or [])
    # Compiles, or loads what was compiled, before the clock starts.
    raw = pricing.cost(np.full(len(pricing.sizes), pricing.raw))
    began = time.process_time()
    if wanted is None:
        found = search(pricing)
        plan, price, uniform = found.options, found.cost, found.uniform
        seconds = time.process_time() - began
    else:
        plan = _plan(wanted, pricing)
        price, seconds = pricing.cost(plan), 0.0
        uniform = pricing.uniform()
    answer = {
        "schema": "headway.comm-strategy/1", "model": model, "cost": cost, "cost_us": price, "raw_us": raw,
        "uniform_us": min(uniform.values()),
        "options": [pricing.names[option] if pricing.names else option for option in plan.tolist()],
        "search_s": seconds,
    }  # fmt: skip
    return emit(answer, lambda screen: _strategy_screen(answer, screen), as_json=json)


def _pricing(
    models: Path, setups: Path, model: str, cost: str, codecs: Path | None, wanted: list[str | int]
) -> Pricing:
    """Return what the search chooses from. Raises `InputError` where files do not hold it."""
    make = pick(COSTS, cost, "cost")
    gradients = pick(read_models(models), model, f"model of {models}")
    of_model: list[PublishedSetup] = [setup for setup in read_setups(setups) if setup.model == model]
    if len(of_model) != 1:
        raise InputError(f"{setups} has {plural(len(of_model), 'setup')} of {model}; leave exactly one.")
    beside = setups.parent / "codecs.json"
    path = codecs or (beside if beside.is_file() else None)
    names = list(dict.fromkeys(option for option in wanted if isinstance(option, str)))
    more = {"also": names} if cost == "stages" else {}
    return make(gradients, of_model[0], *([] if path is None else [read_codecs(path)]), **more)


def _options(path: Path) -> list[str | int]:
    """Return the options that a file holds. Raises `InputError` where it holds none."""
    found = read_json(path)
    found = found.get("options") if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(type(each) in (str, int) for each in found):
        raise InputError(f'{path} holds no plan; write a list of options, or an object with the key "options".')
    return found


def _plan(wanted: list[str | int], pricing: Pricing) -> NDArray[np.int64]:
    """Return the plan of options by number. Raises `InputError` where the cost does not know them."""
    index: dict[str | int, int] = {name: at for at, name in enumerate(pricing.names)}
    index = index or {option: option for option in pricing.options}
    unknown = [option for option in wanted if option not in index]
    if unknown:
        known = "options by name (headway comm options)" if pricing.names else f"the numbers {list(pricing.options)}"
        raise InputError(f"the plan has the option {unknown[0]!r}; this cost and setup take {known}.")
    return np.array([index[option] for option in wanted], np.int64)


def _strategy_screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    rows = grid("left", "right")
    keys = {"this plan": "cost_us", "best option for all": "uniform_us", "nothing compressed": "raw_us"}
    for what, key in keys.items():
        add_row(rows, what, format_seconds(answer[key] / 1e6))
    chosen = grid("right", "left")
    for option, count in Counter(answer["options"]).most_common():
        add_row(chosen, str(count), option if isinstance(option, str) else f"{option} {NAMES[option]}")
    note = f"Simulated, by the cost {answer['cost']}."
    if answer["search_s"]:
        note += f" Search: {format_seconds(answer['search_s'])} of CPU."
    return draw([uncut(rows), "", uncut(chosen), "", paragraph(note)], **screen)
