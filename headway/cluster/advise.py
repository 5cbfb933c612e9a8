"""What `headway plan` hears of this room: another batch makes no step faster, so it is asked for by itself."""

from __future__ import annotations

from collections.abc import Iterator

from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup


def propose(ledger: object, program: object, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield where to ask, once a run has measured the noise of its gradients; otherwise nothing."""
    del ledger, program
    if "cluster.noise" in setup.in_force:
        reason = "steps per second do not judge it: `headway cluster batch RUN` says what a batch learns per second"
        yield Refusal("cluster.batch", "cluster", reason)
