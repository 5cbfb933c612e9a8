"""Leases: every key is in one place, generations only rise, and each key is finished once."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.wire.leases import TERM, Leases

KEYS = ["a", "b", "c", "d"]
HOLDERS = ["w0", "w1", "w2"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "repeat", "finish", "late", "release", "drop", "beat", "wait"]),
        st.sampled_from(KEYS),
        st.sampled_from(HOLDERS),
    ),
    max_size=60,
)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def play(steps, leases, clock):
    """Do the steps; returns every lease given out and how often each key's finish counted."""
    given_out, counted = [], dict.fromkeys(KEYS, 0)
    for what, key, holder in steps:
        if what in ("take", "repeat"):
            lease = leases.take(holder) if what == "take" else leases.repeat(holder)
            given_out += [lease] if lease else []
        elif what in ("finish", "late"):
            held = leases.held(key) if what == "finish" else [lease for lease in given_out if lease.key == key]
            counted[key] += bool(held) and leases.finish(key, held[0].generation)
        elif what == "release":
            for lease in leases.held(key):
                leases.release(key, lease.generation)
        elif what == "drop":
            leases.drop(holder)
        elif what == "beat":
            leases.beat(holder)
        else:
            clock.now_s += 6.0
            leases.expire()
    return given_out, counted


@given(steps=STEPS)
def test_a_key_is_in_exactly_one_place_and_is_finished_once(steps):
    clock = Clock()
    leases = Leases(KEYS, lease_s=10.0, clock=clock)

    _, counted = play(steps, leases, clock)

    finished = [key for key in KEYS if key not in leases.waiting and not leases.held(key)]
    assert set(leases.waiting) & {key for key in KEYS if leases.held(key)} == set()
    assert counted == {key: int(key in finished) for key in KEYS}


@given(steps=STEPS)
def test_generations_only_rise_and_no_key_has_more_than_two_leases(steps):
    clock = Clock()
    leases = Leases(KEYS, lease_s=10.0, clock=clock)

    given_out, _ = play(steps, leases, clock)

    numbers = [lease.generation for lease in given_out]
    assert numbers == sorted(set(numbers))
    assert all(len({lease.holder for lease in leases.held(key)}) == len(leases.held(key)) <= 2 for key in KEYS)


@given(steps=STEPS)
def test_a_state_round_trip_lets_what_was_leased_wait_and_goes_on_above_all_generations(steps):
    clock = Clock()
    leases = Leases(KEYS, lease_s=10.0, clock=clock)
    given_out, counted = play(steps, leases, clock)

    again = Leases(lease_s=10.0, clock=clock)
    again.load(msgspec.json.decode(msgspec.json.encode(leases.state())))

    assert sorted(again.waiting) == sorted(key for key in KEYS if not counted[key])
    assert sorted(again.state()["finished"]) == sorted(leases.state()["finished"])
    lease = again.take("w9")
    assert lease is None or lease.generation > max([TERM, *(old.generation for old in given_out)])


def test_a_holder_that_beats_keeps_its_leases_and_a_silent_one_loses_them_first_in_line():
    clock = Clock()
    leases = Leases(KEYS, lease_s=10.0, clock=clock)
    first, second, other = leases.take("w0"), leases.take("w0"), leases.take("w1")
    clock.now_s = 8.0
    leases.beat("w1")
    clock.now_s = 12.0

    assert leases.silent() == ["w0"]
    assert [lease.key for lease in leases.expire()] == [first.key, second.key]
    assert leases.waiting == ["a", "b", "d"]
    assert leases.held("c") == [other]


def test_a_straggler_is_leased_again_and_the_first_answer_wins():
    clock = Clock()
    leases = Leases(["a"], lease_s=100.0, clock=clock)
    slow = leases.take("w0")

    assert leases.repeat("w1", older_than_s=5.0) is None
    clock.now_s = 6.0
    fast = leases.repeat("w1", older_than_s=5.0)
    assert leases.repeat("w2", older_than_s=5.0) is None
    assert leases.finish("a", fast.generation)
    assert not leases.finish("a", slow.generation)


@pytest.mark.parametrize(("late", "counts"), [("accept", True), ("refuse", False)])
def test_an_answer_under_a_lost_lease_counts_only_where_that_is_allowed(late, counts):
    clock = Clock()
    leases = Leases(["a"], lease_s=10.0, clock=clock, late=late)
    lost = leases.take("w0")
    clock.now_s = 11.0
    leases.expire()

    assert leases.finish("a", lost.generation) == counts
    assert not leases.finish("a", 77)  # never given out
    assert not leases.finish("never named")


def test_a_lease_of_an_earlier_life_is_adopted_while_its_key_waits():
    before = Leases(["a", "b"], lease_s=10.0)
    old = before.take("w0")
    after = Leases(lease_s=10.0)
    after.load(before.state())

    assert after.adopt("a", "w0", old.generation)
    assert not after.adopt("a", "w1", old.generation)
    assert not after.adopt("b", "w1", after.term * TERM + 1)  # this life never gave it out
    assert after.finish("a", old.generation)


def test_keys_are_handed_out_in_order_or_as_they_are_ranked():
    leases = Leases(range(5), lease_s=1.0)

    assert leases.take("w").key == 0
    assert leases.take("w", lambda key: -key).key == 4
    assert leases.take("w", lambda key: None if key < 3 else key).key == 3
    assert leases.take("w", lambda key: None) is None
    assert [lease.key for lease in leases.forget([1, 3])] == [3]
    assert leases.waiting == [2]


@pytest.mark.parametrize(("options", "message"), [
    ({"lease_s": 0}, r"lease_s is 0; .*Pass the silence"),
    ({"lease_s": 1, "late": "maybe"}, r"late is 'maybe'; choose 'accept' or 'refuse'"),
])  # fmt: skip
def test_bad_input_is_told_with_rule_and_fix(options, message):
    with pytest.raises(InputError, match=message):
        Leases(**options)
