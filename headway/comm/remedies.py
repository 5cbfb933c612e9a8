"""The remedies of communication: DDP's buckets and flags, compressed gradients, all-gathers ahead or hidden."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headway.comm.loose_rules import LADDERS, read_rule, rung_of
from headway.core.errors import InputError
from headway.core.remedies import Count, Flag, Parameters, Positive, RemedyRecord, Size, Sizes
from headway.cost.codecs import MIN_BYTES, read_codec
from headway.cost.overlaps import read_form, read_shape


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
    RemedyRecord("comm.bucket", BucketParameters, "headway.comm.buckets.apply:bucket", EXPOSED),
    RemedyRecord(
        "comm.gradient_view", apply="headway.comm.buckets.apply:gradient_view", causes=EXPOSED,
        allow="result-equivalent", changes="whether the script keeps gradients over steps cannot be checked",
    ),
    RemedyRecord(
        "comm.static_graph", apply="headway.comm.buckets.apply:static_graph", causes=EXPOSED,
        allow="result-equivalent", changes="whether every step uses the same parameters cannot be checked",
    ),
    RemedyRecord("comm.order", OrderParameters, "headway.comm.buckets.torch_fsdp:order", EXPOSED),
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
