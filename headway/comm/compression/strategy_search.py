"""Which option compresses each gradient so that the iteration is shortest: Espresso's search, from several starts.

A plan is one option per tensor. What a plan costs is a function (`Pricing.score`), so one search serves every model
of time: the published ones (here) and chains of stages (`compression/options.py`).

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

The two cost functions of Espresso's public artifact, exactly: a peer to compare plans with, not a model of truth.

Gradients complete in backward order. Gradient `i` has n_i float32 and is ready r_i after backward began; then one
link carries it, in that order, in the form that its option says:

    option  0 raw   1 half   2 sparse or signs between hosts   3 the same on both levels   4 as 2, coded on the CPU

    k ranks per host, H hosts, M = 4 n bytes, f = share of bytes that the codec sends, all times in us
    K = 2 (k - 1) / k,  N = 2 (H - 1) / H       what a ring sends per byte, inside a host and between hosts
    inside(b) = b_in floor(K b / 1000)          b_in = 0.4 (pcie) or 0.02 (nvlink) us per 1000 bytes
    between(b) = b_out floor(N b / 1000)        b_out = 0.8
    link(0) = 300 + inside(M) + between(M)      link(1) = the same of M / 2
    link(2) = 300 + inside(M / 2) + between(M f)     link(3) = 600 + inside(M f) + between(M f)
    s = max(1, n / k / 2^20)  scales the times of the codec;  enc = total - dec

    published-gpu   late += enc s ;  link = max(link, r + late) + [o >= 2] total s + link(o) ;     cost = link
    published-cpu   o < 4: link = max(link, r) + [o >= 2] total s + link(o)
                    o = 4: side = max(link, r, side) + 32 n / 20000 + link(2) ;     cost = max(link, side)

The ready times drop the whole milliseconds of every gap, as the artifact does: what it calls an iteration is shorter
than the recorded one. `headway.comm.compression.strategy_search` searches plans under these costs and others.

Source: Wang et al., EuroSys 2023; github.com/zhuangwang93/Espresso (Apache-2.0), commit a0294e3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.files.safe_files import read_json
from headway.core.tables import pick
from headway.sim.graph.dag import kernels

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


Floats = NDArray[np.float64]

RAW, HALF, BETWEEN, TWO_LEVEL, ON_CPU = range(5)
"""The options of a plan."""

LATENCY_US, OUT_US, CPU_BYTES_PER_US = 150.0, 0.8, 20_000
"""A step of a collective; 1000 bytes between hosts; what the CPU encodes of 8 bytes per byte of a gradient."""

INSIDE_US: dict[str, float] = {"pcie": 0.4, "nvlink": 0.02}
"""Link inside a host -> us per 1000 bytes."""

CODEC_NUMEL = 2**20
"""Numbers per rank of the codec times."""


class CodecUs(msgspec.Struct, frozen=True):
    """Times of a codec for `CODEC_NUMEL` numbers, by option 0..3."""

    total_us: tuple[float, float, float, float]
    """Encoding and decoding, us."""

    decode_us: tuple[float, float, float, float]
    """Decoding alone, us."""


CODECS_US: dict[str, CodecUs] = {
    "randomk": CodecUs((0, 26, 88, 1000), (0, 22, 34, 100)),
    "dgc": CodecUs((0, 26, 390, 1400), (0, 22, 34, 100)),
    "efsignsgd": CodecUs((0, 26, 270, 810), (0, 22, 140, 420)),
    "onebit": CodecUs((0, 26, 620, 2000), (0, 22, 170, 520)),
}
"""Codec -> its published times on a V100."""


class ModelGradients(msgspec.Struct, frozen=True):
    """The gradients of a model, in the order in which backward completes them; checked by `check`."""

    tensors: tuple[tuple[str, int], ...]
    """[n] Name and number of float32."""

    gap_us: tuple[float, ...]
    """[n] Time since the gradient before, us."""

    def check(self, where: str) -> None:
        """Raise `InputError` for no tensors, tensors without numbers, and gaps that are not times."""
        if not self.tensors or len(self.tensors) != len(self.gap_us):
            raise InputError(
                f"{where} has {len(self.tensors)} tensors and {len(self.gap_us)} gaps; give one gap for each of >= 1."
            )
        for (name, numel), gap in zip(self.tensors, self.gap_us, strict=True):
            if numel < 1:
                raise InputError(f"{where}: tensor {name} has {numel} numbers; it needs at least 1. Leave it out.")
            if not 0 <= gap < math.inf:
                raise InputError(f"{where}: the gap before {name} is {gap} us; pass finite times >= 0.")


class PublishedSetup(msgspec.Struct, frozen=True):
    """Where a model is trained, and with which codec; checked by `check`. Published plans are not read."""

    model: str
    """Name of the model."""

    codec: str
    """Name of the codec."""

    hosts: int
    """H."""

    ranks_per_host: int
    """k."""

    inside: str
    """Entry of `INSIDE_US`."""

    wire_fraction: float
    """f, in (0, 1]."""

    two_level: bool
    """Whether option 3 may be chosen."""

    def check(self, where: str) -> None:
        """Raise `InputError` where a value breaks its rule."""
        pick(INSIDE_US, self.inside, "link inside a host")
        for what, count in (("hosts", self.hosts), ("ranks_per_host", self.ranks_per_host)):
            if count < 1:
                raise InputError(f"{where}: {what} is {count}; it must be at least 1.")
        if not 0 < self.wire_fraction <= 1:
            raise InputError(f"{where}: wire_fraction is {self.wire_fraction}; pass a fraction in (0, 1].")


@dataclass(frozen=True, slots=True)
class LinkTable:
    """What each gradient costs under each option, in the words of the formulas above."""

    ready_us: Floats
    """[n] r."""

    encode_us: Floats
    """[n, 4] enc s, by option 0..3."""

    codec_us: Floats
    """[n, 4] [o >= 2] total s."""

    link_us: Floats
    """[n, 4] link(o)."""

    cpu_us: Floats
    """[n] 32 n / 20000."""


def read_models(path: Path) -> dict[str, ModelGradients]:
    """Return the models of a file `{model: {"tensors": [[name, numel], ...], "gap_us": [...]}}`. Raises `OSError`,
    `FormatError`."""
    found: dict[str, ModelGradients] = read_json(path, dict[str, ModelGradients])
    return found


def read_setups(path: Path) -> list[PublishedSetup]:
    """Return the setups of a file, a list of objects with the fields of `PublishedSetup`; others are ignored.

    Raises `OSError`, `FormatError`.
    """
    found: list[PublishedSetup] = read_json(path, list[PublishedSetup])
    return found


def read_codecs(path: Path) -> dict[str, CodecUs]:
    """Return the codecs of a file `{codec: {"total_us": [4], "decode_us": [4]}}`. Raises `OSError`, `FormatError`."""
    found: dict[str, CodecUs] = read_json(path, dict[str, CodecUs])
    return found


def checked(gradients: ModelGradients, setup: PublishedSetup, codecs: Mapping[str, CodecUs]) -> CodecUs:
    """Return the codec of a setup. Raises `InputError` on invalid values, `UnknownNameError` on unknown names."""
    gradients.check(f"model {setup.model}")
    setup.check(f"setup of {setup.model}")
    codec = pick(codecs, setup.codec, "codec with published times")
    for whole, part in zip(codec.total_us, codec.decode_us, strict=True):
        if not 0 <= part <= whole < math.inf:
            raise InputError(
                f"codec {setup.codec} takes {whole} us, {part} us of it to decode; pass 0 <= decode <= total."
            )
    return codec


def link_table(
    gradients: ModelGradients, setup: PublishedSetup, codecs: Mapping[str, CodecUs] = CODECS_US
) -> LinkTable:
    """Return the table. Raises as `checked`."""
    codec = checked(gradients, setup, codecs)
    numel = np.array([numel for _, numel in gradients.tensors], np.float64)
    ring = [2 * (ranks - 1) / ranks for ranks in (setup.ranks_per_host, setup.hosts)]

    raw = 4 * numel

    def link(steps: int, inside: float, between: float) -> Floats:
        """Return the time of a gradient whose bytes are multiplied by `inside` and `between`."""
        # In the order of the formula: another one rounds otherwise, and floor makes 1 us of it.
        inside_us = INSIDE_US[setup.inside] * np.floor(ring[0] * raw * inside / 1000)
        return np.asarray(steps * LATENCY_US + inside_us + OUT_US * np.floor(ring[1] * raw * between / 1000))

    sent = setup.wire_fraction
    scale = np.maximum(1.0, numel / setup.ranks_per_host / CODEC_NUMEL)[:, None]
    total, decode = np.array(codec.total_us, np.float64), np.array(codec.decode_us, np.float64)
    return LinkTable(
        ready_us=np.cumsum(np.fmod(np.array(gradients.gap_us, np.float64), 1000)),
        encode_us=total * scale - decode * scale,
        codec_us=np.where(np.arange(4) >= BETWEEN, total, 0.0) * scale,
        link_us=np.stack([link(2, 1, 1), link(2, 0.5, 0.5), link(2, 0.5, sent), link(4, sent, sent)], axis=1),
        cpu_us=raw * 8 / CPU_BYTES_PER_US,
    )


def published_gpu(
    gradients: ModelGradients, setup: PublishedSetup, codecs: Mapping[str, CodecUs] = CODECS_US
) -> Pricing:
    """Return the cost in which encoding on the device delays all later gradients: options 0..3. Raises as
    `checked`."""
    table = link_table(gradients, setup, codecs)
    work = np.stack([table.codec_us, table.link_us], axis=2)
    return _priced(gradients, setup, table.ready_us, table.encode_us, work)


def published_cpu(
    gradients: ModelGradients, setup: PublishedSetup, codecs: Mapping[str, CodecUs] = CODECS_US
) -> Pricing:
    """Return the cost in which the CPU codes beside the link and nothing delays backward: options 0..4. Raises as
    `checked`."""
    table = link_table(gradients, setup, codecs)
    on_cpu = np.stack([table.cpu_us, table.link_us[:, BETWEEN]], axis=1)[:, None]
    work = np.concatenate([np.stack([table.codec_us, table.link_us], axis=2), on_cpu], axis=1)
    return _priced(gradients, setup, table.ready_us, np.zeros(work.shape[:2]), work, offload={BETWEEN: ON_CPU})


COSTS: dict[str, Callable[..., Pricing]] = {"published-gpu": published_gpu, "published-cpu": published_cpu}
"""Cost -> the function of (gradients, setup, codecs) that makes it; `options.COSTS` has all."""


def _priced(
    gradients: ModelGradients,
    setup: PublishedSetup,
    ready: Floats,
    late: Floats,
    work: Floats,
    *,
    offload: Mapping[int, int] | None = None,
) -> Pricing:
    """Return the pricing by the kernel that serves both functions."""
    side = ON_CPU if offload else work.shape[1]
    one_link = kernels("plan_kernels").one_link  # Looked up once: it is called for every tensor of every pass.

    def score(plans: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
        cost, gap = np.empty(len(plans)), np.empty(len(plans), np.int64)
        one_link(plans, ready, late, work, side, cost, gap)
        return cost, gap

    options = [option for option in range(work.shape[1]) if option != TWO_LEVEL or setup.two_level]
    return Pricing(
        sizes=tuple(numel for _, numel in gradients.tensors),
        options=tuple(options),
        score=score,
        raw=RAW,
        offload=dict(offload or {}),
    )
