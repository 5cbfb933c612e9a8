"""The ledger of recorded runs against runs whose every nanosecond is known."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError, UnknownNameError
from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKETS, bucket_of_sub
from headway.trace.events.trace import Trace, concat
from headway.trace.recording.runs import Run, merge
from tests.runs_made import MS, Cost, Made, RunMaker, cut_short, joined, write_folder


def spread(seed: int, high_ms: int, share: float) -> Cost:
    """Return a cost that is drawn anew, but the same each time, for every rank and step."""

    def cost(rank: int, step: int) -> int:
        rng = np.random.default_rng([seed, rank, step + 1])
        return int(rng.integers(0, high_ms * MS)) if rng.random() < share else 0

    return cost


@st.composite
def makers(draw: st.DrawFn) -> RunMaker:
    """Jobs with everything that can happen, in random amounts."""
    seed = draw(st.integers(0, 10**6))
    costs: dict[str, Any] = {
        name: spread(seed + place, high, draw(st.sampled_from([0.0, 0.3, 1.0])))
        for place, (name, high) in enumerate(
            {
                "compute_ns": 9, "fetch_ns": 12, "prep_ns": 6, "cpu_wait_ns": 3, "collate_ns": 2, "transfer_ns": 1,
                "comm_ns": 3, "save_ns": 20, "sync_ns": 9, "rename_ns": 2, "logging_ns": 4, "gc_ns": 5,
                "compile_ns": 30,
            }.items()
        )
    }  # fmt: skip
    return RunMaker(
        ranks=draw(st.integers(1, 4)), steps=draw(st.integers(1, 12)), num_workers=draw(st.integers(0, 3)),
        prefetch_factor=draw(st.integers(1, 3)), epoch_steps=draw(st.sampled_from([None, 1, 4])),
        load_ns=draw(st.sampled_from([0, 7 * MS])), **costs,
    )  # fmt: skip


def without_blame(sub_ns: dict[str, int]) -> dict[str, int]:
    """Sum the straggler lines: made runs do not say why a rank was late."""
    late = sum(ns for sub, ns in sub_ns.items() if sub.startswith("straggler"))
    rest = {sub: ns for sub, ns in sub_ns.items() if not sub.startswith("straggler")}
    return {**rest, **({"straggler": late} if late else {})}


def full(truth_ns: dict[str, int]) -> dict[str, int]:
    return {bucket: truth_ns.get(bucket, 0) for bucket in BUCKETS}


@pytest.mark.slow
@given(makers())
@settings(max_examples=30)
def test_every_bucket_of_a_made_run_is_its_truth_to_the_nanosecond(maker):
    made = maker.make()

    ledger = Ledger.of(made)

    assert ledger.ledger_ns == full(made.truth_ns)
    assert sum(ledger.ledger_ns.values()) == ledger.devices * ledger.wall_ns
    assert (ledger.devices, ledger.steps) == (maker.ranks, maker.steps)


@pytest.mark.slow
@given(makers())
@settings(max_examples=30)
def test_sub_lines_partition_their_bucket_and_are_the_truth_to_a_nanosecond_per_wait(maker):
    made = maker.make()

    ledger = Ledger.of(made)

    for bucket in BUCKETS:
        assert sum(ns for sub, ns in ledger.sub_ns.items() if bucket_of_sub(sub) == bucket) == ledger.ledger_ns[bucket]
    found, truth = without_blame(dict(ledger.sub_ns)), made.sub_truth_ns
    # A wait that saw part of a load is shared out in whole nanoseconds: up to one per part and batch.
    allowed = 4 * maker.ranks * maker.steps if maker.num_workers else 0
    for sub in found.keys() | truth.keys():
        assert abs(found.get(sub, 0) - truth.get(sub, 0)) <= allowed


@given(makers())
@settings(max_examples=15)
def test_steps_and_ranks_sum_to_the_same_ledger(maker):
    made = maker.make()

    ledger = Ledger.of(made)

    by_rank = {bucket: sum(row[bucket] for row in ledger.by_rank_ns.values()) for bucket in BUCKETS}
    assert by_rank == dict(ledger.ledger_ns)
    assert ledger.step_ns.shape == (len(BUCKETS), maker.steps)
    in_steps = dict(zip(BUCKETS, ledger.step_ns.sum(axis=1).tolist(), strict=True))
    for bucket in ("useful", "input", "comm", "straggler", "checkpoint", "host"):
        assert in_steps[bucket] == ledger.ledger_ns[bucket]
    walls = made.trace.where(made.trace.named("step")).events["duration_ns"].reshape(maker.ranks, -1)
    assert ledger.step_wall_ns.tolist() == (walls.sum(axis=0) // maker.ranks).tolist()


@given(makers(), st.randoms())
@settings(max_examples=15)
def test_permuting_rows_and_merging_ranks_in_any_order_change_nothing(maker, random):
    made = maker.make()
    order = list(range(len(made.trace)))
    random.shuffle(order)
    ranks = [made.trace.select(ranks=[rank]) for rank in range(maker.ranks)]
    random.shuffle(ranks)
    whole = Ledger.of(made)

    shuffled = Ledger.of(replace(made, trace=made.trace.where(np.array(order))))
    merged = Ledger.of(replace(made, trace=replace(concat(ranks), groups=made.trace.groups)))

    for other in (shuffled, merged):
        assert other.ledger_ns == whole.ledger_ns
        assert other.sub_ns == whole.sub_ns
        assert other.by_rank_ns == whole.by_rank_ns
        assert other.lateness == whole.lateness


@pytest.mark.slow
@given(makers(), st.integers(-(10**9), 10**9))
@settings(max_examples=15)
def test_shifting_every_clock_changes_nothing_and_a_known_offset_undoes_the_shift_of_one(maker, shift):
    made = maker.make()
    whole = Ledger.of(made)
    events = made.trace.events
    late = replace(made.trace, events={**events, "start_ns": events["start_ns"] + (events["rank"] == 0) * shift})
    ranks = [
        {**row, **{key: row[key] + shift * (row["rank"] == 0) for key in ("start_ns", "end_ns")}}
        for row in made.meta["ranks"]
    ]
    moved = replace(made, trace=late, meta={**made.meta, "ranks": ranks, "clock_offset_ns": {"0": -shift}})

    assert Ledger.of(moved).sub_ns == whole.sub_ns

    everything = replace(made.trace, events={**events, "start_ns": events["start_ns"] + shift})
    meta = {**made.meta, "start_ns": made.meta["start_ns"] + shift, "end_ns": made.meta["end_ns"] + shift, "ranks": []}
    assert Ledger.of(replace(made, trace=everything, meta=meta)).sub_ns == whole.sub_ns


@given(makers(), st.integers(0, 10**8))
@settings(max_examples=15)
def test_shifting_one_rank_by_an_unknown_offset_moves_only_waits_between_ranks(maker, shift):
    """What a rank did by itself does not depend on the others' clocks."""
    made = maker.make()
    events = made.trace.events
    late = replace(made.trace, events={**events, "start_ns": events["start_ns"] + (events["rank"] == 0) * shift})
    meta = {**made.meta, "ranks": [], "end_ns": made.meta["end_ns"] + shift}

    before, after = Ledger.of(made), Ledger.of(replace(made, trace=late, meta=meta))

    for rank in range(maker.ranks):
        for bucket in ("useful", "input", "checkpoint", "host"):
            assert after.by_rank_ns[rank][bucket] == before.by_rank_ns[rank][bucket]
        waits = [sum(of.by_rank_ns[rank][bucket] for bucket in ("comm", "straggler")) for of in (before, after)]
        assert waits[0] == waits[1]


@pytest.mark.slow
@given(makers(), st.floats(0.0, 1.0))
@settings(max_examples=20)
def test_a_failure_and_a_restart_never_raise_goodput(maker, where):
    """Monotone under added failures: the run that dies and starts again loses at least the restart."""
    made = maker.make()
    first = cut_short(made, made.meta["start_ns"] + round(where * (made.meta["end_ns"] - made.meta["start_ns"])))
    again = replace(maker, start_ns=first.meta["end_ns"], attempt=1).make()

    failed = Ledger.of(joined(first, again))

    assert sum(failed.ledger_ns.values()) == failed.devices * failed.wall_ns
    assert failed.goodput <= Ledger.of(made).goodput
    assert failed.ledger_ns["restart"] > 0


def test_a_run_cut_short_is_booked_to_its_last_record_and_the_rest_is_unknown():
    made = RunMaker(ranks=1, steps=10).make()
    steps = made.trace.where(made.trace.named("step")).events
    at = int(steps["start_ns"][7])
    short = cut_short(made, at, exit_code=None)
    late = replace(short, meta={**short.meta, "end_ns": at + 500 * MS})

    ledger = Ledger.of(late)

    assert ledger.steps == 7
    assert ledger.sub_ns["unknown.cut_short"] == 500 * MS
    assert any("not seen" in note for note in ledger.notes)
    assert any("unknown" in note for note in ledger.notes)
    assert sum(ledger.ledger_ns.values()) == ledger.wall_ns


@pytest.mark.parametrize(("code", "line"), [(-9, "unknown.cut_short"), (1, "idle.teardown")])
def test_what_follows_the_last_record_is_unknown_unless_the_process_ended_itself(code, line):
    made = RunMaker(ranks=1, steps=10).make()
    at = int(made.trace.where(made.trace.named("step")).events["start_ns"][7])
    ended = made.trace.events["start_ns"] + made.trace.events["duration_ns"] <= at
    recorded = replace(made, trace=made.trace.where(ended | made.trace.named("process")))

    ledger = Ledger.of(cut_short(recorded, at + 500 * MS, exit_code=code))

    assert ledger.sub_ns[line] >= 500 * MS
    assert sum(ledger.ledger_ns.values()) == ledger.wall_ns


def test_the_step_that_a_dead_rank_did_not_finish_is_rework():
    made = RunMaker(ranks=1, steps=10, num_workers=0, fetch_ns=3 * MS).make()
    nexts = made.trace.where(made.trace.named("input.next")).events
    end = int(nexts["start_ns"][4] + nexts["duration_ns"][4])

    ledger = Ledger.of(cut_short(made, end + 2 * MS))

    assert ledger.steps == 4
    assert ledger.sub_ns["unknown.cut_short"] == 2 * MS
    assert ledger.ledger_ns["input"] == 5 * (3 * MS + MS // 10) + 2 * MS


def test_a_rank_that_left_no_rows_is_unknown():
    made = RunMaker(ranks=2, steps=5).make()

    ledger = Ledger.of(replace(made, trace=made.trace.select(ranks=[0])))

    assert ledger.devices == 2
    assert ledger.sub_ns["unknown.missing"] == ledger.wall_ns
    assert ledger.coverage == 0.5


def test_dropped_records_are_unknown_where_nothing_else_is_known():
    made = RunMaker(ranks=1, steps=5, gc_ns=lambda rank, step: MS).make()
    events, names = made.trace.events, made.trace.names
    gone = int(np.flatnonzero(made.trace.named("host.gc"))[2])
    middle = int(events["start_ns"][gone])
    row = {name: values[[gone]].copy() for name, values in events.items()}
    row["name"][:], row["start_ns"][:], row["duration_ns"][:] = names.index("dropped"), middle - MS, 3 * MS
    lost = Trace({name: np.concatenate([events[name], row[name]]) for name in events}, names, made.trace.lanes)

    ledger = Ledger.of(replace(made, trace=lost))

    assert ledger.sub_ns["unknown.dropped"] == 2 * MS
    assert ledger.ledger_ns["host"] == made.truth_ns["host"]


def test_collections_and_log_lines_inside_a_load_are_not_input_twice():
    """A collection is taken out of prep; a log line, which blocks, out of fetch."""
    made = RunMaker(ranks=1, steps=1, fetch_ns=10 * MS, prep_ns=10 * MS).make()
    load = int(np.flatnonzero(made.trace.named("input.load"))[0])
    start = int(made.trace.events["start_ns"][load])
    inside = replace(
        made,
        trace=concat(
            [
                made.trace,
                Trace.from_columns(
                    {"rank": [0, 0], "start_ns": [start + 2 * MS, start + 5 * MS], "duration_ns": [MS, 4 * MS]},
                    names=["host.gc", "host.logging"],
                    name=[0, 1],
                ),
            ]
        ),
    )

    ledger = Ledger.of(inside)

    assert (ledger.sub_ns["host.gc"], ledger.sub_ns["host.logging"]) == (MS, 4 * MS)
    assert (ledger.sub_ns["input.prep"], ledger.sub_ns["input.fetch"]) == (9 * MS, 6 * MS)


def test_the_gap_between_a_save_and_its_fsync_belongs_to_the_checkpoint():
    rows = [("process", 0, 100), ("step", 10, 80), ("checkpoint.save", 20, 10), ("checkpoint.sync", 45, 5),
            ("checkpoint.rename", 52, 1), ("input.next", 60, 5), ("checkpoint.sync", 70, 5)]  # fmt: skip

    ledger = Ledger.of(of_rows(rows))

    # 20..30 save, 30..50 and 70..75 fsync with the gap before the first, 50..53 rename with its gap.
    assert ledger.sub_ns["checkpoint.save"] == 10
    assert ledger.sub_ns["checkpoint.persist"] == 15 + 5 + 2 + 5
    assert ledger.sub_ns["checkpoint.commit"] == 1
    assert ledger.sub_ns["useful.compute"] == 80 - 38 - 5


def of_rows(rows: list[tuple[str, int, int]]) -> Trace:
    """Return one rank's rows (name, start, duration)."""
    names = list(dict.fromkeys(name for name, _, _ in rows))
    columns = {"rank": [0] * len(rows), "start_ns": [r[1] for r in rows], "duration_ns": [r[2] for r in rows]}
    return Trace.from_columns(columns, names=names, name=[names.index(r[0]) for r in rows])


def test_everything_before_the_first_step_is_start_up_and_compilation_is_so_everywhere():
    rows = [("process", 0, 100), ("host.import", 5, 20), ("host.gc", 10, 5), ("host.logging", 30, 4), ("step", 40, 50),
            ("host.compile", 45, 10)]  # fmt: skip

    ledger = Ledger.of(of_rows(rows))

    assert ledger.sub_ns == {
        "startup.import": 20, "startup.script": 20, "startup.compile": 10, "useful.compute": 40, "idle.teardown": 10,
    }  # fmt: skip


def test_collections_while_the_interpreter_goes_down_are_teardown():
    """One in a step, one between the last step and a save, one with nothing behind it."""
    rows = [("process", 0, 100), ("step", 10, 40), ("host.gc", 20, 5), ("host.gc", 52, 6), ("checkpoint.save", 60, 3),
            ("host.gc", 65, 30)]  # fmt: skip

    ledger = Ledger.of(of_rows(rows))

    assert ledger.sub_ns == {
        "startup.script": 10, "useful.compute": 35, "host.gc": 11, "checkpoint.save": 3, "idle.teardown": 41,
    }  # fmt: skip
    assert (ledger.spans["host.gc"].count, ledger.spans["host.gc"].max_ns) == (2, 6)


def on_hosts(made: Made) -> list[Made]:
    """Return the run as one part per rank, each on a host whose monotonic clock started at another time."""
    parts = []
    for rank, row in enumerate(made.meta["ranks"]):
        shift = 10**12 * rank
        own = made.trace.select(ranks=[rank])
        facts = {rank: made.trace.ranks[rank]}
        meta = {
            **made.meta,
            **{key: made.meta[key] + shift for key in ("start_ns", "end_ns")},
            "ranks": [{**row, **{key: row[key] + shift for key in ("start_ns", "end_ns")}}],
        }
        events = {**own.events, "start_ns": own.events["start_ns"] + shift}
        parts.append(replace(made, trace=replace(own, events=events, ranks=facts), meta=meta))
    return parts


UNEVEN = RunMaker(ranks=3, steps=6, compute_ns=lambda rank, step: (5 + 2 * (rank == 1)) * MS)


def test_hosts_of_one_job_are_joined_on_the_first_ones_clock():
    """Each host has its own monotonic clock; realtime pairs tie them together."""
    made = UNEVEN.make()

    ledger = Ledger.of(on_hosts(made))

    assert ledger.ledger_ns == full(made.truth_ns)
    assert ledger.sub_ns["straggler.compute"] == made.truth_ns["straggler"]


def test_run_folders_of_several_hosts_give_the_ledger_of_the_whole_job(tmp_path):
    made = UNEVEN.make()
    parts = [Run.open(write_folder(part, tmp_path / str(n))) for n, part in enumerate(on_hosts(made))]

    for ledger in (Ledger.of(parts), Ledger.of(merge(parts))):
        assert ledger.devices == 3
        assert ledger.ledger_ns == full(made.truth_ns)


def test_a_run_folder_on_disk_gives_the_same_ledger(tmp_path):
    made = RunMaker(steps=7, num_workers=2, fetch_ns=9 * MS, prep_ns=2 * MS).make()

    ledger = Ledger.of(Run.open(write_folder(made, tmp_path / "run")))

    assert ledger.sub_ns == Ledger.of(made).sub_ns
    assert Ledger.of(Trace.open(tmp_path / "run")).ledger_ns == ledger.ledger_ns


def test_json_has_every_key_of_the_contract_and_integers_where_it_says_so():
    ledger = Ledger.of(RunMaker(steps=4).make())

    found = ledger.to_json()

    assert found["schema"] == "headway.why/2"
    assert {"devices", "steps", "wall_ns", "wall_s", "goodput", "ledger", "ledger_ns", "sub", "basis", "causes",
            "straggler", "coverage", "fidelity"} <= found.keys()  # fmt: skip
    assert set(found["ledger"]) == set(found["ledger_ns"]) == set(BUCKETS)
    assert all(type(ns) is int for ns in [*found["ledger_ns"].values(), *found["sub_ns"].values(), found["wall_ns"]])
    assert sum(found["ledger_ns"].values()) == found["devices"] * found["wall_ns"]
    assert found["basis"]["useful"] == "remainder"
    assert found["ledger"]["useful"] == found["ledger_ns"]["useful"] / 1e9


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], r"list is empty.*Give a run or a trace"),
        (7, r"int is neither a run nor a trace.*Trace\.open"),
        (Trace.from_columns({"start_ns": []}), r"no events.*Record at least one step"),
        (
            Trace.from_columns({"rank": [0], "duration_ns": [5]}, name=[0], names=["a"], lanes=["profiler"]),
            r"only marks that the profiler drew.*Record operators",
        ),
        ([RunMaker(steps=1).make(), of_rows([("process", 0, 5)])], r"cannot share one ledger.*only traces"),
    ],
    ids=["empty list", "number", "empty trace", "drawn lanes only", "mixed"],
)
def test_what_cannot_be_accounted_for_is_refused(source: Any, message: str):
    with pytest.raises(InputError, match=message):
        Ledger.of(source)


def test_a_share_is_asked_for_by_a_name_of_the_tables():
    ledger = Ledger.of(RunMaker(steps=4, fetch_ns=MS).make())

    assert ledger.fraction("input") == ledger.ledger_ns["input"] / ledger.total_ns
    assert ledger.fraction("input.fetch") == ledger.sub_ns["input.fetch"] / ledger.total_ns
    assert ledger.fraction("host.gc") == 0.0
    with pytest.raises(UnknownNameError, match=r"unknown bucket or sub-line 'input.fech'. Did you mean 'input.fetch'"):
        ledger.fraction("input.fech")


def test_a_run_without_steps_is_start_up():
    ledger = Ledger.of(of_rows([("process", 0, 100), ("host.import", 10, 60)]))

    assert ledger.steps == 0
    assert ledger.sub_ns["startup.import"] == 60
    assert sum(ledger.ledger_ns.values()) == 100


MAKERS: dict[str, Callable[[], RunMaker]] = {
    "several optimizers": lambda: RunMaker(optimizer_ns=2 * MS),
    "no workers": lambda: RunMaker(num_workers=0, fetch_ns=4 * MS, prep_ns=MS),
    "one rank": lambda: RunMaker(ranks=1, save_ns=lambda rank, step: 9 * MS * (step == 5)),
    "uneven ranks": lambda: RunMaker(ranks=4, compute_ns=lambda rank, step: (4 + rank) * MS),
}


@pytest.mark.parametrize("name", MAKERS)
def test_named_jobs_are_their_truth(name):
    made = MAKERS[name]().make()

    assert Ledger.of(made).ledger_ns == full(made.truth_ns)
