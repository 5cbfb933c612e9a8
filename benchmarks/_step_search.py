"""Better neighbours of a training step: what a round of the optimiser tries, scored in batches on the compiled Dag.

Use through `benchmarks._step_optimiser`. Each neighbourhood takes a step and
returns one that is at least as fast: a walk along the critical path with
dPRO's rules, buckets, parts, fused operations.
Candidates are columns of one replay; those that gain are combined, best
first, and the combinations are columns of a second one. Times are int64 ns.

When fusing pays: the rules of dPRO's optimiser for operations, gradients and parts (arXiv 2205.02473, section 5).

Use them to propose moves; a proposal is then scored by replay. p is a compute
operation, q its sync: duration d, end e, both of operation n - 1 and n, in
any one unit of time. t_sync is `Network.sync_ns`.

>>> op_fusion_pays(sync_ns=30, before_ns=50, now_ns=50, fused_ns=60)  # saves 40, delays a sync of 30
True
>>> gradient_fusion_pays(sync_end_ns=100, compute_end_ns=60, fused_sync_ns=70, sync_ns=40)  # 100 > 60 + 70 - 40
True
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks._hops import Network
from benchmarks._step_model import (
    BACKWARD,
    FORWARD,
    Flags,
    Ints,
    TrainingStep,
    bucket_by_size,
    default_buckets,
    fuse_ops,
    fusible,
    with_buckets,
)
from benchmarks._step_view import StepView, Variants
from headway.sim.ddp.ddp_step import best_buckets as best_on_one_lane
from headway.sim.graph.attribution import critical_path

# When fusing pays: the rules of dPRO's optimiser for operations, gradients and parts (arXiv 2205.02473, section 5).

MOST_PARTS = 64
"""More parts than this are never tried: each is a message of its own."""


def op_fusion_pays(*, sync_ns: float, before_ns: float, now_ns: float, fused_ns: float) -> bool:
    """Say whether to run n - 1 and n as one: the compute it saves exceeds the sync of n - 1 that it delays.

    q_d[n-1] < p_d[n-1] + p_d[n] - t_fused.
    """
    return sync_ns < before_ns + now_ns - fused_ns


def gradient_fusion_pays(*, sync_end_ns: float, compute_end_ns: float, fused_sync_ns: float, sync_ns: float) -> bool:
    """Say whether to send n - 1 and n as one: alone, n - 1 ends too late for n to start when it is ready.

    q_e[n-1] > p_e[n] + t_sync(s[n-1] + s[n], k*) - t_sync(s[n], k*_n).
    """
    return sync_end_ns > compute_end_ns + fused_sync_ns - sync_ns


def best_parts(network: Network, num_bytes: int) -> int:
    """Return k* = argmin_k t_sync(s, k) over 1..`MOST_PARTS`, the fewest parts among equals.

    One for rings, whose rounds fill the link already.
    """
    cuts = np.arange(1, MOST_PARTS + 1)
    return int(cuts[np.argmin(network.sync_ns(num_bytes, cuts))])


def best_buckets(network: Network, ready_ns: Ints, gradient_bytes: Ints) -> Flags:
    """Return [T] joined flags of the buckets that are through soonest, sent in order of readiness in one part each.

    Exact on one lane (rings); with several stages a bucket takes what the slowest one does, which makes it a good
    start.
    """

    def takes_ns(num_bytes: Ints) -> Ints:
        stages = network.stages(num_bytes)
        return np.max([stage.job_ns * stage.jobs for stage in stages], axis=0) if stages else np.zeros_like(num_bytes)

    return best_on_one_lane(ready_ns, gradient_bytes, takes_ns)


MOST_COLUMNS = 256
"""Variants replayed at once."""

STARTS = 4
"""Bucketings from which buckets are improved; the best of all sizes tried."""

COMBINED = 24
"""Gaining candidates that are combined, best first."""


@dataclass(slots=True)
class Scorer:
    """Step times of variants, with the compiled view kept."""

    allowed: frozenset[str]
    """Moves that may be made."""

    scored: int = 0
    """Variants scored so far."""

    _views: dict[int, StepView] = field(default_factory=dict)

    def steps(self, steps: Sequence[TrainingStep]) -> Ints:
        """Return [k] the step times of whole steps (of one profile and network)."""
        self.scored += len(steps)
        cuts = range(0, len(steps), MOST_COLUMNS)
        return np.concatenate([self._whole(steps[0]).score(steps[at : at + MOST_COLUMNS]) for at in cuts])

    def buckets(
        self, step: TrainingStep, joined: Flags, parts: Ints | None = None, *, view: StepView | None = None
    ) -> Ints:
        """Return [k] the step times of `step` with the buckets `joined` [T, k] and `parts` [T, k]."""
        self.scored += joined.shape[1]
        whole, scores = view or self._whole(step), []
        for at in range(0, joined.shape[1], MOST_COLUMNS):
            columns = slice(at, at + MOST_COLUMNS)
            cut = None if parts is None else parts[:, columns]
            scores.append(whole.score_variants(Variants.of_buckets(step, joined[:, columns], cut)))
        return np.concatenate(scores)

    def _whole(self, step: TrainingStep) -> StepView:
        """Return the view of all gradients; it depends on the profile and the network only.

        Choices are durations of it, so one compiled Dag serves the whole search.
        """
        key = id(step.profile)
        if key not in self._views or self._views[key].step.network != step.network:
            self._views = {key: StepView.of(step)}
        return self._views[key]


def along_the_path(step: TrainingStep, scorer: Scorer) -> TrainingStep:
    """Walk the buckets from the first one on the critical path and fuse or split as dPRO's rules say.

    Partial replay: buckets before the critical path's first one are not looked at.
    """
    if "join_buckets" not in scorer.allowed or step.joined.size < 2:
        return step
    whole = StepView.of(step)
    duration = whole.durations(Variants.of([step]))[:, 0]
    path = set(critical_path(whole.dag, duration).tolist())
    ops = np.stack([whole.ops(tensor) for tensor in range(step.joined.size)])
    carried = [
        t for t in step.bucket_ends().tolist() if path & {op for op in ops[t].reshape(-1).tolist() if duration[op]}
    ]
    if not carried:
        return step
    first = int(np.max(step.bucket_ends()[step.bucket_ends() < carried[0]], initial=-1)) + 1
    flips = _rules(step, whole, first)
    if not flips:
        return step
    masks = np.zeros((step.joined.size, len(flips)), np.bool_)
    masks[flips, np.arange(len(flips))] = True
    view = StepView.of(step, first=first)
    return _climb(step, masks, lambda joined: scorer.buckets(step, joined, view=view), again=False)


def _rules(step: TrainingStep, view: StepView, first: int) -> list[int]:
    """Return boundaries, from gradient `first` on, at which the rules want the opposite of what is."""
    ready = step.ready_ns()
    ends = view.replay([step]).end_ns[:, 0]
    total = np.concatenate([[0], np.cumsum(step.gradient_bytes())])
    closes = step.bucket_ends()
    flips = []
    for tensor in range(first, step.joined.size - 1):
        at = int(np.searchsorted(closes, tensor))
        begin = int(closes[at - 1]) + 1 if at else 0
        end = int(closes[at]) if step.joined[tensor] else int(closes[at + 1])
        free = int(ends[view.ops(begin - 1)[-1, 2]]) if begin else 0
        sync = [int(step.network.sync_ns(total[b] - total[a])) for a, b in (
            (begin, tensor + 1), (tensor + 1, end + 1), (begin, end + 1))]  # fmt: skip
        pays = gradient_fusion_pays(
            sync_end_ns=max(free, int(ready[tensor])) + sync[0],
            compute_end_ns=int(ready[end]),
            fused_sync_ns=sync[2],
            sync_ns=sync[1],
        )
        if pays != bool(step.joined[tensor]):
            flips.append(tensor)
    return flips


def buckets(step: TrainingStep, scorer: Scorer) -> TrainingStep:
    """Improve the buckets by single boundaries, first between blocks (coarsened), then between all gradients.

    Starts from the present ones, those that are through soonest, and the best few of all uniform sizes.
    """
    tensors = step.joined.size
    if "join_buckets" not in scorer.allowed or tensors < 2:
        return step
    starts = [step, _rebucketed(step, scorer), *uniform(step)]
    took = scorer.steps(starts)
    best, best_ns = starts[int(np.argmin(took))], int(took.min())
    block = step.profile.block[step.profile.producer]
    coarse, every = np.flatnonzero(block[1:] != block[:-1]), np.arange(tensors - 1)
    for at in np.argsort(took, kind="stable")[:STARTS].tolist():
        found = starts[at]
        for places in [coarse, every] if coarse.size else [every]:
            found = _climb(found, _toggles(found.joined, places), functools.partial(scorer.buckets, found))
        found_ns = int(scorer.steps([found])[0])
        if found_ns < best_ns:
            best, best_ns = found, found_ns
    return best


def uniform(step: TrainingStep) -> list[TrainingStep]:
    """Return the step with each framework's default buckets, and with buckets of one size: from one gradient to all."""
    total = int(step.gradient_bytes().sum())
    caps = np.unique(np.geomspace(max(1, total // 256), max(2, total), 24).astype(np.int64))
    return [
        default_buckets(step),
        default_buckets(step, "horovod"),
        with_buckets(step, np.zeros_like(step.joined)),
        *(bucket_by_size(step, float(cap)) for cap in caps),
    ]


def _toggles(joined: Flags, places: Ints) -> Flags:
    """Return [T, k] masks: every place toggled, and every boundary moved to the places beside it.

    A move is two toggles at once: alone, either would make one bucket larger
    or one more, and a boundary in a bad place could never leave it.
    """
    masks = [np.isin(np.arange(joined.size), [place]) for place in places.tolist()]
    here = [at for at, place in enumerate(places.tolist()) if not joined[place]]
    for at in here:
        for distance in (-4, -2, -1, 1, 2, 4):
            if 0 <= at + distance < places.size and joined[places[at + distance]]:
                masks.append(masks[at] | masks[at + distance])
    return np.stack(masks, axis=1)


def _climb(step: TrainingStep, masks: Flags, score: Callable[[Flags], Ints], *, again: bool = True) -> TrainingStep:
    """Flip the boundaries of the masks [T, k] that gain, in the best combination; `again` until none does.

    The gaining masks are taken together, best first, 1, 2, ... up to
    `COMBINED` of them: two that gain alone need not gain together, and the
    second replay says how many do. `score` maps flags [T, k] to step times [k].
    """
    places = np.flatnonzero(masks.sum(axis=1)) if again else np.empty(0, np.int64)
    joined = step.joined
    now = int(score(joined[:, None])[0])
    while True:
        tried = joined[:, None] ^ masks
        took = score(tried)
        gaining = np.argsort(took, kind="stable")[:COMBINED]
        gaining = gaining[took[gaining] < now]
        if not gaining.size:
            return with_buckets(step, joined)
        together = joined[:, None] ^ (np.cumsum(masks[:, gaining], axis=1) % 2 == 1)
        both = score(together)
        at = int(np.argmin(both))
        if both[at] <= took[gaining[0]]:
            joined, now = together[:, at], int(both[at])
        else:
            joined, now = tried[:, gaining[0]], int(took[gaining[0]])
        if not again:
            return with_buckets(step, joined)
        masks = _toggles(joined, places)


def parts(step: TrainingStep, scorer: Scorer) -> TrainingStep:
    """Cut each bucket into k* parts, or into half or twice as many, or all of them into one number.

    k* is for a bucket alone on the network; beside others fewer or more parts can be better.
    """
    if "cut_bucket" not in scorer.allowed or not step.joined.size:
        return step
    ends, size = step.bucket_ends(), step.bucket_bytes()
    ideal = np.array([best_parts(step.network, int(n)) for n in size])
    variants = []
    whole = step.parts.copy()
    whole[ends] = ideal
    variants.append(whole)
    variants += [np.where(step.joined, step.parts, number) for number in (1, 2, 4, 8)]
    for end, number in zip(ends.tolist(), ideal.tolist(), strict=True):
        for wanted in {1, max(1, number // 2), number, 2 * number, *range(2, 5)} - {int(step.parts[end])}:
            one = step.parts.copy()
            one[end] = wanted
            variants.append(one)
    tried = np.stack([step.parts, *variants], axis=1)
    took = scorer.buckets(step, np.broadcast_to(step.joined[:, None], tried.shape), tried)
    return replace(step, parts=tried[:, int(np.argmin(took))])


def operations(step: TrainingStep, scorer: Scorer) -> TrainingStep:
    """Fuse or unfuse neighbouring operations, equal ones of equal blocks together (symmetry).

    Where the rule proves a fusion of two producers better, their gradients
    are joined as well. Each variant is tried with the buckets as they are and
    with those that suit its times; so are no fusion at all and every fusion
    of forward operations, which delays no gradient.
    """
    if "fuse_ops" not in scorer.allowed:
        return step
    groups = _equal_ops(step)
    if not groups:
        return step
    every = np.concatenate(groups)
    plain = fuse_ops(step, every.tolist(), on=False)
    forward = fuse_ops(plain, every[step.profile.kind[every] == FORWARD].tolist())
    candidates = [(ops, not step.fused[ops[0]]) for ops in groups]
    variants = [_fused(step, ops, on, scorer) for ops, on in candidates]
    took, now = scorer.steps(variants), int(scorer.steps([step])[0])
    chosen, together = [step, plain, forward, *variants], step
    for at in np.argsort(took, kind="stable").tolist():
        if took[at] < now:
            ops, on = candidates[at]
            together = _fused(together, ops, on, scorer)
            chosen.append(together)
    chosen += [_rebucketed(one, scorer) for one in chosen]
    return chosen[int(np.argmin(scorer.steps(chosen)))]


def _rebucketed(step: TrainingStep, scorer: Scorer) -> TrainingStep:
    """Return the step with the buckets that are through soonest, if buckets may change."""
    if "join_buckets" not in scorer.allowed or not step.joined.size:
        return step
    return with_buckets(step, best_buckets(step.network, step.ready_ns(), step.gradient_bytes()))


def _fused(step: TrainingStep, ops: Ints, on: bool, scorer: Scorer) -> TrainingStep:
    """Fuse (or not) each of `ops` with the next one, and join their gradients where that is proved better."""
    changed = fuse_ops(step, ops.tolist(), on=on)
    profile = step.profile
    if not on or "join_buckets" not in scorer.allowed or profile.kind[ops[0]] != BACKWARD:
        return changed
    joined = step.joined.copy()
    size = step.gradient_bytes()
    for op in ops.tolist():
        before, now = int(profile.tensor[op]), int(profile.tensor[op + 1])
        if before >= 0 and now >= 0 and op_fusion_pays(
            sync_ns=float(step.network.sync_ns(size[before])),
            before_ns=float(profile.duration_ns[op]),
            now_ns=float(profile.duration_ns[op + 1]),
            fused_ns=float(profile.duration_ns[op] + profile.duration_ns[op + 1] - profile.fixed_ns[op + 1]),
        ):  # fmt: skip
            joined[before] = True
    return replace(changed, joined=joined)


def _equal_ops(step: TrainingStep) -> list[Ints]:
    """Return groups of fusible operations that stand in the same place of equal blocks.

    The place is counted from the first operation of the block's forward or
    backward; equal blocks (`StepProfile.block_kind`) have the same operations.
    """
    profile = step.profile
    able = np.flatnonzero(fusible(step))
    runs = np.flatnonzero(np.diff(profile.block * 4 + profile.kind, prepend=-9) != 0)
    place = able - runs[np.searchsorted(runs, able, side="right") - 1]
    key = np.stack([profile.block_kind[profile.block[able]], profile.kind[able], place], axis=1)
    _, group = np.unique(key, axis=0, return_inverse=True)
    return [able[group == one] for one in range(int(group.max(initial=-1)) + 1)]


NEIGHBOURHOODS: dict[str, Callable[[TrainingStep, Scorer], TrainingStep]] = {
    "path": along_the_path,
    "buckets": buckets,
    "operations": operations,
    "parts": parts,
}
"""What a round tries -> the function that does; rounds take them in turn."""
