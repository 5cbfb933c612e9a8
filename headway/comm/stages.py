"""What each option of the tree costs, stage by stage, on hosts with a device and a CPU codec, and plans of them.

A tensor of n numbers is cut into one block per rank; an option's actions (`headway.comm.options`) become stages:

    encode, decode   on lane 0 of the device, which computes the gradients too, or on the CPU:
                     gpu: (total - decode, decode) of the setup's codec for 2^20 numbers, in proportion above;
                     cpu: 32 bytes of work per number at 20 GB/s, the artifact's constant
    collectives      closed forms of `headway.cost.collectives`; rates are the artifact's 2.5 or 50 GB/s inside and
                     1.25 GB/s between hosts, latencies are those of the shipped links
    between hosts    the ranks of a host share its adapter: k of them at once have 1 / k of its rate each

Every tensor has options of its own: those that no other one beats on every lane. It is simulated: the codec is one for
all options, launches cost nothing, and hosts are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.comm import published
from headway.comm.options import OPTIONS, OptionStep, checked_option, steps
from headway.comm.published import (
    CODEC_NUMEL,
    CODECS_US,
    CPU_BYTES_PER_US,
    INSIDE_US,
    OUT_US,
    CodecUs,
    ModelGradients,
    PublishedSetup,
    checked,
)
from headway.comm.strategy_search import Pricing
from headway.core.search import pareto
from headway.cost.collectives import collective_seconds
from headway.cost.specs import LinkSpec, shipped
from headway.sim.ddp.stage_chains import StageChains

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

    The pricing's names are the options. Raises as `headway.comm.published.checked`, `UnknownNameError` on others.
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


COSTS: dict[str, Callable[..., Pricing]] = {**published.COSTS, "stages": stages}
"""Cost -> the function of (gradients, setup, codecs) that makes it. Adding one is adding a line."""
