"""`headway parallel plan`: which device runs which layers.

`headway parallel ntp`: tensor-parallel groups that lost devices train on; what moves, what throughput is left.
"""

from __future__ import annotations

import math
import time
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from rich.text import Text

from headway.core.errors import InputError
from headway.core.files.safe_files import number_of, read_toml
from headway.core.mesh import Mesh
from headway.core.tables import pick
from headway.core.units import NS_PER_S, format_bytes, format_fraction, format_seconds, parse_bytes, plural
from headway.cost.transformer import Transformer
from headway.parallel.availability import (
    MeshPlan,
    PowerBoost,
    ShardMap,
    attention_units,
    availability,
    failed_devices,
    plan_mesh,
)
from headway.parallel.planning.graph import GraphCluster, GraphPlan, plan_graph
from headway.parallel.planning.grid import GridCluster, plan_grid
from headway.parallel.planning.hierarchical import PartitionPlan, Topology, search
from headway.parallel.planning.layers import LayerGraph
from headway.report.paper import add_row, draw, grid, headed, paragraph, uncut
from headway.sim.pipeline.orders import GraphFile
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath, Size

SCHEMA = "headway.parallel.plan/1"
"""Of every answer of `plan`."""


def plan(
    *, profile: GivenPath | None = None, levels: str | None = None, bandwidth: str | None = None,
    memory: Size | None = None, allreduce: str = "sum", transfers: str = "published", shape: GivenPath | None = None,
    graph: GivenPath | None = None, microbatches: int | None = None, overhead_ns: int = 0, replicate: bool = False,
    split_dense: str | None = None, devices: int | None = None, device: str | None = None, devices_per_host: int = 8,
    link: str = "infiniband-hdr", schedule: str = "1f1b", json: AsJson = False,
) -> int:  # fmt: skip
    """Predict which device runs what of a model best: from a profile or a graph of its layers, or its shape.

    With --profile: stages and replicas of each, exact for PipeDream's model of time. With --graph: stages that form a
    graph, so that branches of the model run side by side (GraphPipe), beside the best chain of stages, both simulated.
    With --shape: degrees of tensor, pipeline and data parallelism, microbatch and recomputation of PTD-P.

    Example: `headway parallel plan --profile graph.txt --levels 4,4 --bandwidth 1e10,1.25e9`

    Args:
      profile: A profile as PipeDream's profiler writes it: layers with times in ms and sizes in bytes, then edges.
      levels: Devices of a machine, machines of a rack, ...: sizes of the levels, the fastest links first.
      bandwidth: Bytes per second of the links of each level; with --graph one number, without it messages take no time.
      memory: Memory of a device, for example 16GiB; no limit without it.
      allreduce: How computation and the all-reduce of gradients add up: sum, or overlap.
      transfers: What passes between stages: published (as PipeDream's code counts it), exact, or none.
      shape: A TOML file: layers, hidden, heads, sequence, vocabulary, batch (sequences), and what `Transformer` has.
      graph:
        A JSON file {"layers": [...]}: name, preds (names of those that feed it), forward_ns and backward_ns of a
        microbatch, and where they matter output_bytes and parameter_bytes.
      microbatches: Microbatches of a step, with --graph; as many as devices without it.
      overhead_ns:
        What a forward or backward of a stage takes beside its layers, with --graph; it decides the microbatch's size.
      replicate: With --graph, several devices may share a stage; needs --bandwidth.
      split_dense:
        With --graph, dense layers on concatenated inputs, with commas: planned as a product per input, and their sum.
      devices: Devices of the job.
      device: Their name in the table of devices, for example A100-SXM4-80GB.
      devices_per_host: Devices of one host.
      link: Name of the link of a device towards other hosts.
      schedule: What the pipelines of --shape run: 1f1b, or two_buffer, which trains on weights of one step before.
    """
    if sum(given is not None for given in (profile, graph, shape)) != 1:
        raise InputError("nothing says what to plan, or two things do. Give --profile, --graph or --shape.")
    if profile is not None:
        topology = _topology(levels, bandwidth, memory)
        found = search(LayerGraph.from_pipedream(profile), topology, allreduce=allreduce, transfers=transfers)
        answer = {"schema": SCHEMA, "simulated": True, "profile": str(profile), **asdict(found)}
        return emit(answer, lambda screen: draw(_lines(found), **screen), as_json=json)
    if graph is not None:
        links = _connected(devices, bandwidth, memory, overhead_ns, replicate)
        return _graph(graph, links, microbatches, split_dense, json)
    if shape is None or devices is None or device is None:
        raise InputError("the devices are not known. Give --devices N and --device NAME.")
    cluster = GridCluster.of(device, devices, devices_per_host=devices_per_host, link=link)
    return _grid(*_model(shape), cluster, schedule, json)


def _topology(levels: str | None, bandwidth: str | None, memory: str | None) -> Topology:
    """Read the levels of links."""
    if levels is None or bandwidth is None:
        raise InputError("the links are not known. Give --levels and --bandwidth, for example 4,4 and 1e10,1.25e9.")
    sizes, rates = _numbers("--levels", levels), _numbers("--bandwidth", bandwidth)
    if any(size != int(size) for size in sizes):
        raise InputError(f"--levels is {levels}; give whole numbers.")
    return Topology(tuple(map(int, sizes)), rates, math.inf if memory is None else parse_bytes(memory))


def _connected(
    devices: int | None, bandwidth: str | None, memory: str | None, overhead_ns: int, replicate: bool
) -> GraphCluster:
    """Read devices that are all connected alike."""
    if devices is None:
        raise InputError("the devices are not known. Give --devices N.")
    rates = (math.inf,) if bandwidth is None else _numbers("--bandwidth", bandwidth)
    if len(rates) != 1:
        raise InputError(f"--bandwidth is {bandwidth}; with --graph all links are alike. Give one number.")
    room = math.inf if memory is None else parse_bytes(memory)
    return GraphCluster(devices, rates[0], room, overhead_ns / NS_PER_S, replicate)


def _graph(path: Path, cluster: GraphCluster, microbatches: int | None, split_dense: str | None, as_json: bool) -> int:
    content = GraphFile.read(path)
    layers = LayerGraph(
        names=tuple(row.name for row in content.rows),
        forward_s=tuple(row.forward_ns / NS_PER_S for row in content.rows),
        backward_s=tuple(row.backward_ns / NS_PER_S for row in content.rows),
        output_bytes=tuple(row.output_bytes for row in content.rows),
        parameter_bytes=tuple(row.parameter_bytes for row in content.rows),
        edges=tuple((source, layer) for layer, sources in enumerate(content.preds) for source in sources),
    )
    for name in split_dense.split(",") if split_dense else ():
        layers = layers.split_by_inputs(name)
    begin = time.perf_counter()
    chosen = plan_graph(layers, cluster, microbatches)
    search_s = time.perf_counter() - begin
    facts = {"schema": SCHEMA, "simulated": True, "graph": str(path), "search_s": search_s, **asdict(chosen)}
    rows = headed("stage", "after", "layers", "devices", "from .. to", align="right left right right left")
    for number, stage in enumerate(chosen.stages):
        ends = f"{stage.layers[0][:40]} .. {stage.layers[-1][:40]}"
        after = ", ".join(map(str, stage.preds))
        add_row(rows, str(number), after, str(len(stage.layers)), str(stage.devices), ends)
    text = paragraph(_said(chosen, search_s))
    return emit(facts, lambda screen: draw([uncut(rows), "", text], **screen), as_json=as_json)


def _said(chosen: GraphPlan, search_s: float) -> str:
    """Return what a step takes, and what the search assumed."""
    size = chosen.stages[0].microbatch
    chain_s = chosen.chain_objective_s
    sentences = [
        f"{format_seconds(chosen.objective_s)} per step, simulated; the best chain of stages "
        f"{'does not fit' if chain_s is None else f'takes {format_seconds(chain_s)}'}. "
        f"Searched in {format_seconds(search_s)}.",
        *([f"A microbatch is {size} of the file's."] if size > 1 else []),
    ]
    sentences += [
        f"The graph is not series-parallel: searched as if {', '.join(behind)} needed {', '.join(before)}."
        for before, behind in chosen.merged
    ]
    return " ".join(sentences)


def _model(path: Path) -> tuple[Transformer, int]:
    """Read a model's shape and the sequences of a step; raises `InputError` naming the key."""
    table = read_toml(path)
    known = {field.name: field for field in fields(Transformer)}
    for key, value in table.items():
        wanted = bool if key in known and isinstance(known[key].default, bool) else int
        pick({**known, "batch": None}, key, f"key of {path.name}")
        if type(value) is not wanted:
            raise InputError(
                f"{key} = {value!r} in {path.name}; give {'true or false' if wanted is bool else 'a whole number'}."
            )
        if wanted is int:
            number_of(value, f"{key} in {path.name}")
    needed = [name for name, field in known.items() if field.default is MISSING]
    for key in [*needed, "batch"]:
        if key not in table:
            raise InputError(f"{path.name} has no {key}. Add it: {', '.join([*needed, 'batch'])} are needed.")
    batch = table.pop("batch")
    return Transformer(**table), batch


def _grid(model: Transformer, batch: int, cluster: GridCluster, schedule: str, as_json: bool) -> int:
    found = plan_grid(model, batch, cluster, schedule)
    choice, alone_s = found.choice, found.without_pipeline_s
    why = f"the shortest simulated step of {found.num_simulated} of {found.num_candidates} layouts that fit"
    if choice.pp == 1:
        why += "; do not pipeline: no pipeline is faster"
    elif alone_s is None:
        why += "; without a pipeline nothing fits the memory"
    else:
        why += f"; the best without a pipeline takes {format_seconds(alone_s)}"
    degrees = {key: value for key, value in asdict(choice).items() if key != "num_microbatches"}
    answer = {
        "schema": SCHEMA, "simulated": True, **degrees, "step_s": found.step_s, "memory_bytes": found.memory_bytes,
        "why": why,
    }  # fmt: skip
    rows = grid("left", "right")
    for key, value in degrees.items():
        add_row(rows, key, str(value))
    add_row(rows, "step", format_seconds(found.step_s))
    add_row(rows, "memory of a device", format_bytes(found.memory_bytes))
    words = f"{why[0].upper()}{why[1:]}. Rates of devices other than the A100 are assumed to fall short alike."
    return emit(answer, lambda screen: draw([uncut(rows), "", paragraph(words)], **screen), as_json=as_json)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """Read numbers separated by commas."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"{option} is {text!r}; give numbers separated by commas, one per level.") from None


def _lines(found: PartitionPlan) -> list[Any]:
    rows = headed("stage", "layers", "devices", "from .. to", align="right right right left")
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


def ntp(
    *, units: int | None = None, heads: int | None = None, kv_heads: int | None = None, tp: str,
    reduced: int | None = None, table: bool = False, devices: int | None = None, failed: float | None = None,
    dp: int | None = None, pp: int = 1, lost: str | None = None, power_boost: float | None = None,
    power_exponent: float = 3.0, json: AsJson = False,
) -> int:  # fmt: skip
    """Plan a tensor-parallel group that lost devices and trains on with the others (nonuniform tensor parallelism).

    Without --table: how many units each rank computes with, and synchronises with the smaller replica, and what moves
    between the ranks of a whole replica for that. With --lost: which groups of a job's mesh form a replica after ranks
    failed, the degree and the share of the batch of each. With --table: the throughput that is left when devices
    failed, if what lost one is dropped and if it goes on.

    Example: `headway parallel ntp --units 64 --tp 8 --reduced 7`

    Args:
      units: What a layer can be cut into: groups of heads, columns of the feed-forward layer, rows of the vocabulary.
      heads: Query heads of an attention layer, instead of --units; with --kv-heads.
      kv_heads: Its key and value heads; a unit is one of them with the query heads that read it.
      tp: Devices of a whole group; with --table several, separated by commas.
      reduced: Devices that remain in the group.
      table: Print the table of throughput.
      devices: Devices of the job, with --table.
      failed: How many of them have failed on average: a fraction below 1 (of whole devices), or a number from 1 on.
      dp: Replicas of the job, with --lost.
      pp: Stages of a pipeline, each a group, with --table and --lost.
      lost: Ranks that failed, separated by commas; ranks are numbered along tp first, then dp, then pp.
      power_boost:
        Power that the remaining devices of a group may take, as a multiple, for example 1.3; no boost without it.
      power_exponent: Power grows as the clock to this exponent.
    """
    boost = PowerBoost(1.0 if power_boost is None else power_boost, power_exponent)
    degrees = _integers("--tp", tp, "8,64")
    if lost is not None:
        if dp is None or len(degrees) != 1 or table or any(v is not None for v in (units, heads, kv_heads, reduced)):
            raise InputError("--lost is about a job's mesh. Give one --tp, --dp and --pp, and nothing of a layer.")
        failures = _integers("--lost", lost, "3,17")
        return _mesh(plan_mesh(Mesh({"tp": degrees[0], "dp": dp, "pp": pp}), failures, boost), degrees[0], json)
    if table:
        if devices is None or failed is None:
            raise InputError("the failures are not known. Give --devices N and --failed F.")
        if any(given is not None for given in (units, heads, kv_heads, reduced)):
            raise InputError("--table is about whole groups. Drop --units, --heads, --kv-heads and --reduced.")
        return _table(devices, failed, degrees, pp, boost, json)
    if devices is not None or failed is not None:
        raise InputError("--devices and --failed belong to the table. Add --table, or drop them.")
    if len(degrees) != 1 or reduced is None:
        raise InputError("the group is not known. Give one --tp and --reduced, or --table.")
    if (units is None) == (heads is None) or (heads is None) != (kv_heads is None):
        raise InputError("the units are not known. Give --units, or --heads and --kv-heads.")
    if heads is not None and kv_heads is not None:
        units = attention_units(heads, kv_heads)
    shards = ShardMap.build(units or 0, degrees[0], reduced)
    return _plan(shards, boost, power_boost is not None, json)


def _integers(option: str, text: str, example: str) -> list[int]:
    """Read whole numbers separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"{option} is {text!r}; give whole numbers separated by commas, as in {example}.") from None


def _mesh(plan: MeshPlan, tp: int, as_json: bool) -> int:
    facts = {"schema": "headway.parallel.ntp-mesh/1", **asdict(plan)}
    rows = headed("groups of replicas", "devices left", "tp", "batch", align="left left right right")
    for replica in plan.replicas:
        if replica.remaining != (tp,) * len(replica.remaining):
            texts = (" ".join(map(str, numbers)) for numbers in (replica.groups, replica.remaining))
            add_row(rows, *texts, str(replica.tp or "dropped"), format_fraction(replica.batch_share))
    explanation = (
        f"{format_fraction(plan.throughput)} of the throughput is left. One row per replica that lost devices: the "
        f"replica of which each stage has the group; the others are whole."
    )
    return emit(facts, lambda screen: draw([uncut(rows), "", paragraph(explanation)], **screen), as_json=as_json)


def _plan(shards: ShardMap, boost: PowerBoost, boosted: bool, as_json: bool) -> int:
    tp, reduced = len(shards.comp), len(shards.sync)
    facts: dict[str, object] = {
        "schema": "headway.parallel.ntp/1", "moves": len(shards.moves), "sizes_comp": list(shards.sizes.comp),
        "sizes_sync": list(shards.sizes.sync), "max_link_load": shards.max_link_load,
    }  # fmt: skip
    share, speed_up = boost.batch_share(tp, reduced), boost.speed_up(tp, reduced)
    if boosted:
        facts |= {"speed_up": speed_up, "power": boost.power(tp, reduced), "batch_share": share}
    rows = grid("left", "left")
    add_row(rows, "units per rank, whole replica", " ".join(map(str, shards.sizes.comp)))
    add_row(rows, "units per rank, smaller replica", " ".join(map(str, shards.sizes.sync)))
    add_row(rows, "clock that would hide the loss", f"{tp / reduced:.3f}x")
    explanation = (
        f"Gradients of {plural(len(shards.moves), 'unit')} of {shards.units} move inside each whole replica before "
        f"they are summed over replicas, and back after it; at most {plural(shards.max_link_load, 'unit')} between "
        f"two ranks. The smaller replica takes {format_fraction(share)} of a replica's batch"
        + (f", at {speed_up:.3f}x the clock and {boost.power(tp, reduced):.2f}x the power." if boosted else ".")
    )
    return emit(facts, lambda screen: draw([uncut(rows), "", paragraph(explanation)], **screen), as_json=as_json)


def _table(devices: int, failed: float, degrees: list[int], pp: int, boost: PowerBoost, as_json: bool) -> int:
    table = availability(devices, failed, degrees, pp, boost=boost)
    facts = {"schema": "headway.parallel.ntp-table/1", "rows": [asdict(row) for row in table]}
    rows = headed("tp", "dropped, packed", "dropped", "NTP, packed", "NTP", align="right right right right right")
    for row in table:
        cells = (row.drop_packed, row.drop_unpacked, row.ntp_packed, row.ntp_unpacked)
        add_row(rows, str(row.tp), *(f"{value:.3f}" for value in cells))
    explanation = (
        f"Mean throughput with {failed_devices(devices, failed)} of {devices} devices failed on average, as a fraction "
        "of that without failures. Packed: groups alike share replicas. Dropped: what lost a device is not used."
    )
    return emit(facts, lambda screen: draw([uncut(rows), "", paragraph(explanation)], **screen), as_json=as_json)
