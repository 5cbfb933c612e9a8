"""Leases: every key is in one place, and generations only rise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.wire.leases import TERM, Leases

KEYS = ["a", "b", "c", "d"]
HOLDERS = ["w0", "w1", "w2"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "repeat", "forget", "release", "drop", "beat", "wait"]),
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
    """Do the steps; returns every lease given out, and the keys that were forgotten."""
    given_out, forgotten = [], set()
    for what, key, holder in steps:
        if what in ("take", "repeat"):
            lease = leases.take(holder) if what == "take" else leases.repeat(holder)
            given_out += [lease] if lease else []
        elif what == "forget":
            leases.forget([key])
            forgotten.add(key)
        elif what == "release":
            for lease in leases.held(key):
                leases.release(key, lease.generation)
        elif what == "drop":
            leases.drop(holder)
        elif what == "beat":
            leases.beat(holder)
        else:
            clock.now_s += 6.0
            for silent in leases.silent():
                leases.drop(silent)
    return given_out, forgotten


@given(steps=STEPS)
def test_a_key_is_in_exactly_one_place_until_it_is_forgotten(steps):
    clock = Clock()
    leases = Leases(KEYS, lease_s=10.0, clock=clock)

    _, forgotten = play(steps, leases, clock)

    waits, leased = set(leases.waiting), {key for key in KEYS if leases.held(key)}
    assert waits & leased == set()
    assert waits | leased == set(KEYS) - forgotten


@given(steps=STEPS)
def test_generations_only_rise_and_no_key_has_more_than_two_leases(steps):
    clock = Clock()
    leases = Leases(KEYS, lease_s=10.0, clock=clock)

    given_out, _ = play(steps, leases, clock)

    numbers = [lease.generation for lease in given_out]
    assert numbers == sorted(set(numbers))
    assert all(len({lease.holder for lease in leases.held(key)}) == len(leases.held(key)) <= 2 for key in KEYS)


def test_a_holder_that_beats_keeps_its_leases_and_a_silent_one_loses_them_first_in_line():
    clock = Clock()
    leases = Leases(KEYS, lease_s=10.0, clock=clock)
    first, second, other = leases.take("w0"), leases.take("w0"), leases.take("w1")
    clock.now_s = 8.0
    leases.beat("w1")
    clock.now_s = 12.0

    assert leases.silent() == ["w0"]
    assert [lease.key for lease in leases.drop("w0")] == [first.key, second.key]
    assert leases.waiting == ["a", "b", "d"]
    assert leases.held("c") == [other]


def test_a_straggler_is_leased_again_and_waits_only_once_both_leases_have_ended():
    clock = Clock()
    leases = Leases(["a"], lease_s=100.0, clock=clock)
    slow = leases.take("w0")

    assert leases.repeat("w1", older_than_s=5.0) is None
    clock.now_s = 6.0
    fast = leases.repeat("w1", older_than_s=5.0)
    assert leases.repeat("w2", older_than_s=5.0) is None
    assert leases.release("a", slow.generation)
    assert not leases.release("a", slow.generation)
    assert leases.waiting == []
    assert leases.release("a", fast.generation)
    assert leases.waiting == ["a"]


def test_a_lease_of_an_earlier_life_is_adopted_while_its_key_waits():
    old = Leases(["a", "b"], lease_s=10.0).take("w0")
    after = Leases(["a", "b"], lease_s=10.0, term=1)

    assert after.adopt("a", "w0", old.generation)
    assert not after.adopt("a", "w1", old.generation)
    assert not after.adopt("b", "w1", after.term * TERM + 1)  # this life never gave it out
    assert after.held("a")[0].generation == old.generation < after.take("w1").generation


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
    ({"lease_s": float("nan")}, r"lease_s is nan; .*Pass the silence"),
])  # fmt: skip
def test_bad_input_is_told_with_rule_and_fix(options, message):
    with pytest.raises(InputError, match=message):
        Leases(**options)
