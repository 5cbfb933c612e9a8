"""The remedies of a job in a queue: another batch size, the measurement that it is chosen by, copies that share it."""

from __future__ import annotations

from headway.core.remedies import Count, NoParameters, Parameters, Positive, RemedyRecord, Size


class BatchParameters(Parameters, frozen=True):
    """Parameters of `cluster.batch`."""

    batch_size: Size
    """Examples per rank and update read, from now on."""
    own_batch_size: Size
    """The script's own."""
    initial_batch: Size
    """Examples of an update of the recorded run, all ranks."""
    noise_scale: Positive
    """Gradient noise scale, in examples."""
    accumulation: Count = 0
    """Updates left out before each."""
    predicted_useful: Positive | None = None
    """Useful examples/s that the plan promised; noted only."""


class NoiseParameters(Parameters, frozen=True):
    """Parameters of `cluster.noise`."""

    every_steps: Size = 1
    """Updates from one sample to the next."""


REMEDIES = (
    RemedyRecord(
        "cluster.batch", BatchParameters, "headway.cluster.adaptive.apply:batch", ("comm.exposed",),
        allow="lossy", changes="another batch size changes what is learned",
    ),
    RemedyRecord(
        "cluster.fork", NoParameters, "headway.cluster.fork.apply:fork", ("straggler",),
        allow="lossy", changes="copies that train apart between averages change what is learned",
    ),
    RemedyRecord("cluster.noise", NoiseParameters, "headway.cluster.adaptive.apply:noise"),
)  # fmt: skip
"""What a plan may hold of this room."""
