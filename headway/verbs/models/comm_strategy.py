"""`headway comm options` and `comm strategy`: the ways to compress a gradient, and a plan of one for each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.comm.compression.options import COSTS
from headway.comm.compression.options import options as tree
from headway.comm.compression.published import PublishedSetup, read_codecs, read_models, read_setups
from headway.comm.compression.strategy_search import Pricing, search
from headway.core.errors import InputError
from headway.core.files.bounded_json import read_json
from headway.core.tables import pick
from headway.core.units import format_seconds, plural
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, uncut
from headway.verbs.shared.output import emit

NAMES = ("raw", "half", "between hosts", "two-level", "on the CPU")
"""What the options of the published costs do."""


def options(*, devices: str = "gpu,cpu", json: bool = False) -> int:
    """List every way to bring the gradients of one tensor together, with and without a codec (Espresso's tree).

    Example: `headway comm options --devices gpu`

    Parameters
    ----------
    devices
        What encodes and decodes: gpu, cpu, or gpu,cpu.
    json
        Print one JSON object (schema headway.comm-options/1) instead of text.
    """
    found = list(tree(tuple(word.strip() for word in devices.split(","))))
    answer = {"schema": "headway.comm-options/1", "count": len(found), "options": found}
    emit(answer, lambda screen: "\n".join([*found, f"{len(found)} options."]), as_json=json)
    return 0


def strategy(
    *,
    models: Path,
    setups: Path,
    model: str,
    cost: str,
    options: Path | None = None,
    codecs: Path | None = None,
    json: bool = False,
) -> int:
    """Search the option of each gradient under which an iteration is shortest (simulated).

    Example: `headway comm strategy --models models.json --setups setups.json --model vgg16 --cost published-gpu`

    Parameters
    ----------
    models
        A file {MODEL: {"tensors": [[NAME, NUMBERS], ...], "gap_us": [...]}}, tensors in the order in which backward
        completes them.
    setups
        A file [{"model", "codec", "hosts", "ranks_per_host", "inside": "pcie" or "nvlink", "wire_fraction",
        "two_level"}, ...], one for each model.
    model
        Its name.
    cost
        What a plan costs: published-gpu, published-cpu (Espresso's artifact), or stages (every option of the tree).
    options
        Price the plan of this file, as --json prints it or a bare list, and search none.
    codecs
        A file {CODEC: {"total_us": [4], "decode_us": [4]}}; codecs.json beside SETUPS by default, or the published
        times.
    json
        Print one JSON object (schema headway.comm-strategy/1) instead of text.
    """
    wanted = None if options is None else _options(options)
    pricing = _pricing(models, setups, model, cost, codecs, wanted or [])
    num = len(pricing.sizes)
    # Compiles, or loads what was compiled, before the clock starts.
    raw = pricing.cost(np.full(num, pricing.raw))
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
        "schema": "headway.comm-strategy/1",
        "model": model,
        "cost": cost,
        "cost_us": price,
        "raw_us": raw,
        "uniform_us": min(uniform.values()),
        "options": [pricing.names[option] if pricing.names else option for option in plan.tolist()],
        "search_s": seconds,
    }
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 0


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


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    """Draw what the plan costs, and how often it has which option."""
    rows = grid("left", "right")
    for what, key in (
        ("this plan", "cost_us"),
        ("best option for all", "uniform_us"),
        ("nothing compressed", "raw_us"),
    ):
        add_row(rows, what, format_seconds(answer[key] / 1e6))
    chosen = grid("right", "left")
    for option, count in Counter(answer["options"]).most_common():
        add_row(chosen, str(count), option if isinstance(option, str) else f"{option} {NAMES[option]}")
    note = f"Simulated, by the cost {answer['cost']}."
    if answer["search_s"]:
        note += f" Search: {format_seconds(answer['search_s'])} of CPU."
    return draw([uncut(rows), "", uncut(chosen), "", paragraph(note)], **screen)
