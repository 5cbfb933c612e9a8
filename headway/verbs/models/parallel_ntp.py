"""`headway parallel ntp`: tensor-parallel groups that lost devices train on; what moves, what throughput is left."""

from __future__ import annotations

from dataclasses import asdict

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.core.units import format_fraction, plural
from headway.parallel.availability import (
    AvailabilityRow,
    MeshPlan,
    PowerBoost,
    ShardMap,
    attention_units,
    availability,
    failed_devices,
    plan_mesh,
)
from headway.report.paper import add_row, draw, grid, headed, paragraph, uncut
from headway.verbs.shared.output import AsJson, emit


def ntp(
    *,
    units: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    tp: str,
    reduced: int | None = None,
    table: bool = False,
    devices: int | None = None,
    failed: float | None = None,
    dp: int | None = None,
    pp: int = 1,
    lost: str | None = None,
    power_boost: float | None = None,
    power_exponent: float = 3.0,
    json: AsJson = False,
) -> int:
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
        "schema": "headway.parallel.ntp/1",
        "moves": len(shards.moves),
        "sizes_comp": list(shards.sizes.comp),
        "sizes_sync": list(shards.sizes.sync),
        "max_link_load": shards.max_link_load,
    }
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
        add_row(rows, str(row.tp), *_cells(row))
    explanation = (
        f"Mean throughput with {failed_devices(devices, failed)} of {devices} devices failed on average, as a fraction "
        "of that without failures. Packed: groups alike share replicas. Dropped: what lost a device is not used."
    )
    return emit(facts, lambda screen: draw([uncut(rows), "", paragraph(explanation)], **screen), as_json=as_json)


def _cells(row: AvailabilityRow) -> list[str]:
    return [f"{value:.3f}" for value in (row.drop_packed, row.drop_unpacked, row.ntp_packed, row.ntp_unpacked)]
