"""What `headway plan` hears of this room: another batch makes no step faster, so it is asked for by itself."""

from __future__ import annotations

from collections.abc import Iterator

from headway.ledger.ledger import Ledger
from headway.plan.proposal import Proposal, Refusal
from headway.trace.in_force import in_force


def propose(ledger: Ledger, program: object, setup: object) -> Iterator[Proposal | Refusal]:
    """Yield where to ask, once a run has measured the noise of its gradients; otherwise nothing."""
    del program, setup
    if "cluster.noise" in in_force(ledger.meta):
        reason = "steps per second do not judge it: `headway cluster batch RUN` says what a batch learns per second"
        yield Refusal("cluster.batch", "cluster", reason)
