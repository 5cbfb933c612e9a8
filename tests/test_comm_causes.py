"""The causes of waits between ranks: collectives, stragglers, evaluation by one rank, batches that are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.comm_causes import MOST_RANKS, SIGNIFICANT, by_chance, same_batches
from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.account import SpanFacts
from headway.ledger.cause import SampledLine
from headway.trace.events.trace import concat
from headway.trace.rings.rank_tables import ComputeFacts, ModelFacts, RankTables
from headway.why.verdict import WARNINGS
from tests.runs_made import MS, Rows, RunMaker
from tests.test_causes import FAULTS, QUIET


def test_a_straggler_is_named_with_its_host_and_what_it_did():
    cause = find_causes(Ledger.of(FAULTS["straggler.rank"].make()))[0]

    assert cause.where == "rank 2 on made-host"
    assert "40 of 40 collectives, by 6 ms in the median" in cause.evidence
    assert "computed longer" in cause.evidence
    assert "that they waited for it)" in cause.evidence


def test_a_rank_that_is_last_as_often_as_chance_has_it_is_not_named():
    maker = RunMaker(
        **{**QUIET, "steps": 6}, ranks=2, compute_ns=lambda rank, step: (5 + 6 * ((step != 0) == rank)) * MS
    )
    made = maker.make()
    rows = [cause for cause in find_causes(Ledger.of(made)) if cause.cause == "straggler.rank"]

    assert by_chance(5, 6, 2) > SIGNIFICANT > by_chance(10, 10, 2)
    assert [row.where for row in rows] == ["ranks in turn"]


def test_of_many_ranks_that_are_late_in_turn_the_most_frequent_are_named():
    found = Ledger.of(
        RunMaker(**QUIET, ranks=4, compute_ns=lambda rank, step: (5 + 6 * (step % 4 == rank)) * MS).make()
    )
    many = {rank: 1000 + rank for rank in range(MOST_RANKS + 3)}
    told = []
    for times in (many, {0: 3, 1: 2}, dict.fromkeys(range(4), 0)):
        lateness = replace(found.lateness, times_last=times, num_collectives=10**6)
        causes = find_causes(replace(found, lateness=lateness))
        told += [cause.evidence.partition("another rank")[2] for cause in causes if cause.cause == "straggler.rank"]

    assert told[0].startswith(": rank 3 1,003x, rank 4 1,004x")
    assert told[0].endswith(" and 3 more")
    assert told[1:] == [": rank 0 3x, rank 1 2x", ""]


def test_a_save_that_others_wait_for_is_a_checkpoint_stall_not_a_straggler():
    causes = find_causes(Ledger.of(FAULTS["checkpoint.stall"].make()))

    assert "straggler.rank" not in {cause.cause for cause in causes}
    assert "other ranks waited" in causes[0].evidence


CALLED = SampledLine("job.py:9", "all_reduce", 4 * 10**8, 80, num_bytes=320, gap=1)
"""A line that reduces a loss behind each update."""


@pytest.mark.parametrize(
    ("changes", "by_ddp", "names"),
    [
        ({}, True, True),
        ({"function": "barrier", "num_bytes": 0, "gap": 0}, True, True),
        ({"gap": 2}, True, True),  # norms: DDP has reduced the gradients
        ({"gap": 2}, False, False),  # gradients that the script reduces itself
        ({"count": 8}, True, False),  # every tenth step
        ({"num_bytes": 80 << 20}, True, False),  # models are averaged
        ({"gap": 0, "num_bytes": 80 << 11}, True, False),  # outputs of all ranks, which the loss needs
    ],
)
def test_small_collectives_that_a_script_calls_in_each_step_are_a_cause_at_their_line(changes, by_ddp, names):
    ledger = Ledger.of(FAULTS["comm.exposed"].make())
    steps = ledger.step_ns.shape[1] * ledger.devices
    row = structs.replace(CALLED, **{"count": steps, **changes})
    assert steps == CALLED.count
    spans = {**ledger.spans, "comm.collective": ledger.spans["comm.wait"]}
    spans = spans if by_ddp else {name: span for name, span in spans.items() if name != "comm.wait"}
    sub_ns = {**ledger.sub_ns, "comm.collective": ledger.ledger_ns["comm"] // 2}
    called = replace(ledger, spans=spans, sub_ns=sub_ns, collective_lines=(row,))
    causes = {cause.cause: cause for cause in find_causes(called)}

    assert ("comm.calls" in causes) is names
    if names:
        cause = causes["comm.calls"]
        whole_s = ledger.ledger_ns["comm"] / 1e9
        assert cause.where.endswith("at job.py:9")
        assert cause.lost_device_s + causes["comm.exposed"].lost_device_s == pytest.approx(whole_s)
        assert cause.at_most
        assert cause.predicted_speedup == pytest.approx(1 / (1 - 4e8 / ledger.step_ns.sum()), rel=1e-3)


LOSSES = [(step, 2.0 + step / 8) for step in range(1, 40, 4)]


@pytest.mark.parametrize(
    ("losses", "ranks", "called", "says"),
    [
        (LOSSES, [0, 1], [], True),
        ([(step, loss + (step > 30)) for step, loss in LOSSES], [0, 1], [], False),
        ([(step, 2.0) for step, _ in LOSSES], [0, 1], [], False),  # nothing is learned: all losses are alike anyhow
        (LOSSES, [0], [], False),  # a group of some ranks: those of a model that is split share their batches
        (LOSSES, [0, 1], [structs.replace(CALLED, gap=0)], False),  # the loss may be that of all ranks
        (LOSSES, [0, 1], [CALLED], True),
    ],
)
def test_ranks_whose_losses_are_all_the_same_train_on_the_same_batches(losses, ranks, called, says):
    ledger = Ledger.of(FAULTS["comm.exposed"].make())
    spans = {**ledger.spans, "comm.collective": SpanFacts(80 * len(called), 1, 1, 1)}
    first = [(step, 2.0) for step, _ in LOSSES] if losses[-1][1] == 2.0 else LOSSES
    groups = {0: {"name": "0", "ranks": ranks}}
    tables = {0: RankTables(losses=first, groups=groups), 1: RankTables(losses=losses, groups=groups)}
    causes = same_batches(replace(ledger, spans=spans, collective_lines=tuple(called)), tables)

    assert [cause.cause for cause in causes] == ["input.ranks"] * says
    assert all(cause.cause in WARNINGS and not cause.lost_device_s for cause in causes)


def test_of_an_evaluation_that_one_rank_does_alone_each_rank_is_given_a_share():
    alone = RunMaker(**QUIET, ranks=2, evaluation_ns=lambda rank, step: 120 * MS * (step % 10 == 9 and rank == 0))
    first, *others = find_causes(Ledger.of(alone.make()))
    by_all = find_causes(Ledger.of(FAULTS["eval"].make()))[0]

    assert first.cause == "eval"
    assert "rank 0 evaluates alone" in first.fix
    assert "DistributedSampler" in first.script
    assert "straggler.rank" not in {cause.cause for cause in others}
    assert "alone" not in by_all.fix


def test_a_pipeline_that_waits_for_its_neighbours_has_a_bubble_and_no_advice_for_ddp():
    ranks = [Rows(0), Rows(1)]
    for rows in ranks:
        rows.add("process", 0, 100)
        rows.add("step", 10, 80)
    ranks[0].add("comm.send", 60, 5, group=0, seq=0, peer=1)
    ranks[1].add("comm.recv", 15, 50, group=0, seq=0, peer=0)
    causes = {cause.cause: cause for cause in find_causes(Ledger.of(concat([rows.trace() for rows in ranks])))}

    assert causes["bubble.p2p"].lost_device_s == pytest.approx(45e-9)
    assert "more micro-batches" in causes["bubble.p2p"].fix
    assert "DDP" not in causes["comm.exposed"].fix


def test_gradients_that_are_reduced_in_each_of_several_backwards_a_step_are_told_of_no_sync():
    ledger = Ledger.of(FAULTS["comm.exposed"].make())
    once = find_causes(ledger)[0]
    wait = ledger.spans["comm.wait"]
    facts = structs.replace(ledger.facts, compute=ComputeFacts(models=(ModelFacts("Net"),)))
    each = replace(ledger, facts=facts, spans={**ledger.spans, "comm.wait": wait + wait + wait + wait})
    often = find_causes(each)[0]

    assert (once.cause, once.script) == ("comm.exposed", "")
    assert "in each of 4 backwards a step" in often.evidence
    assert often.script.startswith("with model.no_sync()")
