"""Which step is saved next, and what steps take."""

from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint import CheckpointPolicy, StepTiming
from headway.checkpoint.saves.tickets import SaveSchedule, StepMeter


class Ranks:
    """A store that all ranks share, in one process: what rank 0 said, in order."""

    def __init__(self, rank, world_size, said):
        self.rank, self.world_size, self._said, self._heard = rank, world_size, said, 0

    def word(self, subject, say):
        if self.rank == 0:
            self._said.append(say())
        self._heard += 1
        return self._said[self._heard - 1]


class Fixed(CheckpointPolicy):
    """A policy whose answers are given."""

    def __init__(self, answers):
        self._answers = answers

    def interval(self):
        return self._answers.pop(0) if self._answers else 5


def saves(schedule, steps):
    """Return at which of the steps a job saves."""
    found = []
    for step in steps:
        if schedule.is_due(step):
            schedule.saved(step)
            found.append(step)
    return found


def test_alone_a_rank_asks_its_policy_at_every_step():
    policy = Fixed([9, 9, 3, 9, 2])

    assert saves(SaveSchedule(policy, Ranks(0, 1, [])), range(1, 6)) == [3, 5]


@given(answers=st.lists(st.integers(1, 7), min_size=1, max_size=6), first=st.integers(1, 40))
def test_all_ranks_save_the_steps_that_rank_0s_policy_names(answers, first):
    said = []
    ranks = [SaveSchedule(Fixed(list(answers if rank == 0 else [99])), Ranks(rank, 3, said)) for rank in range(3)]

    found = [[], [], []]
    for step in range(first, first + 30):  # rank 0 goes first at each step: the others come when they come
        for rank, schedule in enumerate(ranks):
            if schedule.is_due(step):
                schedule.saved(step)
                found[rank].append(step)

    assert found[0] == found[1] == found[2]
    assert found[0][0] == first - 1 + answers[0]


def test_an_interval_begins_where_a_job_was_restored():
    schedule = SaveSchedule(Fixed([]), Ranks(0, 1, []))
    schedule.saved(100)

    assert saves(schedule, range(101, 112)) == [105, 110]


def test_a_step_counts_as_beside_a_save_from_its_begin_to_the_end_of_the_step_in_which_it_ends():
    clock = iter([0.0, 1.0, 2.0, 3.5, 4.5])
    meter = StepMeter(lambda: next(clock))

    meter.step(under_way=False)
    quiet = meter.step(under_way=False)
    meter.stall(0.25, saved=True)
    with_save = meter.step(under_way=True)
    meter.durable(0.9)
    ending = meter.step(under_way=False)
    after = meter.step(under_way=False)

    assert quiet == StepTiming(1.0)
    assert with_save == StepTiming(1.0, stall_s=0.25, saved=True, in_flight=True)
    assert ending == StepTiming(1.5, in_flight=True, durable_s=0.9)
    assert after == StepTiming(1.0)


def test_a_restart_forgets_the_step_under_way():
    clock = iter([0.0, 50.0, 51.0])
    meter = StepMeter(lambda: next(clock))
    meter.step(under_way=False)
    meter.restart()

    assert meter.step(under_way=False) is None
    assert meter.step(under_way=False) == StepTiming(1.0)
