"""Every way to bring the gradients of one tensor together with at most one codec: Espresso's tree of options.

An option is a sequence of actions, written PLACE.VERB with spaces between them:

    inside.reduce_scatter gpu.encode between.all_gather gpu.decode inside.all_gather

Places are the group of all ranks (`flat`), the ranks of a host (`inside`), the ranks of the same number on all hosts
(`between`), and the device that encodes or decodes (`gpu`, `cpu`). Communication is whole (one collective) or divided
into two that belong together; what travels is raw or a packet:

                 whole         divided, by parts              divided, at a root
    raw          all_reduce    reduce_scatter .. all_gather   reduce .. broadcast
    packets      all_gather    all_to_all .. all_gather       gather .. broadcast

Inside a host it is always divided, with the step between hosts in the middle. Packets cannot be added: each of
several is decoded, and the sum is raw again, which may be encoded anew. An option ends raw. There are 4341 of them
with two devices and 174 with one, the counts that the paper gives.

>>> len(OPTIONS), len(tuple(options(("gpu",))))
(4341, 174)
>>> [f"{step.verb} {step.blocks}x{step.packets}" for step in steps("gpu.encode flat.all_gather gpu.decode", 2, 2)]
['encode 4x1', 'all_gather 4x1', 'decode 4x4']

Source: Wang et al., "Hi-Speed DNN Training with Espresso", EuroSys 2023.

Chains of stages behind a computation: how long a step takes that sends each result through stages of its own.

Use it to score many choices of chains at once: which codec and which collectives bring each gradient together. The
computation is a row of segments on lane 0; behind segment i, result i goes through its chain of (lane, duration):

    lane 0   |seg 0|enc 0|  seg 1  |dec 0| seg 2 |          a first stage on lane 0 delays the segments behind it
    lane 3         ......|=====0=====|.......|==2==|        others wait in order of readiness, ties to the earlier

It is list scheduling: `score` equals `greedy(order="ready,priority,index")` on the Dag with one operation per segment
and stage, priority = tensor, to the nanosecond. A stage that is ready before lane 0 is free goes before the next
segment; nothing is interrupted. Time O(k s log n) for k plans of s stages.

>>> chains = StageChains(np.array([10, 10]), np.array([[[3, 0]], [[3, -1]]]), np.array([[[5, 2]], [[4, 0]]]))
>>> chains.score(np.array([[0, 0]]))  # 10, 10 on lane 0; 5 on lane 3, then 2 on lane 0; 4 on lane 3
(array([24]), array([1]))
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.comm.compression import strategy_search
from headway.comm.compression.strategy_search import (
    CODEC_NUMEL,
    CODECS_US,
    CPU_BYTES_PER_US,
    INSIDE_US,
    OUT_US,
    CodecUs,
    ModelGradients,
    Pricing,
    PublishedSetup,
    checked,
)
from headway.core.errors import InputError, UnknownNameError
from headway.core.search import pareto
from headway.cost.collectives import collective_seconds
from headway.cost.specs import LinkSpec, shipped
from headway.sim.graph.dag import kernels

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StageChains:
    """n segments, and the chains that each result may go through; checked where it is built."""

    segment_ns: Ints
    """[n] Computation before each result, in order, on lane 0."""

    lane: Ints
    """[n, options, stages] Lane of each stage; -1 after a chain's end."""

    duration_ns: Ints
    """[n, options, stages] Time of each stage."""

    gap_lane: int = 3
    """The lane whose idle gaps `score` looks for."""

    def __post_init__(self) -> None:
        """Raise `InputError` on shapes that differ, negative times, and stages behind a chain's end."""
        for name in ("segment_ns", "lane", "duration_ns"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))
        if self.lane.ndim != 3 or self.lane.shape != self.duration_ns.shape or len(self.lane) != self.segment_ns.size:
            raise InputError(
                f"{self.segment_ns.shape} segments, lanes {self.lane.shape} and durations {self.duration_ns.shape} do "
                "not fit; pass [n], [n, options, stages] and the same again."
            )
        if (self.segment_ns < 0).any() or (self.duration_ns < 0).any() or (self.lane < -1).any():
            raise InputError("a segment or stage has a negative time or lane; pass times >= 0 and lanes >= -1.")
        if ((self.lane[:, :, 1:] >= 0) & (self.lane[:, :, :-1] < 0)).any():
            raise InputError("a stage follows the end of its chain; put the lanes -1 last.")

    def score(self, plans: Ints) -> tuple[Ints, Ints]:
        """Return the ns [k] that plans [k, n] take, and for each the first result that used `gap_lane` after its last
        idle gap. Raises `InputError` on options that are not there."""
        plans = np.ascontiguousarray(plans, np.int64)
        num, options, _ = self.lane.shape
        if plans.ndim != 2 or plans.shape[1] != num or ((plans < 0) | (plans >= options)).any():
            raise InputError(
                f"plans of shape {plans.shape} for {num} results; give an option 0..{options - 1} of each."
            )
        makespan, gap = np.zeros(len(plans), np.int64), np.zeros(len(plans), np.int64)
        num_lanes = max(int(self.lane.max(initial=0)), self.gap_lane) + 1
        kernels("plan_kernels").stage_chains(
            plans, self.segment_ns, self.lane, self.duration_ns, (num_lanes, self.gap_lane), makespan, gap
        )
        return makespan, gap


DEVICES = ("gpu", "cpu")
"""What encodes and decodes."""

PAIRS = {
    "reduce_scatter": "all_gather",
    "reduce": "broadcast",
    "all_to_all": "all_gather",
    "gather": "broadcast",
}
"""First step of divided communication -> the second one."""

DIVIDED = {False: ("reduce_scatter", "reduce"), True: ("all_to_all", "gather")}
"""Whether packets travel -> the first steps."""

WHOLE = {False: "all_reduce", True: "all_gather"}
"""Whether packets travel -> the one collective."""

Path = tuple[str, ...]
"""Actions, one after the other."""


def options(devices: Sequence[str] = DEVICES) -> Iterator[str]:
    """Yield all options whose codecs run on `devices`. Raises `InputError` where one is unknown or there are none."""
    if not devices or not set(devices) <= set(DEVICES) or len(set(devices)) < len(devices):
        raise InputError(f"devices are {','.join(devices)!r}; name gpu, cpu, or both: gpu,cpu.")
    return (" ".join(path) for path in _Tree(tuple(devices)).paths())


@dataclass(frozen=True, slots=True)
class _Tree:
    """The grammar: each method yields the ways to go on from one state, to the end of the option."""

    devices: tuple[str, ...]

    def paths(self) -> Iterator[Path]:
        """Yield every option: over all ranks at once, or inside hosts and between them."""
        yield ("flat.all_reduce",)
        for packed, head in ((False, ()), *((True, head) for head in self._on("encode"))):
            if packed:
                for tail in self._on("decode"):
                    yield (*head, "flat.all_gather", *tail)
            for first in DIVIDED[packed]:
                for tail in self._closing("flat", first, packed):
                    yield (*head, f"flat.{first}", *tail)
                for tail in self._between(first, packed):
                    yield (*head, f"inside.{first}", *tail)

    def _on(self, verb: str) -> Iterator[Path]:
        """Yield the coding action on each device."""
        for device in self.devices:
            yield (f"{device}.{verb}",)

    def _closing(self, place: str, first: str, packed: bool) -> Iterator[Path]:
        """Yield the last second step, after which the option ends raw."""
        second = f"{place}.{PAIRS[first]}"
        if packed:
            for tail in self._on("decode"):
                yield (second, *tail)
                for end in self._closing(place, first, False):
                    yield (*tail, *end)
            return
        yield (second,)
        for head in self._on("encode"):
            for tail in self._on("decode"):
                yield (*head, second, *tail)

    def _between(self, inside: str, packed: bool) -> Iterator[Path]:
        """Yield what follows the first step inside hosts: `inside` is that step."""
        if packed:
            for head in self._on("decode"):
                for tail in self._between(inside, False):
                    yield (*head, *tail)
            yield from self._packets_between(inside)
            return
        for tail in self._closing("inside", inside, False):
            yield ("between.all_reduce", *tail)
        for first in DIVIDED[False]:
            for tail in self._second_between(first, inside):
                yield (f"between.{first}", *tail)
        for head in self._on("encode"):
            for tail in self._packets_between(inside):
                yield (*head, *tail)

    def _packets_between(self, inside: str) -> Iterator[Path]:
        """Yield the ways of packets between hosts, and back inside."""
        for tail in self._closing("inside", inside, True):
            yield ("between.all_gather", *tail)
        for first in DIVIDED[True]:
            for head in self._on("decode"):
                for tail in self._second_between(first, inside):
                    yield (f"between.{first}", *head, *tail)
            for tail in self._closing("inside", inside, True):
                yield (f"between.{first}", f"between.{PAIRS[first]}", *tail)

    def _second_between(self, first: str, inside: str) -> Iterator[Path]:
        """Yield the second step between hosts from raw parts, and what follows inside."""
        second = f"between.{PAIRS[first]}"
        for tail in self._closing("inside", inside, False):
            yield (second, *tail)
        for head in self._on("encode"):
            for tail in self._closing("inside", inside, True):
                yield (*head, second, *tail)


OPTIONS: tuple[str, ...] = tuple(options())
"""All options on both devices."""

_KNOWN = frozenset(OPTIONS)


@dataclass(frozen=True, slots=True)
class OptionStep:
    """One action of an option, and what it finds. A tensor is cut into as many equal blocks as there are ranks."""

    place: str
    """`flat`, `inside`, `between`, or the device of a codec."""

    verb: str
    """A collective, `encode` or `decode`."""

    second: bool
    """Whether it is the second step of divided communication."""

    packed: bool
    """Whether packets are there, else raw blocks."""

    blocks: int
    """Blocks that an acting rank has before it."""

    packets: int
    """Packets of each block before it, of as many senders; 1 where blocks are raw."""

    at_roots: tuple[str, ...]
    """Places at whose roots alone the data is: other ranks wait."""


def checked_option(option: str) -> str:
    """Return an option of the tree; raises `UnknownNameError` with the nearest one."""
    if option not in _KNOWN:
        close = difflib.get_close_matches(option, OPTIONS, n=1, cutoff=0.3)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise UnknownNameError(f"unknown option {option!r}. {hint}All are listed by: headway comm options.")
    return option


def steps(option: str, ranks_per_host: int, hosts: int) -> list[OptionStep]:
    """Return what each action of an option finds.

    Raises `UnknownNameError` with the nearest option, `InputError` on counts below 1.
    """
    checked_option(option)
    if ranks_per_host < 1 or hosts < 1:
        raise InputError(f"there are {hosts} hosts of {ranks_per_host} ranks; give at least 1 of each.")
    sizes = {"flat": ranks_per_host * hosts, "inside": ranks_per_host, "between": hosts}
    blocks, packets, packed = sizes["flat"], 1, False
    divided: dict[str, tuple[str, int]] = {}
    found = []
    for action in option.split():
        place, verb = action.split(".")
        second = place in divided
        at_roots = tuple(one for one, (first, _) in divided.items() if PAIRS[first] == "broadcast")
        found.append(OptionStep(place, verb, second, packed, blocks, packets, at_roots))
        if verb in ("encode", "decode"):
            packed, packets = verb == "encode", 1
        elif second:
            blocks = divided.pop(place)[1]
        else:
            if verb in PAIRS:
                divided[place] = verb, blocks
                blocks = blocks // sizes[place] if PAIRS[verb] == "all_gather" else blocks
            packets *= sizes[place] if packed else 1
    return found


# What each option of the tree costs, stage by stage, on hosts with a device and a CPU codec, and plans of them.
#
# A tensor of n numbers is cut into one block per rank; an option's actions become stages:
#
#     encode, decode   on lane 0 of the device, which computes the gradients too, or on the CPU:
#                      gpu: (total - decode, decode) of the setup's codec for 2^20 numbers, in proportion above;
#                      cpu: 32 bytes of work per number at 20 GB/s, the artifact's constant
#     collectives      closed forms of `headway.cost.collectives`; rates are the artifact's 2.5 or 50 GB/s inside and
#                      1.25 GB/s between hosts, latencies are those of the shipped links
#     between hosts    the ranks of a host share its adapter: k of them at once have 1 / k of its rate each
#
# Every tensor has options of its own: those that no other one beats on every lane. It is simulated: the codec is one
# for all options, launches cost nothing, and hosts are equal.

COMPUTE, CPU, INSIDE, BETWEEN = range(4)
"""Lanes."""

LANES = {"gpu": COMPUTE, "cpu": CPU, "inside": INSIDE, "between": BETWEEN, "flat": BETWEEN}
"""Place of an action -> its lane."""

LATENCY = {"pcie": "pcie3x16", "nvlink": "nvlink2", "between": "ethernet-10g"}
"""Link -> the shipped link whose latency it has."""

MOST_STAGES = max(option.count(" ") for option in OPTIONS) + 1

FORMS: dict[str, tuple[str, str | None]] = {
    "all_reduce": ("all_reduce", None),
    "reduce_scatter": ("reduce_scatter", None),
    "reduce": ("broadcast", "pipeline"),
    "broadcast": ("broadcast", "pipeline"),
    "all_gather": ("all_gather", None),
    "gather": ("all_gather", None),
    "all_to_all": ("all_to_all", None),
}
"""Collective -> the closed form that it takes: a reduce is a broadcast backwards, a gather fills one port."""


def stages(
    gradients: ModelGradients,
    setup: PublishedSetup,
    codecs: Mapping[str, CodecUs] = CODECS_US,
    *,
    also: Sequence[str] = (),
) -> Pricing:
    """Return the pricing of all options of the tree that are best for some tensor, and of those that `also` names.

    The pricing's names are the options. Raises as `headway.comm.compression.strategy_search.checked`,
    `UnknownNameError` on
    others.
    """
    checked(gradients, setup, codecs)
    numels = np.array([numel for _, numel in gradients.tensors])
    sizes, of_size = np.unique(numels, return_inverse=True)
    lanes, durations = option_stages(sizes, setup, codecs)
    fronts = [front(lanes, durations[at]) for at in range(sizes.size)]
    # Raw is the first option of the tree: every tensor keeps it, and with it option 0 of every plan.
    named = [OPTIONS.index(checked_option(name)) for name in also]
    used = np.array(sorted({0, *named, *(option for each in fronts for option in each)}))
    places = {option: at for at, option in enumerate(used.tolist())}
    choices = [tuple(places[option] for option in each) for each in fronts]
    chains = StageChains(
        np.rint(np.array(gradients.gap_us) * 1000),
        np.broadcast_to(lanes[used], (numels.size, used.size, lanes.shape[1])),
        durations[of_size][:, used],
        gap_lane=BETWEEN,
    )

    def score(plans: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        ns, gap = chains.score(plans)
        return ns / 1000, gap

    return Pricing(
        sizes=tuple(numels.tolist()),
        options=tuple(range(used.size)),
        score=score,
        choices=tuple(choices[at] for at in of_size),
        names=tuple(OPTIONS[option] for option in used),
        offload=_offloads([OPTIONS[option] for option in used]),
    )


def option_stages(
    sizes: NDArray[np.int64], setup: PublishedSetup, codecs: Mapping[str, CodecUs]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lanes [options, stages] of the tree's options, and the ns [sizes, options, stages] of each stage."""
    index: dict[OptionStep, int] = {}
    lanes = np.full((len(OPTIONS), MOST_STAGES), -1)
    kinds = np.zeros(lanes.shape, np.int64)
    for at, option in enumerate(OPTIONS):
        for number, step in enumerate(steps(option, setup.ranks_per_host, setup.hosts)):
            lanes[at, number] = LANES[step.place]
            kinds[at, number] = index.setdefault(step, len(index))
    costs = [[_step_us(step, int(numel), setup, codecs[setup.codec]) for step in index] for numel in sizes]
    return lanes, np.rint(np.array(costs) * 1000).astype(np.int64)[:, kinds] * (lanes >= 0)


def _step_us(step: OptionStep, numel: int, setup: PublishedSetup, codec: CodecUs) -> float:
    """Return the time of one action of a tensor of `numel` float32, us."""
    k, hosts = setup.ranks_per_host, setup.hosts
    block = -(-numel // (k * hosts))
    numbers = block * step.blocks * (step.packets if step.verb == "decode" else 1)
    if step.place == "cpu":
        return 4 * numbers * 8 / CPU_BYTES_PER_US
    if step.place == "gpu":
        decode = codec.decode_us[2]
        return (decode if step.verb == "decode" else codec.total_us[2] - decode) * max(1.0, numbers / CODEC_NUMEL)
    ranks = {"flat": k * hosts, "inside": k, "between": hosts}[step.place]
    packet = math.ceil(4 * block * setup.wire_fraction)
    own_bytes = step.blocks * (packet * step.packets if step.packed else 4 * block)
    form, algorithm = FORMS[step.verb]
    full_bytes = own_bytes * (ranks if form == "all_gather" else 1)
    return 1e6 * collective_seconds(form, full_bytes, num_ranks=ranks, link=_link(step, setup), algorithm=algorithm)


def _link(step: OptionStep, setup: PublishedSetup) -> LinkSpec:
    """Return the link that one rank has in this action."""
    if step.place == "inside":
        return LinkSpec(
            setup.inside, 1e9 / INSIDE_US[setup.inside], shipped().links[LATENCY[setup.inside]].latency_s, "artifact"
        )
    # A ring over all ranks crosses an adapter once; parts that all ranks of a host exchange share it.
    shared = step.verb == "all_to_all" if step.place == "flat" else "inside" not in step.at_roots
    rate = 1e9 / OUT_US / (setup.ranks_per_host if shared else 1)
    return LinkSpec("between", rate, shipped().links[LATENCY["between"]].latency_s, "artifact")


def front(lanes: NDArray[np.int64], durations: NDArray[np.int64]) -> list[int]:
    """Return the options [options, stages] that no other one beats on every lane, the first option always.

    A first stage on lane 0 counts by itself, since it delays what is computed next. Which order stages have does not
    count: of two options with the same times the first is kept.
    """
    totals = np.stack([(durations * (lanes == lane)).sum(1) for lane in range(4)], axis=1)
    lead = durations[:, :1] * (lanes[:, :1] == COMPUTE)
    points, first = np.unique(np.concatenate([lead, totals], axis=1), axis=0, return_index=True)
    kept = np.sort(first[pareto(points.tolist())])
    return [0, *(int(option) for option in kept if option)]


def _offloads(names: Sequence[str]) -> dict[int, int]:
    """Return option -> the same with every codec on the CPU, where both are listed."""
    index = {name: at for at, name in enumerate(names)}
    found = {}
    for name, at in index.items():
        there = index.get(name.replace("gpu.", "cpu."))
        if there is not None and there != at and "cpu." not in name:
            found[at] = there
    return found


COSTS: dict[str, Callable[..., Pricing]] = {**strategy_search.COSTS, "stages": stages}
"""Cost -> the function of (gradients, setup, codecs) that makes it. Adding one is adding a line."""
