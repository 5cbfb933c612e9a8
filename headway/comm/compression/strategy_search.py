"""Which option compresses each gradient so that the iteration is shortest: Espresso's search, from several starts.

A plan is one option per tensor. What a plan costs is a function (`Pricing.score`), so one search serves every model
of time: the published ones (`compression/published.py`) and chains of stages (`compression/options.py`).

    starts      raw everywhere, and the best options everywhere
    descent     tensor by tensor, the option that is cheapest with all others as they are, until a pass improves
                nothing; sizes falling (nearest to the output first among equals), order of backward, and reverses
    Remove      a raw tensor sent before the link's last idle gap is skipped: its time does not matter
    offload     tensors of one size and option are alike but for their place, so only the number on the CPU is
                searched, not the subset: those farthest from the output are there (Espresso, lemma 1)
    finalists   the best ends once more, with such numbers between any two options, from both sides: the lemma does
                not hold in general. In chains of stages whose encoding delays backward, those nearest to the output
                are the best subset, since what they do on the CPU is hidden behind the rest of backward

The best of all starts and of all uniform plans is returned, so it is never worse than one option for all.

>>> import numpy as np
>>> def score(plans):  # 3 tensors on one link: 5 raw, 3 compressed, but the second one that is compressed waits 4
...     return plans.shape[1] * 5.0 - 2.0 * plans.sum(1) + 4.0 * (plans.sum(1) > 1), np.zeros(len(plans), int)
>>> search(Pricing(sizes=(9, 9, 9), options=(0, 1), score=score)).cost
13.0
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError

Plans = NDArray[np.int64]

ScoreFn = Callable[[Plans], tuple[NDArray[np.float64], NDArray[np.int64]]]
"""[k, n] options -> [k] cost, and [k] the first tensor after the last idle gap of the link (0: no gap)."""

End = tuple[float, Plans]
"""A cost, and the plan that has it."""

Unit = tuple[int, ...]
"""Tensors, index rising, that get the same option at once."""

LEAST_GAIN = 1e-9
"""A plan is better when it is cheaper by more than this fraction: rounding is no gain, and passes end."""


STARTS = 4
"""How many uniform plans a search starts from, the best ones; from the plan that compresses nothing it always does."""

LARGE = 2000
"""Choices of all tensors together above which a search begins with all tensors of a size as one, and goes on from the
best end of that, with the options that occur in those ends."""

FINALISTS = 2
"""How many ends of descents are refined."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """What the search chooses from. Tensors are in the order in which backward completes them."""

    sizes: tuple[int, ...]
    """[n] Numbers of each tensor."""

    options: tuple[int, ...]
    """What tensors may have."""

    score: ScoreFn
    """What plans cost."""

    raw: int = 0
    """The option that compresses nothing."""

    offload: Mapping[int, int] = field(default_factory=dict)
    """Option -> the same one, coded on the CPU."""

    choices: tuple[tuple[int, ...], ...] = ()
    """[n] What is worth trying for each tensor; all options where it is empty."""

    names: tuple[str, ...] = ()
    """What option 0, 1, ... is called, where a number says too little."""

    def choice(self, at: int) -> tuple[int, ...]:
        """Return what is worth trying for a tensor."""
        return self.choices[at] if self.choices else self.options

    def cost(self, plan: Plans) -> float:
        """Return what one plan [n] costs. Raises `InputError` on another length or an option that is not offered."""
        if plan.shape != (len(self.sizes),):
            raise InputError(f"the plan has {plan.size} options for {len(self.sizes)} tensors; give one for each.")
        unknown = np.flatnonzero(~np.isin(plan, self.options))
        if unknown.size:
            at = int(unknown[0])
            listed = ", ".join(map(str, self.options))
            raise InputError(f"option {at} of the plan is {plan[at]}; this setup offers {listed}.")
        return float(self.score(plan[None])[0][0])

    def uniform(self) -> dict[int, float]:
        """Return option -> what the plan costs that has it everywhere."""
        costs, _ = self.score(self.uniform_plans())
        return dict(zip(self.options, costs.tolist(), strict=True))

    def uniform_plans(self) -> Plans:
        """Return [options, n], one plan per option."""
        return np.repeat(np.array(self.options, np.int64)[:, None], len(self.sizes), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """The best plan found, and the plans that it is compared with."""

    options: Plans
    """[n] Option of each tensor."""

    cost: float
    """Of this plan, in the unit of the score."""

    raw: float
    """Of the plan that compresses nothing."""

    uniform: Mapping[int, float]
    """Option -> cost of the plan that has it everywhere."""


def search(pricing: Pricing) -> Strategy:
    """Return the best plan. Raises `InputError` without tensors or options."""
    num = len(pricing.sizes)
    if not num or not pricing.options or pricing.raw not in pricing.options:
        raise InputError(
            f"there are {num} tensors and the options {list(pricing.options)}; give at least one of each, and the "
            f"option {pricing.raw} that compresses nothing."
        )
    uniform = pricing.uniform()
    offload = list(pricing.offload.items())
    ends = list(zip(uniform.values(), pricing.uniform_plans(), strict=True))
    raw = ends[pricing.options.index(pricing.raw)]
    starts = [raw, *sorted((end for end in ends if end is not raw), key=_cost)[:STARTS]]
    orders, finalists = _orders(pricing.sizes), FINALISTS
    if sum(len(pricing.choice(at)) for at in range(num)) > LARGE:
        starts = [_descent(pricing, start, _alike(pricing.sizes), offload) for _, start in starts]
        pricing = _narrowed(pricing, starts)
        starts, orders, finalists = [min(starts, key=_cost)], orders[:2], 1
    for order in orders:
        ends += [_descent(pricing, start, order, offload) for _, start in starts]
    # Numbers between any two of their options lead out of plans that no tensor alone improves.
    different = dict(sorted(ends, key=_cost))
    for end in list(different.values())[:finalists]:
        pairs = list(itertools.permutations(sorted(set(end.tolist())), 2))
        ends += [_descent(pricing, end, order, pairs) for order in orders]
    cost, plan = min(ends, key=_cost)
    return Strategy(options=plan, cost=cost, raw=uniform[pricing.raw], uniform=uniform)


def _cost(end: End) -> float:
    return end[0]


def _orders(sizes: tuple[int, ...]) -> list[list[Unit]]:
    """Return the orders in which tensors are looked at, each by itself."""
    falling = sorted(range(len(sizes)), key=lambda at: (-sizes[at], at))
    backward = range(len(sizes))
    return [[(at,) for at in order] for order in (falling, falling[::-1], backward, backward[::-1])]


def _alike(sizes: tuple[int, ...]) -> list[Unit]:
    """Return the tensors of each size, sizes falling."""
    return [tuple(at for at, own in enumerate(sizes) if own == size) for size in sorted(set(sizes), reverse=True)]


def _narrowed(pricing: Pricing, ends: Sequence[End]) -> Pricing:
    """Return the pricing with the choices that occur in `ends` alone."""
    found = {pricing.raw, *(option for _, plan in ends for option in plan.tolist())}
    choices = tuple(tuple(one for one in pricing.choice(at) if one in found) for at in range(len(pricing.sizes)))
    return replace(pricing, choices=choices)


def _descent(pricing: Pricing, start: Plans, order: list[Unit], pairs: Sequence[tuple[int, int]]) -> End:
    """Return the cost and the plan that no unit of `order` improves, and no number of tensors of one size between two
    options of `pairs`."""
    plan = start.copy()
    scores, gaps = pricing.score(plan[None])
    cost, gap = float(scores[0]), int(gaps[0])
    while True:
        before = cost
        for unit in order:
            if unit[-1] < gap and all(plan[at] == pricing.raw for at in unit):
                continue
            choices = pricing.choice(unit[0])
            plans = np.repeat(plan[None], len(choices), axis=0)
            for at in unit:
                plans[:, at] = choices
            cost, gap, plan = _better(pricing, plans, (cost, gap, plan))
        for plans in _counts(pricing.sizes, plan, pairs):
            cost, gap, plan = _better(pricing, plans, (cost, gap, plan))
        if not cost < before * (1 - LEAST_GAIN):
            return cost, plan


def _better(pricing: Pricing, plans: Plans, best: tuple[float, int, Plans]) -> tuple[float, int, Plans]:
    """Return the cheapest of `plans` with its cost and gap, or `best` where none is cheaper."""
    scores, gaps = pricing.score(plans)
    at = int(scores.argmin())
    if scores[at] < best[0] * (1 - LEAST_GAIN):
        return float(scores[at]), int(gaps[at]), plans[at]
    return best


def _counts(sizes: tuple[int, ...], plan: Plans, pairs: Sequence[tuple[int, int]]) -> Iterator[Plans]:
    """Yield, for each size and pair of options, the plans in which the 0, 1, ... of its tensors that are farthest from
    the output have the second one, and the others the first one."""
    numels = np.array(sizes)
    for one, other in pairs:
        both = (plan == one) | (plan == other)
        for numel in np.unique(numels[both]):
            members = np.flatnonzero(both & (numels == numel))
            plans = np.repeat(plan[None], members.size + 1, axis=0)
            later = np.arange(members.size)[None] >= members.size - np.arange(members.size + 1)[:, None]
            plans[:, members] = np.where(later, other, one)
            yield plans
