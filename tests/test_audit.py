"""The audit: sums that do not depend on order, ranks or pieces; exact over interruptions; nothing wrong goes unseen."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, TensorDataset

from headway.core.errors import InputError
from headway.data import DataLoader
from headway.data.bytes.order import TAILS, Sequence, in_order, permute
from headway.data.loader.audit import KINDS, VERDICTS, AuditSum, DeliveredPass, Leg, judge, legs_of
from headway.trace.recording.loads import EVERY
from headway.verbs.loading.data import audit
from tests.recorded import recording

items = st.lists(st.integers(0, 2**40), max_size=30)


@given(items, items, st.randoms(use_true_random=False))
def test_sums_add_up_in_any_order_and_subtract(first, second, random):
    whole = first + second
    shuffled = random.sample(whole, len(whole))

    a, b, both = (AuditSum.of(np.array(part, np.int64)) for part in (first, second, shuffled))
    assert a + b == both
    assert both - a == b


@given(items, items)
def test_sums_are_equal_for_equal_multisets_only(first, second):
    a, b = (AuditSum.of(np.array(part, np.int64)) for part in (first, second))

    assert (a == b) == (Counter(first) == Counter(second))


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1), min_size=1))
def test_the_sums_of_batches_at_once_are_those_of_each(batches):
    starts = np.cumsum([0, *(len(batch) for batch in batches[:-1])])
    again = [place % 3 for batch in batches for place, _ in enumerate(batch)]
    apart = [AuditSum.of(np.array(batch), np.arange(len(batch)) % 3) for batch in batches]

    assert AuditSum.of_each(np.concatenate(batches).astype(np.int64), np.array(again), starts) == apart


def test_a_range_is_the_sum_of_its_items_over_blocks():
    blocks = np.arange(2**18 + 7)

    assert AuditSum.of_range(3, 2**18 + 7) == AuditSum.of(blocks[3:])
    assert AuditSum.of_range(5, 5) == AuditSum()


class Job:
    """Plays loaders: every rank takes batches of a sequence, some marks are kept, and a later run goes on anywhere."""

    def __init__(self, size, *, seed=3, shuffle=True, tail="short", epoch=0):
        self.size, self.seed, self.shuffle, self.tail, self.epoch = size, seed, shuffle, tail, epoch
        self.delivered = Counter()

    def leg(self, start, batch_size, world_size, taken, spoil=None):
        """Return a leg in which rank r takes `taken[r]` batches; `spoil(items)` changes what rank 0 really gets."""
        sequence = Sequence(self.size, batch_size, world_size, tail=self.tail, start=start)
        order = permute(self.size, self.seed, self.epoch) if self.shuffle else in_order(self.size)
        passes = {}
        for rank in range(world_size):
            facts = {
                "kind": "order", "loader": 0, "num_items": self.size, "seed": self.seed, "rank": rank,
                "shuffle": self.shuffle, "batch_size": batch_size, "world_size": world_size, "tail": self.tail,
            }  # fmt: skip
            total, marks = AuditSum(), []
            for batch in range(min(taken[rank], sequence.num_batches(rank))):
                positions = sequence.positions(batch, rank)
                got = order(positions % self.size)
                if spoil and rank == 0:
                    got = spoil(batch, got)
                total += AuditSum.of(got, np.resize(positions // self.size, len(got)))
                if batch % EVERY == EVERY - 1 or batch % 3 == 0:
                    marks.append(total)
            passes[rank] = [DeliveredPass(self.epoch, start, facts, (*marks, total) if total.count else ())]
        [found] = legs_of("run", 0, passes)
        return found, sequence


@st.composite
def histories(draw):
    """The legs of one epoch, interrupted and gone on with in other worlds, with other batches, to its end."""
    job = Job(draw(st.integers(1, 300)), shuffle=draw(st.booleans()), tail=draw(st.sampled_from(sorted(TAILS))))
    legs, start, shapes = [], 0, st.tuples(st.integers(1, 9), st.integers(1, 4))
    for batch_size, world in draw(st.lists(shapes, max_size=4)):
        sequence = Sequence(job.size, batch_size, world, tail=job.tail, start=start)
        saved = draw(st.integers(0, max(sequence.num_global_batches - 1, 0)))
        legs.append(job.leg(start, batch_size, world, [saved + draw(st.integers(0, 3)) for _ in range(world)])[0])
        start = sequence.position_after(saved) if saved else start
    batch_size, world = draw(shapes)
    return [*legs, job.leg(start, batch_size, world, [10**6] * world)[0]]


@pytest.mark.slow
@given(histories())
@settings(max_examples=150)
def test_any_history_of_interruptions_and_worlds_is_exact(legs):
    [epoch] = judge(legs)

    assert epoch.verdict == "exact"
    assert epoch.again == sum(leg.count for leg in legs) - epoch.expected.count


@pytest.mark.slow
@given(histories(), st.data())
@settings(max_examples=100)
def test_a_history_in_which_one_rank_got_another_example_is_not(legs, data):
    leg = data.draw(st.sampled_from(legs), label="leg")
    rank = data.draw(st.sampled_from(sorted(leg.passes)), label="rank")
    marks, off = leg.passes[rank].marks, AuditSum(0, 1, 1)
    spoiled = replace(leg.passes[rank], marks=tuple(mark + off for mark in marks))
    history = [replace(leg, passes={**leg.passes, rank: spoiled}) if one is leg else one for one in legs]
    [epoch] = judge(history)

    # What lies behind the state that a later run went on from does not count: nothing of it was used.
    used = [one for one, after in zip(legs, [*legs[1:], None], strict=True) if one is leg and _used(one, after, rank)]
    assert epoch.verdict == ("repeats" if used else "exact")


def _used(leg, following, rank):
    """Whether some mark of a rank lies before the cut."""
    marks = leg.passes[rank].marks
    if following is None:
        return bool(marks)
    cut = (following.start - leg.start) // leg.order.global_batch
    return any(leg.batches(mark) <= cut for mark in marks) and cut > 0


SPOILS = {
    "an example twice": (lambda batch, got: np.r_[got[:1], got[:1], got[2:]] if batch == 1 else got, "repeats"),
    "an example lost": (lambda batch, got: got[1:] if batch == 1 else got, "loses"),
    "an example of elsewhere": (lambda batch, got: np.r_[got[:-1], [10**6]] if batch == 1 else got, "repeats"),
    "a batch twice": (lambda batch, got: np.r_[got, got] if batch == 1 else got, "repeats"),
}


@pytest.mark.parametrize("name", SPOILS)
@pytest.mark.parametrize("tail", TAILS)
def test_what_is_wrong_is_seen(name, tail):
    spoil, verdict = SPOILS[name]
    leg, _ = Job(100, tail=tail).leg(0, 5, 2, [99, 99], spoil)

    assert [epoch.verdict for epoch in judge([leg])] == [verdict]


def test_a_rank_that_had_not_come_as_far_as_the_state_lost_what_it_missed():
    job = Job(100)
    first, sequence = job.leg(0, 5, 2, [4, 3])
    second, _ = job.leg(sequence.position_after(4), 5, 2, [99, 99])

    [epoch] = judge([first, second])
    assert (epoch.verdict, epoch.expected.count - epoch.delivered.count) == ("loses", 5)


def test_a_resume_further_back_or_ahead_than_the_state_shows():
    job = Job(100)
    first, _ = job.leg(0, 5, 2, [4, 4])
    gap, _ = job.leg(60, 5, 2, [99, 99])
    back, _ = job.leg(20, 5, 2, [99, 99])

    assert [epoch.verdict for epoch in judge([first, gap])] == ["loses"]
    assert [(epoch.verdict, epoch.again) for epoch in judge([first, back])] == [("exact", 20)]


def test_one_run_of_several_is_open_whichever_it_is():
    job = Job(100)
    first, sequence = job.leg(0, 5, 2, [4, 4])
    second, _ = job.leg(sequence.position_after(4), 5, 2, [99, 99])

    assert [judge([leg])[0].verdict for leg in (first, second)] == ["open", "open"]


def test_ranks_that_each_read_everything_are_judged_apart():
    one = Job(20).leg(0, 4, 1, [99])[0].passes[0]
    legs = legs_of("run", 0, {0: [one], 1: [one]})

    assert [(epoch.replica, epoch.verdict) for epoch in judge(legs)] == [(0, "exact"), (1, "exact")]


def test_sums_of_whole_epochs_are_judged_by_what_the_job_expects():
    def leg(items, **facts):
        return Leg(
            "run", 0, 0, 0, {"loader": 0, **facts}, {0: DeliveredPass(0, 0, facts, (AuditSum.of(np.array(items)),))}
        )

    subset = AuditSum.of(np.array([2, 4, 6]))
    told = [subset.count, subset.low, subset.high]
    verdicts = [
        judge([leg(got, kind="served", expected=told)])[0].verdict for got in ([6, 2, 4], [2, 4], [2, 4, 4], [2, 4, 5])
    ]

    assert verdicts == ["exact", "open", "repeats", "repeats"]
    assert judge([leg([1, 0, 2], kind="sampler")], {0: 3})[0].verdict == "exact"
    assert judge([leg([1, 0, 1], kind="sampler")], {0: 3})[0].verdict == "as sampled"


def test_every_kind_and_verdict_is_explained():
    assert set(KINDS) == {"order", "sampler", "served"}
    assert {"exact", "open", "repeats", "loses"} < set(VERDICTS)


def play(folder, rank, world, *, state=None, stop=None, **options):
    """Train as rank `rank` for two epochs, or until `stop` batches; returns the state after `stop` - 3 - rank."""
    with recording(folder, RANK=str(rank)):
        numbers = TensorDataset(torch.arange(203))
        loader = DataLoader(numbers, 8 // world, shuffle=True, seed=7, rank=rank, world_size=world, **options)
        if state is not None:
            loader.load_state_dict(state)
        saved, steps = None, 0
        for _ in range(2):
            for _ in loader:
                steps += 1
                if stop is not None and steps == stop - 3 - rank:
                    saved = loader.state_dict()
                if steps == stop:
                    return saved
    return None


def test_an_interrupted_job_that_goes_on_in_another_world_is_proven_exact(tmp_path, capsys):
    first, second = tmp_path / "a", tmp_path / "b"
    play(first, 1, 2, stop=35, num_workers=1)
    state = play(first, 0, 2, stop=34)
    play(second, 0, 1, state=state, num_workers=2, workers="threads")

    assert audit(first, second, json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["exact"]
    assert [(row["epoch"], row["delivered"], row["verdict"]) for row in answer["epochs"]] == [
        (0, 203, "exact"), (1, 203, "exact"), (2, 203, "exact"),
    ]  # fmt: skip
    assert [row["again"] for row in answer["epochs"]] == [0, 4 * (3 + 4), 0]
    assert audit(first) == audit(second) == 0
    assert "open" in capsys.readouterr().out


def test_a_user_s_sampler_is_judged_by_the_whole_epoch_also_when_it_was_resumed(tmp_path, capsys):
    def loader():
        numbers = TensorDataset(torch.arange(20))
        return DataLoader(numbers, 3, sampler=RandomSampler(numbers, generator=torch.Generator().manual_seed(1)))

    with recording(tmp_path / "a"):
        interrupted = loader()
        for _, _ in zip(range(3), interrupted, strict=False):
            state = interrupted.state_dict()
    with recording(tmp_path / "b"):
        resumed = loader()
        resumed.load_state_dict(state)
        for _ in resumed:
            pass

    assert audit(tmp_path / "a", tmp_path / "b", json=True) == 0
    [row] = json.loads(capsys.readouterr().out)["epochs"]
    assert (row["kind"], row["verdict"], row["delivered"]) == ("sampler", "exact", 20)


def test_a_run_with_torchs_own_loader_has_nothing_to_audit(tmp_path):
    with recording(tmp_path):
        for _ in torch.utils.data.DataLoader(TensorDataset(torch.arange(4))):
            pass

    with pytest.raises(InputError, match=r"holds no delivery.*Import it from headway\.data"):
        audit(tmp_path)
