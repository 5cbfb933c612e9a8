"""`headway parallel plan`: which device runs which layers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.errors import InputError
from headway.core.units import format_seconds, parse_bytes
from headway.parallel.planning.hierarchical import PartitionPlan, Topology, search
from headway.parallel.planning.layers import LayerGraph
from headway.report.paper import add_row, draw, grid, paragraph, uncut
from headway.verbs.output import emit


def plan(
    *,
    profile: Path,
    levels: str,
    bandwidth: str,
    memory: str | None = None,
    allreduce: str = "sum",
    transfers: str = "published",
    json: bool = False,
) -> int:
    """Split a model into stages and say how many devices run each, from a profile of its layers.

    Exact for PipeDream's model of time: the slowest stage or transfer per minibatch in steady state.

    Example: `headway parallel plan --profile graph.txt --levels 4,4 --bandwidth 1e10,1.25e9`

    Parameters
    ----------
    profile
        A profile as PipeDream's profiler writes it: layers with times in ms and sizes in bytes, then edges.
    levels
        Devices of a machine, machines of a rack, ...: sizes of the levels, the fastest links first.
    bandwidth
        Bytes per second of the links of each level.
    memory
        Memory of a device, for example 16GiB; no limit without it.
    allreduce
        How computation and the all-reduce of gradients add up: sum, or overlap.
    transfers
        What passes between stages: published (as PipeDream's code counts it), exact, or none.
    json
        Print one JSON object instead of text.
    """
    sizes, rates = _numbers("--levels", levels), _numbers("--bandwidth", bandwidth)
    if any(size != int(size) for size in sizes):
        raise InputError(f"--levels is {levels}; give whole numbers.")
    topology = Topology(tuple(map(int, sizes)), rates)
    if memory is not None:
        topology = Topology(topology.sizes, rates, parse_bytes(memory))
    found = search(LayerGraph.from_pipedream(profile), topology, allreduce=allreduce, transfers=transfers)
    answer = {"schema": "headway.parallel.plan/1", "simulated": True, "profile": str(profile), **asdict(found)}
    emit(answer, lambda screen: draw(_lines(found), **screen), as_json=json)
    return 0


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """Read numbers separated by commas."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"{option} is {text!r}; give numbers separated by commas, one per level.") from None


def _lines(found: PartitionPlan) -> list[Any]:
    """Return a row per stage."""
    rows = grid("right", "right", "right", "left")
    add_row(rows, "stage", "layers", "devices", "from .. to", style="dim")
    for number, stage in enumerate(found.stages):
        ends = f"{stage.layers[0][:40]} .. {stage.layers[-1][:40]}"
        add_row(rows, str(number), str(stage.num_layers), str(stage.replicas), ends)
    words = (
        f"{format_seconds(found.objective_s)} per minibatch in steady state, by the model; with data parallelism alone "
        f"{format_seconds(found.data_parallel_s)}."
    )
    if len(found.stages) == 1:
        words += " Do not pipeline: one stage on all devices is the fastest."
    return [Text(f"  {found.objective_s:.7f} s, simulated"), "", uncut(rows), "", paragraph(words)]
