"""Orders of several jobs: each item once an epoch whatever happens, uniform, the same after a restore, clear errors."""

import itertools
import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.cached.tiered import TieredCache
from headway.data.orders import job_order, strategies
from headway.data.orders.job_order import Buffered, DataShareError
from headway.data.orders.random_orders import Opportunistic
from headway.data.orders.strategies import ORDERS, Shared
from tests.chi_square import p_value

NAMES = ("a", "b", "c", "d")


def made(name, jobs=None, seed=0, **more):
    """An order by name, Seneca's with a cache of 5 items that stays empty until a test fills it."""
    if ORDERS[name] is Opportunistic:
        more["cache"] = TieredCache(5, (0, 0, 1))
    return ORDERS[name](jobs or {}, seed, **more)


def drained(order):
    """Step until nobody needs anything; return what each job received."""
    received = {job: [] for job in order.jobs}
    while given := order.step():
        for item, jobs in given.items():
            for job in jobs:
                received[job].append(item)
    return received


def through_a_file(state):
    """Write a state as MessagePack and read it again."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


def overlapping(seed, num_jobs=3, of=40):
    rng = np.random.default_rng(seed)
    return {name: rng.permutation(of)[: rng.integers(1, of + 1)] for name in NAMES[:num_jobs]}


calls = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "masked", "add", "remove", "restart", "save"]),
        st.sampled_from(NAMES),
        st.sets(st.integers(0, 30), min_size=1, max_size=12),
    ),
    max_size=60,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=60)
@given(calls=calls, seed=st.integers(0, 99))
def test_each_job_receives_its_items_once_an_epoch_for_any_order_of_calls(name, calls, seed):
    """Also: the sum of what is needed falls by what is given, a mask is obeyed, nobody else's set changes."""
    order, sets, left = made(name, seed=seed), {}, {}
    for call, job, items in calls:
        if call == "add" and job not in sets:
            order.add(job, sorted(items))
            sets[job], left[job] = items, set(items)
        elif call == "remove" and job in sets:
            order.remove(job)
            del sets[job], left[job]
        elif call == "restart" and job in sets and not left[job]:
            order.restart(job)
            left[job] = set(sets[job])
        elif call == "save":
            state, order = order.state_dict(), made(name)
            order.load_state_dict(through_a_file(state))
        elif call in ("step", "masked"):
            mask = {job} & sets.keys() if call == "masked" else set()
            expected = {other for other in sets if other not in mask and left[other]}
            received = Counter()
            for item, jobs in order.step(mask).items():
                for receiver in jobs:
                    left[receiver].remove(item)
                    received[receiver] += 1
            assert received == Counter(expected)
        assert {job: set(order.needed(job).tolist()) for job in order.jobs} == left
        assert {job: order.remaining(job) for job in order.jobs} == {job: len(need) for job, need in left.items()}


@pytest.mark.parametrize("name", [name for name in ORDERS if ORDERS[name].draws_again])
@settings(max_examples=40)
@given(seed=st.integers(0, 999), before=st.integers(0, 30), masked=st.booleans())
def test_a_restored_order_goes_on_as_the_one_it_was_taken_from(name, seed, before, masked):
    jobs = overlapping(seed)
    order, other = made(name, jobs, seed), made(name)
    for _ in range(before):
        order.step(("a",) if masked else ())

    other.load_state_dict(through_a_file(order.state_dict()))
    order.add("late", [1, 2, 3])
    other.add("late", [1, 2, 3])

    assert drained(other) == drained(order)


@pytest.mark.parametrize("name", [name for name in ORDERS if ORDERS[name].draws_again])
def test_taking_a_state_changes_nothing(name):
    quiet, asked = made(name, overlapping(3), 5), made(name, overlapping(3), 5)
    for _ in range(9):
        asked.state_dict()
        assert asked.step() == quiet.step()


@pytest.mark.parametrize("name", ORDERS)
def test_equal_seeds_give_equal_orders_and_others_other_ones(name):
    assert drained(made(name, overlapping(1), 7)) == drained(made(name, overlapping(1), 7))
    assert drained(made(name, overlapping(1), 7)) != drained(made(name, overlapping(1), 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_every_order_of_a_job_is_equally_likely_beside_two_others(name):
    jobs = {"small": [0, 5], "job": [0, 1, 2, 3], "large": [1, 2, 4, 5, 6, 7]}
    orders = Counter(tuple(drained(made(name, jobs, seed))["job"]) for seed in range(1200))

    counts = [orders[order] for order in itertools.permutations(range(4))]

    assert p_value(counts, [50] * 24) > 1e-3


def test_shared_jobs_of_one_set_receive_every_item_together_epoch_after_epoch():
    order = Shared({"a": range(50), "b": range(50)}, seed=1)
    passes = []
    for _ in range(3):
        steps = [order.step() for _ in range(50)]
        assert all(jobs == {"a", "b"} for given in steps for jobs in given.values())
        passes.append([item for given in steps for item in given])
        order.restart("a")
        order.restart("b")

    assert len({tuple(items) for items in passes}) == 3


def test_a_job_that_joins_a_shared_order_begins_where_the_others_are():
    order = Shared({"a": range(100)}, seed=2)
    for _ in range(40):
        order.step()
    order.add("b", range(100))

    assert [len(order.step()) for _ in range(60)] == [1] * 60


@pytest.mark.parametrize("name", ORDERS)
def test_no_job_sees_the_same_order_in_two_epochs(name):
    order = made(name, {"a": range(30)}, 3)
    first = drained(order)["a"]
    order.restart("a")

    assert order.epoch("a") == 1
    assert drained(order)["a"] != first


@pytest.mark.parametrize("name", ORDERS)
def test_a_state_holds_two_bits_per_item_and_job(name):
    order = made(name, {job: range(100_000) for job in "ab"}, 1)
    for _ in range(20):
        order.step()
    jobs = order.state_dict()["jobs"].values()

    assert all(len(facts[part][1]) <= 100_000 / 8 for facts in jobs for part in ("subset", "needs"))


def test_builds_between_steps_do_not_lose_or_repeat_an_item(monkeypatch):
    monkeypatch.setattr(job_order, "BUILD_STEPS", 7)
    for name in ORDERS:
        received = drained(made(name, overlapping(9), 4))
        assert {job: sorted(items) for job, items in received.items()} == {
            job: sorted(items.tolist()) for job, items in overlapping(9).items()
        }


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=15)
@given(speeds=st.lists(st.sampled_from(NAMES[:3]), max_size=150))
def test_jobs_of_any_speed_receive_their_items_once_and_nobody_waits(name, limit, speeds):
    jobs = {job: range(20) for job in NAMES[:3]}
    buffered = Buffered(made(name, jobs, 6), limit=limit)
    received = {job: [] for job in jobs}
    for job in speeds:
        item = buffered.take(job)
        assert (item is None) == (len(received[job]) == 20)
        received[job].append(item) if item is not None else None
    for job, items in received.items():
        items += iter(lambda job=job: buffered.take(job), None)

    assert all(sorted(items) == list(range(20)) for items in received.values())


def test_a_fast_job_is_coupled_to_what_a_slow_one_takes_later():
    buffered = Buffered(made("dependent", {"fast": range(50), "slow": range(50)}, 2))
    fast = [buffered.take("fast") for _ in range(50)]

    assert [buffered.take("slow") for _ in range(50)] == fast


def test_a_job_that_leaves_a_buffer_takes_its_queue_along():
    buffered = Buffered(made("shared", {"a": range(9), "b": range(9)}), limit=3)
    assert [buffered.take("a") is None for _ in range(5)] == [False] * 5
    buffered.remove("b")

    assert len(list(iter(lambda: buffered.take("a"), None))) == 4
    assert buffered.order.jobs == ["a"]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda order: order.add("a", [3]), "job 'a' is here already. Choose another name"),
        (lambda order: order.add("b", []), "job 'b' has 0 items"),
        (lambda order: order.add("b", [1, 1]), "lists an item twice"),
        (lambda order: order.add("b", [0.5]), "float64; give a flat list of whole numbers"),
        (lambda order: order.add("b", [-1]), "item -1, outside a dataset of 10 items"),
        (lambda order: order.add("b", [10]), "item 10, outside a dataset of 10 items"),
        (lambda order: order.add("b", [1], fingerprint="flowers/v2"), "'flowers/v2'.*'flowers/v1'"),
        (lambda order: order.remove("b"), "no job 'b' here.*: a"),
        (lambda order: order.step(["b"]), "no job 'b' here"),
        (lambda order: order.restart("a"), "still needs 3 items of epoch 0"),
        (lambda order: order.load_state_dict({"version": 9}), "version 9"),
        (lambda order: Buffered(order, limit=0), "limit is 0"),
    ],
)
def test_bad_input_is_one_clear_error(name, make, message):
    order = made(name, {"a": range(3)}, size=10, fingerprint="flowers/v1")
    with pytest.raises(InputError, match=message):
        make(order)

    assert order.jobs == ["a"]
    assert order.remaining("a") == 3


def test_jobs_on_different_data_cannot_share():
    with pytest.raises(DataShareError, match="Start an order of its own"):
        made("shared", fingerprint="x").add("a", [1], fingerprint="y")
    with pytest.raises(InputError, match="size is -1"):
        made("shared", size=-1)


UNCOUPLED = [name for name in ORDERS if not ORDERS[name].coupled]


@pytest.mark.parametrize("name", UNCOUPLED)
@settings(max_examples=30)
@given(calls=st.lists(st.sampled_from(["a", "b", "c", "step", "save", "begin"]), max_size=80), seed=st.integers(0, 99))
def test_jobs_that_draw_on_their_own_receive_each_item_once_also_between_steps_and_states(name, calls, seed):
    jobs = overlapping(seed)
    order, left = made(name, jobs, seed), {job: set(items.tolist()) for job, items in jobs.items()}
    for call in calls:
        if call == "step":
            for item, receivers in order.step().items():
                for job in receivers:
                    left[job].remove(item)
        elif call == "save":
            state, order = order.state_dict(), made(name)
            order.load_state_dict(through_a_file(state))
        elif call == "begin":
            order.begin("a", epoch=1, remaining=sorted(left["a"]))
        elif left[call]:
            left[call].remove(order.draw(call))
        else:
            assert order.draw(call) is None
        assert {job: order.remaining(job) for job in jobs} == {job: len(need) for job, need in left.items()}

    assert {job: set(order.needed(job).tolist()) for job in jobs} == left


def test_bitmaps_are_brought_up_to_date_between_draws(monkeypatch):
    monkeypatch.setattr(job_order, "BUILD_STEPS", 5)
    for name in UNCOUPLED:
        order = made(name, {"a": range(23), "b": range(9)})
        assert sorted(iter(lambda order=order: order.draw("a"), None)) == list(range(23))
        assert order.remaining("b") == 9


def test_coupled_jobs_do_not_draw_alone():
    with pytest.raises(InputError, match="the jobs of Dependent draw together"):
        made("dependent", {"a": [1]}).draw("a")


@pytest.mark.parametrize("name", ORDERS)
def test_a_job_may_begin_any_epoch_with_what_is_left_of_it(name):
    order = made(name, {"a": range(10)}, 1)
    order.step()
    order.add("b", range(10), epoch=4, remaining=[2, 5, 7])
    order.begin("a", epoch=7, remaining=[1, 2])
    received = drained(order)

    assert {job: sorted(items) for job, items in received.items()} == {"a": [1, 2], "b": [2, 5, 7]}
    assert (order.epoch("a"), order.epoch("b")) == (7, 4)
    order.restart("b")
    assert (order.epoch("b"), order.remaining("b")) == (5, 10)
    with pytest.raises(InputError, match="still needs items that are not its own"):
        order.begin("a", epoch=0, remaining=[11])


def test_an_independent_job_that_resumes_goes_on_in_its_own_order():
    order = made("independent", {"a": range(30)}, 3)
    whole = [order.draw("a") for _ in range(30)]
    again = made("independent", {}, 3)
    again.add("a", range(30), remaining=sorted(whole[12:]))

    assert [again.draw("a") for _ in range(18)] == whole[12:]


def test_a_shared_job_that_joins_begins_where_another_has_used_its_items_not_where_it_draws():
    order = Shared({"a": range(100)}, seed=2)
    drawn = [order.draw("a") for _ in range(40)]
    order.ahead = {"a": 15}
    order.add("b", range(100))

    assert [order.draw("b") for _ in range(15)] == drawn[25:]


def test_nobody_begins_where_a_job_runs_through_its_last_items_alone():
    order = Shared({"a": range(100)}, seed=2)
    for _ in range(50):
        order.draw("a")
    order.add("b", range(100))
    for _ in range(50):
        order.draw("a")
    for _ in range(80):
        order.draw("b")
    order.restart("a")
    first = [order.draw("a") for _ in range(100)]
    order.add("c", range(100))

    assert [order.draw("c") for _ in range(100)] != first
    assert sorted(first) == list(range(100))


def test_a_job_that_fell_behind_catches_up_and_then_meets_the_others_items():
    order = Shared({"fast": range(200), "slow": range(200)}, seed=4)
    for _ in range(120):
        order.draw("fast")
    slow = [order.draw("slow") for _ in range(20)]
    assert not order.catch_up("fast")
    assert order.catch_up("slow")
    together = [order.draw("fast") for _ in range(60)]
    assert [order.draw("slow") for _ in range(60)] == together
    rest = list(iter(lambda: order.draw("slow"), None))

    assert sorted(slow + together + rest) == list(range(200))


def laws(monkeypatch, story, passes=2):
    """What `story` has taken -> how often each rest follows, over all orders of 4 items in the first passes."""
    found = {}
    for places in itertools.product(itertools.permutations(range(4)), repeat=passes):
        keys = np.array(places, np.uint64) * np.uint64(1 << 62) + np.uint64(1 << 61)
        monkeypatch.setattr(
            strategies, "item_seeds", lambda _, number, items, __, keys=keys: keys[number % passes][items]
        )
        before, rest = story(Shared(seed=0, jobs={}, size=4))
        found.setdefault(tuple(before), Counter())[tuple(rest)] += 1
    return found


def drawn(order, job, count=None):
    return list(itertools.islice(iter(lambda: order.draw(job), None), count))


SETS = [[0, 1], [1, 2], [0, 1, 2], [0, 2, 3], [0, 1, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("late", SETS)
@pytest.mark.parametrize("first", SETS)
def test_a_late_job_with_any_set_has_an_exactly_uniform_order(monkeypatch, first, late, ahead, leaves):
    """Also behind another job that came late, and where that one leaves."""

    def story(order):
        order.add("first", first)
        order.draw("first")
        order.add("second", [0, 1, 3])
        second = drawn(order, "second", 2)
        order.ahead = {"first": ahead, "second": ahead}
        if leaves:
            order.remove("second")
        order.add("late", late)
        assert sorted(second + drawn(order, "second")) == [0, 1, 3] if not leaves else second
        return [], drawn(order, "late")

    counts = laws(monkeypatch, story)[()]
    assert counts == dict.fromkeys(itertools.permutations(late), counts.total() // math.factorial(len(late)))


@pytest.mark.parametrize("other", SETS)
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_what_is_left_is_exactly_uniform_whatever_came_before_a_job_caught_up(monkeypatch, other, taken):
    def story(order):
        order.add("other", other)
        order.add("slow", [0, 1, 2, 3])
        before = drawn(order, "slow", taken)
        drawn(order, "other", len(other) - 1)
        if order.catch_up("slow"):
            assert len(other) - 1 > taken * len(other) / 4
        return before, drawn(order, "slow")

    for counts in laws(monkeypatch, story).values():
        assert len(counts) == math.factorial(4 - taken)
        assert len(set(counts.values())) == 1


def test_a_job_that_has_just_come_is_not_behind():
    order = Shared({"a": range(20)}, seed=1)
    first = drawn(order, "a", 8)
    order.add("b", range(20))
    assert not order.catch_up("b")
    order.begin("a", epoch=1, remaining=range(9))
    assert not order.catch_up("a")
    assert sorted(drawn(order, "b")) == list(range(20))
    assert len(first) == 8
    with pytest.raises(InputError, match="no job 'c' here"):
        order.catch_up("c")


def test_a_shared_order_goes_on_after_a_restore_in_the_middle_of_late_and_resumed_epochs():
    order = Shared({"a": range(60)}, seed=5)
    drawn(order, "a", 25)
    order.add("b", range(30, 90), remaining=range(40, 80))
    drawn(order, "b", 3)
    drawn(order, "a", 20)
    order.catch_up("b")
    other = Shared({})
    other.load_state_dict(through_a_file(order.state_dict()))
    for each in (order, other):
        each.add("c", range(50))

    assert [drawn(other, job) for job in "abc"] == [drawn(order, job) for job in "abc"]
    with pytest.raises(InputError, match="earlier shared order"):
        other.load_state_dict({key: value for key, value in order.state_dict().items() if key != "walks"})
