"""Causes inside useful time: what a few words in the script would make faster. Times are device-seconds."""

from __future__ import annotations

from headway.core.units import format_fraction
from headway.cost.fused import fused_share
from headway.ledger.answers.evidence import booked_s
from headway.ledger.answers.ledger import Ledger
from headway.ledger.cause import Cause

LARGE = 0.05
"""Share of the time from which on the form of an update is worth a word."""


def optimizer_loops(ledger: Ledger) -> list[Cause]:
    """Updates that loop over tensors on a CPU, several operators for each, where one fused kernel does the same."""
    compute = ledger.facts.compute
    own_s, fraction = booked_s(ledger, "useful.optimizer"), ledger.fraction("useful.optimizer")
    in_force = "compute.fused_optimizer" in ledger.facts.in_force
    if compute is None or in_force or len(compute.optimizers) != 1 or fraction < LARGE:
        return []
    [optimizer] = compute.optimizers
    size = optimizer.num_elements / max(optimizer.num_tensors, 1)
    share = fused_share(optimizer.name, has_momentum=optimizer.has_momentum, mean_elements=size)
    left_to_torch = optimizer.is_fused is None and optimizer.is_foreach is None
    if share is None or not (left_to_torch and optimizer.is_plain) or optimizer.device_type != "cpu":
        return []
    evidence = f"{optimizer.name} takes {format_fraction(fraction)} of the time: on a CPU torch loops over its "
    evidence += f"{optimizer.num_tensors:,} tensors, several operators for each; fused, it takes {share.low:.2f} to "
    evidence += f"{share.high:.2f} of that"
    edit = f"torch.optim.{optimizer.name}(..., fused=True)"
    return [Cause("compute.optimizer", optimizer.name, own_s * (1 - share.mid), evidence, edit, script=edit)]
