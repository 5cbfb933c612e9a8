"""Evaluation, the phases of a step and the script's own code: who owns which nanosecond, and which loader cost it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headway.ledger.answers.ledger import Ledger
from headway.ledger.buckets import BUCKET_OF, bucket_of_sub
from tests.runs_made import Rows

PROCESS = ("process", 0, 200)


def ledger_of(*rows: tuple[str, int, int], **columns: int) -> Ledger:
    """Return the ledger of one rank that recorded rows (name, start, duration)."""
    made = Rows(0)
    for name, start_ns, duration_ns in rows:
        more = columns if name.startswith("input.") else {}
        made.add(name, start_ns, duration_ns, **more)
    return Ledger.of(made.trace(meta={"source": "headway"}))


def test_a_step_is_cut_into_script_forward_loss_backward_clipping_and_update():
    ledger = ledger_of(
        PROCESS, ("step", 100, 50), ("host.script", 100, 10), ("forward", 110, 12), ("segment.backward", 125, 15),
        ("optimizer.step", 143, 7),
    )  # fmt: skip

    assert ledger.sub_ns == {
        "host.script": 10, "useful.forward": 15, "useful.backward": 15, "useful.optimizer": 3 + 7,
        "startup.script": 100, "idle.teardown": 50,
    }  # fmt: skip


def test_what_headway_does_behind_an_update_is_not_the_scripts():
    ledger = ledger_of(
        PROCESS, ("step", 100, 50), ("host.script", 100, 20), ("host.recording", 101, 9), ("host.gc", 104, 2),
        ("forward", 120, 10), ("optimizer.step", 140, 10),
    )  # fmt: skip

    assert (ledger.sub_ns["host.script"], ledger.sub_ns["host.recording"], ledger.sub_ns["host.gc"]) == (11, 7, 2)


def test_forward_and_backward_in_a_closure_are_not_the_optimizers():
    ledger = ledger_of(
        PROCESS, ("step", 100, 50), ("optimizer.step", 100, 50), ("optimizer.closure", 105, 40), ("forward", 106, 20),
        ("segment.backward", 128, 15),
    )  # fmt: skip

    assert ledger.sub_ns["useful.optimizer"] == 10
    assert ledger.sub_ns["useful.backward"] == 15
    assert ledger.sub_ns["useful.forward"] == 25


def test_an_update_in_a_hook_of_backward_is_the_optimizers():
    ledger = ledger_of(PROCESS, ("step", 100, 50), ("segment.backward", 110, 40), ("optimizer.step", 120, 5))

    assert (ledger.sub_ns["useful.backward"], ledger.sub_ns["useful.optimizer"]) == (35, 5)


def test_a_step_without_a_recorded_backward_is_not_told_apart():
    ledger = ledger_of(PROCESS, ("step", 100, 50), ("optimizer.step", 140, 10))

    assert ledger.sub_ns["useful.compute"] == 40


def test_evaluation_is_its_own_bucket_before_between_and_after_the_steps():
    ledger = ledger_of(
        PROCESS, ("host.import", 0, 30), ("eval", 40, 20), ("input.next", 40, 5), ("forward", 46, 10),
        ("step", 100, 50), ("eval", 100, 20), ("input.next", 101, 6), ("input.load", 102, 5), ("forward", 110, 5),
        ("host.gc", 116, 2), ("segment.backward", 125, 10), ("optimizer.step", 140, 10),
        ("eval", 160, 20), ("forward", 170, 10), group=3,
    )  # fmt: skip

    assert ledger.sub_ns["eval.input"] == 5 + 6
    assert ledger.sub_ns["eval.forward"] == 10 + 5 + 10
    assert ledger.sub_ns["eval.other"] == 5 + (20 - 6 - 5 - 2) + 10
    assert ledger.sub_ns["host.gc"] == 2
    assert ledger.ledger_ns["input"] == 0
    assert ledger.sub_ns["startup.script"] == 100 - 30 - 20
    assert ledger.sub_ns["idle.teardown"] == 30
    assert ledger.loader_ns == {3: {"eval.input": 11}}


def test_forwards_behind_the_last_step_evaluate_whatever_mode_the_model_is_in():
    ledger = ledger_of(PROCESS, ("step", 100, 50), ("optimizer.step", 140, 10), ("forward", 160, 15))

    assert (ledger.sub_ns["eval.forward"], ledger.sub_ns["idle.teardown"]) == (15, 35)
    assert ledger.ledger_ns["useful"] == 50


def test_each_loader_has_an_account_of_its_own():
    made = Rows(0)
    for name, start_ns, duration_ns, group in (
        ("process", 0, 100, -1), ("step", 10, 40, -1), ("step", 50, 40, -1), ("input.iter", 10, 2, 0),
        ("input.next", 12, 8, 0), ("input.iter", 50, 1, 1), ("input.next", 52, 4, 1), ("optimizer.step", 40, 10, -1),
        ("optimizer.step", 80, 10, -1),
    ):  # fmt: skip
        made.add(name, start_ns, duration_ns, group=group, seq=0)
    ledger = Ledger.of(made.trace(meta={"source": "headway"}))

    assert {loader: sum(amounts.values()) for loader, amounts in ledger.loader_ns.items()} == {0: 10, 1: 5}
    assert sum(sum(amounts.values()) for amounts in ledger.loader_ns.values()) == ledger.ledger_ns["input"]


@st.composite
def busy_steps(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Return rows of three steps of 30 ns: evaluations and segments anywhere, nested or not."""
    host = ["host.script", "host.recording", "host.gc"]
    names = st.sampled_from(["eval", "forward", "segment.backward", "optimizer.step", *host, "input.next"])
    rows = draw(st.lists(st.tuples(names, st.integers(10, 99), st.integers(1, 12)), max_size=12))
    return [PROCESS, *(("step", 10 + 30 * step, 30) for step in range(3)), *rows]


def owner_of(moment: int, rows: list[tuple[str, int, int]]) -> str:
    """Return the bucket of one nanosecond, by looking at every row."""
    over = [row for row in rows if row[1] <= moment < row[1] + row[2]]
    booked = [row for row in over if row[0] in BUCKET_OF]
    # The strongest row owns; of equally strong ones the one that began last, then the shorter one.
    best = max(booked, key=lambda row: (BUCKET_OF[row[0]].precedence, row[1], -row[2]), default=None)
    inside = any(row[0] == "eval" for row in over)
    if best is not None and best[0] in ("host.gc", "host.recording"):
        return "host"
    if inside:
        return "eval"
    if moment < 10:
        return "startup"
    if moment >= 100:
        after = {"input.next": "input", "forward": "eval"}  # a forward trains nothing more
        return after.get(best[0], "idle") if best is not None else "idle"
    return "useful" if best is None else bucket_of_sub(BUCKET_OF[best[0]].sub)


@given(rows=busy_steps())
def test_the_buckets_are_those_of_an_owner_looked_up_nanosecond_by_nanosecond(rows):
    expected = Counter(owner_of(moment, rows) for moment in range(200))
    trained_until = max([100, *(row[1] + row[2] for row in rows if row[0] in BUCKET_OF and row[0] != "host.gc")])
    for moment in range(trained_until, 200):  # collections after the end of training are teardown
        if owner_of(moment, rows) == "host":
            expected["host"] -= 1
            expected["eval" if any(n == "eval" and s <= moment < s + d for n, s, d in rows) else "idle"] += 1

    ledger = ledger_of(*rows)

    assert {name: ns for name, ns in ledger.ledger_ns.items() if ns} == {k: n for k, n in expected.items() if n}
