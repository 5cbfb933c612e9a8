"""The remedies of the host's own work: agreed collections, logging on a thread, and a rank that lags."""

from __future__ import annotations

from headway.core.remedies import Parameters, RemedyRecord, Size


class CollectParameters(Parameters, frozen=True):
    """Parameters of `host.gc`."""

    every_steps: Size = 1000
    """Optimizer steps between two collections."""
    rss_growth_bytes: Size = 1 << 30
    """Growth of the process after which automatic collection comes back."""


class LoggingParameters(Parameters, frozen=True):
    """Parameters of `host.logging`."""

    queue: Size = 1024
    """Log records that may wait; more make the caller wait."""


REMEDIES = (
    RemedyRecord("host.gc", CollectParameters, "headway.host.apply:collect_together", ("host.gc",)),
    RemedyRecord("host.logging", LoggingParameters, "headway.host.apply:log_on_a_thread", ("host.logging",)),
    RemedyRecord("straggler.remove", causes=("straggler.rank",)),
)
"""What a plan may hold of this room; a rank that lags is only named."""
