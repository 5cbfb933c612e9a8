"""The remedies of communication: DDP's buckets and flags, compressed gradients, all-gathers ahead or hidden.

The rules of loose synchronisation by name, and the ladder of settings that each of them has.

    gaia:T       a rank's update takes effect at once; parts with |unsent update / weight| > T travel, others wait
    fedavg:N     ranks train apart, their weights are averaged every N steps
    dgc:F        the fraction F of each gradient that is largest travels, with corrected momentum; the rest waits
    diloco:N     as fedavg, and the mean change of N steps is the gradient of an outer Nesterov step

A ladder leads from the tightest rung (nearly synchronous, most bytes) to the loosest.

Sources: Hsieh et al., Gaia (NSDI 2017) and SkewScout (ICML 2020, section 7 and appendix: settings); McMahan et al.,
AISTATS 2017 (FedAvg); Lin et al., ICLR 2018 (DGC); Douillard et al., arXiv 2311.08105 (DiLoCo).

>>> read_rule("fedavg:20")
LooseRule(method='fedavg', theta=20)
>>> read_rule("fedavg:0.5")
Traceback (most recent call last):
headway.core.errors.InputError: fedavg:0.5: '0.5' is not the number of steps between averages. Write a whole number \
from 1 upwards; the ladder is 1, 5, 10, 20, 50, 100, 200, 500, 1000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from headway.core.errors import InputError
from headway.core.remedies import Count, Flag, Parameters, Positive, RemedyRecord, Size, Sizes
from headway.core.tables import Named
from headway.cost.codecs import MIN_BYTES, read_codec
from headway.cost.collectives import read_form, read_shape

STEPS = (1, 5, 10, 20, 50, 100, 200, 500, 1000)

LADDERS: dict[str, tuple[float, ...]] = Named("loose rule", {
    "gaia": (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
    "fedavg": STEPS,
    "dgc": (0.25, 0.0625, 0.015625, 0.004, 0.001),
    "diloco": STEPS,
})  # fmt: skip
"""Rule -> its settings theta, the tightest first; those of dgc are the stages of its published warm-up."""

MEANINGS = {
    "gaia": ("the threshold on |update / weight|", "a number in [0, 1]"),
    "fedavg": ("the number of steps between averages", "a whole number from 1 upwards"),
    "dgc": ("the fraction that is sent", "a number in (0, 1], 1 sends everything"),
    "diloco": ("the number of steps between outer steps", "a whole number from 1 upwards"),
}
"""Rule -> what its theta is, and what it may be."""

AVERAGING = ("fedavg", "diloco")
"""Rules that exchange whole models, every theta steps."""


@dataclass(frozen=True, slots=True)
class LooseRule:
    """A rule with its setting. Build it with `read_rule`."""

    method: str
    """Entry of `LADDERS`."""

    theta: float
    """Its setting: a threshold (gaia), a fraction (dgc), or a number of steps."""

    def __str__(self) -> str:
        """Return the name: 'gaia:0.1'."""
        return f"{self.method}:{self.theta:g}"


def read_rule(name: object) -> LooseRule:
    """Return the rule that `name` says.

    Raises `UnknownNameError` with the nearest rule, `InputError` for a theta that the rule cannot have.
    """
    if not isinstance(name, str):
        raise InputError(f"the rule is {name!r}; write a name such as 'fedavg:20' or 'gaia:0.1'.")
    method, _, setting = name.partition(":")
    ladder = LADDERS[method]
    try:
        theta = float(setting)
    except ValueError:
        theta = math.nan
    is_count = method in AVERAGING
    fits = theta >= 1 and theta.is_integer() if is_count else 0 <= theta <= 1 and (theta > 0 or method == "gaia")
    if not fits or math.isinf(theta):
        what, rule = MEANINGS[method]
        rungs = ", ".join(f"{rung:g}" for rung in ladder)
        raise InputError(f"{name}: {setting!r} is not {what}. Write {rule}; the ladder is {rungs}.")
    return LooseRule(method, int(theta) if is_count else theta)


def rung_of(ladder: Sequence[float], theta: float) -> int:
    """Return the index of a theta on a ladder. Raises `InputError` with the nearest rung where it is none."""
    index = next((index for index, rung in enumerate(ladder) if math.isclose(theta, rung, rel_tol=1e-9)), None)
    if index is None:
        rungs, nearest = ", ".join(f"{rung:g}" for rung in ladder), min(ladder, key=lambda rung: abs(rung - theta))
        raise InputError(f"theta is {theta:g}, which is no rung of {rungs}. Begin at the nearest: {nearest:g}.")
    return index


class BucketParameters(Parameters, frozen=True):
    """Parameters of `comm.bucket`."""

    bucket_mb: Positive
    """MiB, torch's `bucket_cap_mb`."""
    bucket_mb_list: Sizes | None = None
    """MiB of each bucket in order of readiness; used instead where torch takes one."""
    respect_explicit: Flag = False
    """Whether a size that the script names itself stays."""


class OrderParameters(Parameters, frozen=True):
    """Parameters of `comm.order`."""

    ahead: Size = 1
    """Modules gathered ahead: each one more needs its whole parameters in memory."""
    early: Flag = False
    """Whether the first ones of a step are gathered right after the update, while the next batch is loaded."""


Codec = Annotated[
    str | dict[str, str],
    Meta(description="a codec such as 'topk:0.01', or patterns over parameter names with a codec each"),
]


Rule = Annotated[str, Meta(description="a rule such as 'fedavg:20', 'gaia:0.1', 'dgc:0.001' or 'diloco:50'")]


class CompressParameters(Parameters, frozen=True):
    """Parameters of `comm.compress`."""

    codec: Codec
    """Codec of all gradients, or pattern over parameter names -> codec; the first pattern that matches decides."""
    feedback: Flag = True
    """Whether what a biased codec left out is added to the next gradient (residuals)."""
    two_way: Flag = True
    """Whether the sums are compressed as well."""
    min_bytes: Count = MIN_BYTES
    """Smaller tensors are fused and sent as they are."""

    def __post_init__(self) -> None:
        """Raise `InputError` for a codec that there is not."""
        names = [self.codec] if isinstance(self.codec, str) else [*self.codec.values()]
        if not names:
            raise InputError("codec of comm.compress is {}; name a codec for at least one pattern.")
        for name in names:
            read_codec(name)


class OverlapParameters(Parameters, frozen=True):
    """Parameters of `comm.overlap`."""

    shapes: Annotated[dict[str, str], Meta(description="shapes 'MxKxN' or 'rs:MxKxN' with a form each")]
    """Shape of a matmul beside its collective -> form (`OVERLAPS`); shapes that are not named stay plain."""

    def __post_init__(self) -> None:
        """Raise `InputError` for what is no shape, `UnknownNameError` for a form that there is not."""
        for shape, form in self.shapes.items():
            read_shape(shape)
            read_form(form)


class LooseParameters(Parameters, frozen=True):
    """Parameters of `comm.loose`."""

    rule: Rule
    """How replicas are brought together: rule and setting."""
    control: Flag = True
    """Whether the setting follows what travelling models lose (SkewScout)."""
    travel_steps: Size = 500
    """Steps between two travels."""

    def __post_init__(self) -> None:
        """Raise `InputError` for a rule that there is not, and under `control` for a setting that is no rung."""
        rule = read_rule(self.rule)
        if self.control:
            rung_of(LADDERS[rule.method], rule.theta)


EXPOSED = ("comm.exposed",)

REMEDIES = (
    RemedyRecord("comm.bucket", BucketParameters, "headway.comm.torch_buckets:bucket", EXPOSED),
    RemedyRecord(
        "comm.gradient_view", apply="headway.comm.torch_buckets:gradient_view", causes=EXPOSED,
        allow="result-equivalent", changes="whether the script keeps gradients over steps cannot be checked",
    ),
    RemedyRecord(
        "comm.static_graph", apply="headway.comm.torch_buckets:static_graph", causes=EXPOSED,
        allow="result-equivalent", changes="whether every step uses the same parameters cannot be checked",
    ),
    RemedyRecord("comm.order", OrderParameters, "headway.comm.torch_fsdp_order:order", EXPOSED),
    RemedyRecord(
        "comm.compress", CompressParameters, "headway.comm.compression.apply:compression", EXPOSED,
        allow="lossy", changes="compressed gradients change results",
    ),
    RemedyRecord(
        "comm.overlap", OverlapParameters, "headway.comm.overlap.apply:overlap", EXPOSED,
        allow="result-equivalent", changes="partial sums are added in another order",
    ),
    RemedyRecord(
        "comm.loose", LooseParameters, "headway.comm.skew.apply:loosening", EXPOSED,
        allow="lossy", conflicts=("comm.compress",), changes="replicas that drift apart change results",
    ),
    RemedyRecord("comm.links", causes=EXPOSED),
)  # fmt: skip
"""What a plan may hold of this room; faster links are only predicted."""
