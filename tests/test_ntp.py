"""Nonuniform tensor parallelism: laws of the map, the table against every set of failures, bad input, the verb."""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headway.core.mesh import Mesh
from headway.parallel import ShardMap
from headway.parallel.availability import PowerBoost, attention_units, availability, plan_mesh
from tests.launching import json_of, refusal
from tests.refusals import refused

PUBLISHED = {8: (0.991, 0.939, 0.999, 0.992), 32: (0.966, 0.778, 0.999, 0.993), 64: (0.932, 0.606, 0.999, 0.994)}
"""tp -> dropped packed and not, NTP packed and not: 32,768 devices, 0.1 % failed, pp 8."""


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, int]:
    """Units, a full degree and a reduced one."""
    tp = draw(st.integers(1, 72))
    return draw(st.integers(1, 256)), tp, draw(st.integers(1, tp))


def check_map(units: int, tp: int, reduced: int) -> None:
    """Assert what holds for every map: both layouts have each unit once, even sizes, the fewest moves, even links."""
    shards = ShardMap.build(units, tp, reduced)
    owner, target = ({u: r for r, held in enumerate(layout) for u in held} for layout in (shards.comp, shards.sync))
    moved = {unit: (owner[unit], target[unit]) for unit in range(units) if owner[unit] != target[unit]}

    for layout, num_ranks in ((shards.comp, tp), (shards.sync, reduced)):
        assert len(layout) == num_ranks
        assert sorted(itertools.chain(*layout)) == list(range(units))
        assert max(map(len, layout)) - min(map(len, layout)) <= 1
    assert {unit: (source, to) for unit, source, to in shards.moves} == moved
    # A rank can keep no more units than it has in the smaller of its two layouts.
    assert len(moved) == units - sum(map(min, *shards.sizes))
    lacking = [goal - size for size, goal in zip(*shards.sizes, strict=False)]
    even = max(
        -(-max(lacking) // max(tp - reduced, 1)),
        -(-max(shards.sizes.comp[reduced:], default=0) // max(1, sum(lack > 0 for lack in lacking))),
    )
    assert shards.max_link_load == max(Counter(moved.values()).values(), default=0) <= even + 1


@given(groups())
def test_a_map_has_every_unit_once_in_even_sizes_with_the_fewest_moves_over_even_links(shape):
    check_map(*shape)


@pytest.mark.parametrize(
    ("shape", "sync", "moves"),
    [((64, 8, 7), {9: 6, 10: 1}, 8), ((128, 64, 62), {2: 58, 3: 4}, 4), ((96, 8, 5), {19: 4, 20: 1}, 36)],
)
def test_what_a_split_by_chunks_leaves_uneven_or_cannot_split_is_even(shape, sync, moves):
    shards = ShardMap.build(*shape)

    check_map(*shape)
    assert Counter(shards.sizes.sync) == sync
    assert len(shards.moves) == moves


@pytest.mark.parametrize("tp", PUBLISHED)
def test_the_table_is_within_three_tenths_of_a_point_of_the_published_one(tp):
    [row] = availability(32768, 0.001, [tp], 8)

    figures = (row.drop_packed, row.drop_unpacked, row.ntp_packed, row.ntp_unpacked)
    assert figures == pytest.approx(PUBLISHED[tp], abs=0.003)


def pace_of(lost: list[int], tp: int, pp: int, boost: PowerBoost) -> tuple[float, ...]:
    """Return the four figures of groups that lost these numbers of devices, replica by replica."""
    figures = []
    for pace in (lambda k: float(k == 0), lambda k: boost.batch_share(tp, tp - k)):
        for order in (sorted(lost), lost):
            replicas = [order[begin : begin + pp] for begin in range(0, len(order), pp)]
            figures.append(sum(pace(max(replica)) for replica in replicas) / len(replicas))
    return tuple(figures)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(4, 10), st.integers(0, 10), st.floats(1, 10))
def test_the_table_is_the_mean_over_every_set_of_failed_devices(tp, pp, devices, failed, limit):
    assume(tp * pp <= devices and failed <= devices)
    boost, chance = PowerBoost(limit), failed / devices
    mean = [0.0] * 4
    for broken in itertools.product((False, True), repeat=devices):
        weight = chance ** sum(broken) * (1 - chance) ** (devices - sum(broken))
        lost = [sum(broken[g * tp : (g + 1) * tp]) for g in range(devices // (tp * pp) * pp)]
        mean = [m + weight * figure for m, figure in zip(mean, pace_of(lost, tp, pp, boost), strict=True)]

    [row] = availability(devices, failed, [tp], pp, boost=boost)

    assert (row.drop_packed, row.drop_unpacked, row.ntp_packed, row.ntp_unpacked) == pytest.approx(mean, abs=1e-9)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_no_other_choice_of_groups_and_degree_keeps_more_throughput(tp, dp, pp, data):
    failed = data.draw(st.sets(st.integers(0, tp * dp * pp - 1)))
    remaining = [
        [sum(rank not in failed for rank in range((s * dp + r) * tp, (s * dp + r + 1) * tp)) for r in range(dp)]
        for s in range(pp)
    ]
    assume(all(map(any, remaining)))
    choices = itertools.product(*(itertools.permutations(stage) for stage in remaining))
    smallest = [[min(replica) for replica in zip(*choice, strict=True)] for choice in choices]
    best = max(
        sum(1 if count == tp else reduced / tp if count >= reduced else 0 for count in replicas)
        for replicas in smallest
        for reduced in range(1, tp + 1)
    )

    plan = plan_mesh(Mesh({"tp": tp, "dp": dp, "pp": pp}), failed)

    assert plan.throughput == pytest.approx(best / dp)
    for stage in range(pp):
        assert sorted(replica.groups[stage] for replica in plan.replicas) == list(range(dp))
    for replica in plan.replicas:
        assert replica.remaining == tuple(remaining[s][g] for s, g in enumerate(replica.groups))
        assert replica.tp in (0, plan.reduced, tp)
        assert replica.tp <= min(replica.remaining)


def test_power_hides_a_loss_where_its_limit_allows():
    enough, little = PowerBoost(1.3), PowerBoost(1.02)

    assert enough.speed_up(64, 63) == 64 / 63
    assert enough.batch_share(64, 63) == pytest.approx(1)
    assert little.batch_share(64, 63) == pytest.approx(63 / 64 * 1.02 ** (1 / 3))
    assert little.power(64, 63) == pytest.approx(1.02)


test_what_cannot_be_split_says_so = refused(
    (lambda: ShardMap.build(0, 8, 7), r"units is 0; give a whole number from 1"),
    (lambda: ShardMap.build(64.0, 8, 7), r"units is 64\.0; give a whole number"),
    (lambda: ShardMap.build(64, 8, 9), r"the reduced degree is 9, the full one 8.*Give a reduced degree from 1"),
    (lambda: ShardMap.build(64, 8, 0), r"tp_reduced is 0"),
    (lambda: attention_units(10, 4), r"10 query heads cannot be grouped over 4.*Use one of: 1, 2, 5, 10\."),
    (lambda: attention_units(8, True), r"key and value heads is True"),
    (lambda: availability(100, 101, [8]), r"101 devices failed, of 100; give a fraction"),
    (lambda: availability(100, 1.5, [8]), r"1\.5 devices failed"),
    (lambda: availability(100, float("nan"), [8]), r"nan devices failed"),
    (lambda: availability(100, -0.1, [8]), r"-0\.1 devices failed"),
    (lambda: availability(100, 0.1, [8], 16), r"tp\(8\) \* pp\(16\) = 128 needs more than the 100 devices"),
    (lambda: availability(100, 0.1, [0]), r"tensor-parallel degree is 0"),
    (lambda: availability(10**7, 0.1, [8]), r"number of devices is 10000000; give a whole number from 1 to"),
    (lambda: plan_mesh(Mesh({"tp": 2, "dp": 2}), [4]), r"rank 4 is not in tp\(2\) \* dp\(2\)"),
    (lambda: plan_mesh(Mesh({"tp": 2, "cp": 2}), [1]), r"has cp; give a mesh of tp, dp and pp only"),
    (lambda: plan_mesh(Mesh({"tp": 1, "dp": 2}), [0, 1]), r"no device left in any of the 2 replicas"),
    (lambda: PowerBoost(0.9), r"power boost is 0\.9; give a multiple from 1"),
    (lambda: PowerBoost(1.3, float("nan")), r"power exponent is nan"),
)


def answer_of(options: str) -> dict[str, object]:
    """Return the JSON object that the verb prints."""
    return json_of("parallel", "ntp", *options.split(), "--json")


def test_the_verb_prints_the_mesh_the_map_and_the_table():
    mesh = answer_of("--tp 8 --dp 3 --pp 2 --lost 3,33")
    plan = answer_of("--units 64 --tp 8 --reduced 7")
    table = answer_of("--table --devices 32768 --failed 0.001 --tp 8,64 --pp 8 --power-boost 1.3")

    sizes = {"sizes_comp": [8] * 8, "sizes_sync": [10] + [9] * 6}
    assert mesh["replicas"][0] == {"groups": [0, 1], "remaining": [7, 7], "tp": 7, "batch_share": 0.875}
    assert plan == {"schema": "headway.parallel.ntp/1", "moves": 8, "max_link_load": 2} | sizes
    assert list(table["rows"][0]) == ["tp", "drop_packed", "drop_unpacked", "ntp_packed", "ntp_unpacked"]
    assert table["rows"][1]["ntp_unpacked"] > 0.9999


@pytest.mark.parametrize(
    "options",
    [
        "--units 64 --tp 8", "--tp 8 --reduced 7", "--units 64 --heads 8 --kv-heads 2 --tp 8 --reduced 7",
        "--heads 10 --kv-heads 4 --tp 8 --reduced 7", "--units 64 --tp 8,4 --reduced 7",
        "--units 64 --tp eight --reduced 7", "--table --tp 8 --devices 64",
        "--table --tp 8 --devices 64 --failed 1 --units 64", "--units 64 --tp 8 --reduced 7 --devices 64",
        "--tp 8 --lost 3", "--tp 8 --dp 2 --lost third",
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_end_with_exit_code_2(options):
    assert refusal("parallel", "ntp", *options.split())
