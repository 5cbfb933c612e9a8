"""The order that jobs share: the chosen strategy stays, "auto" changes at epochs only, and nobody's law changes."""

import itertools
from collections import Counter

import numpy as np
import pytest

from headway.core.errors import InputError
from headway.data.cached.tiered import TieredCache
from headway.data.orders.strategies import ORDERS
from headway.data.service import ordering as module
from headway.data.service.ordering import AUTO, Ordering
from tests.chi_square import p_value


def made(name, size=40, seed=0):
    return Ordering(name, size=size, seed=seed, cache=TieredCache(10, (0, 1, 0)))


def rest(ordering, job):
    return list(iter(lambda: ordering.take(job), None))


@pytest.mark.parametrize("name", [AUTO, *ORDERS])
def test_each_job_gets_its_items_once_an_epoch_whatever_changes_between(name):
    ordering, rng = made(name), np.random.default_rng(3)
    for turn in range(6):
        jobs = {f"j{k}": rng.permutation(40)[: 10 + 7 * k] for k in range(4)}
        got = {job: [] for job in jobs}
        for job, items in jobs.items():
            ordering.remove(job)
            ordering.begin(job, items, epoch=turn, cache_items=3)
            for other in list(got)[: int(job[1]) + 1]:
                got[other] += [item for _ in range(4) if (item := ordering.take(other)) is not None]
        ordering.catch_up("j0", {})
        for job, items in jobs.items():
            assert sorted(got[job] + rest(ordering, job)) == sorted(items.tolist())


def test_jobs_of_one_set_share_an_order_and_unlike_late_ones_may_be_coupled():
    ordering = made(AUTO, 300)
    for job in "ab":
        ordering.begin(job, range(300), epoch=0, cache_items=5)
    assert (ordering.name, ordering.num_changes) == ("shared", 0)
    names = set()
    for share in (3, 2, 1):
        other = made(AUTO, 300, seed=share)
        for k, size in enumerate((300 // share, 150, 90, 60)):
            other.begin(f"j{k}", np.random.default_rng(k).permutation(300)[:size], epoch=0)
            names.add(other.name)
    assert names == {"shared", "dependent"}


def test_the_same_names_begin_another_epoch_where_one_is_under_way():
    ordering = made("independent")
    ordering.begin("a", range(10), epoch=0)
    first = [ordering.take("a") for _ in range(4)]
    ordering.begin("a", range(10), epoch=0, remaining=sorted(set(range(10)) - set(first)))

    assert sorted(first + rest(ordering, "a")) == list(range(10))


def test_a_job_that_joined_late_or_changed_its_order_on_the_way_has_a_uniform_one(monkeypatch):
    choices = itertools.cycle(["dependent", "shared"])
    monkeypatch.setattr(Ordering, "_decide", lambda self, *_: self._change(next(choices)))
    counts = Counter()
    for seed in range(900):
        ordering = Ordering(AUTO, size=6, seed=seed)
        ordering.begin("job", [0, 2, 5], epoch=0)
        ordering.begin("large", range(6), epoch=0)
        sequence = [ordering.take("job"), ordering.take("large")][:1]
        ordering.begin("late", range(6), epoch=0)
        counts[(*sequence, *rest(ordering, "job"))] += 1

    assert p_value([counts[order] for order in itertools.permutations([0, 2, 5])], [150] * 6) > 1e-3


def test_an_order_that_changes_again_does_not_repeat_itself():
    ordering = Ordering(AUTO, size=30, seed=0)
    passes = []
    for _ in range(3):
        ordering.begin("a", range(30), epoch=0)
        passes.append(tuple(rest(ordering, "a")))
        ordering._change("shared")

    assert len(set(passes)) == 3


def test_where_a_job_cannot_catch_up_it_is_told_so():
    for name in ("independent", "dependent"):
        ordering = made(name)
        ordering.begin("a", range(9), epoch=0)
        assert not ordering.catch_up("a", {})
    assert not made("shared").catch_up("a", {})


def test_bad_input_is_one_clear_error():
    with pytest.raises(InputError, match="unknown order 'autos'"):
        Ordering("autos", size=1, seed=0)
    with pytest.raises(InputError, match="the opportunistic order goes by a cache"):
        Ordering("opportunistic", size=1, seed=0)
    with pytest.raises(InputError, match="item 7, outside a dataset of 3"):
        Ordering("shared", size=3, seed=0).begin("a", [7], epoch=0)
    assert module.CANDIDATES[0] == "shared"
