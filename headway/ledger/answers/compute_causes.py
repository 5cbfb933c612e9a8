"""Causes inside useful time: what a few words in the script would make faster. Times are device-seconds."""

from __future__ import annotations

from headway.core.units import NS_PER_S, format_fraction
from headway.cost.fused import Share, fused_share
from headway.ledger.answers.evidence import booked_s
from headway.ledger.answers.ledger import Ledger
from headway.ledger.cause import Cause
from headway.trace.rings.compute_facts import OptimizerFacts

LARGE = 0.05
"""Share of the steps' time from which on the form of an update is worth a word: start-up may be long."""


def optimizer_loops(ledger: Ledger) -> list[Cause]:
    """Updates that loop over tensors on a CPU, several operators for each, where one fused kernel does the same."""
    compute = ledger.facts.compute
    own_s = booked_s(ledger, "useful.optimizer")
    fraction = own_s * NS_PER_S / max(int(ledger.step_ns.sum()), 1)
    in_force = "compute.fused_optimizer" in ledger.facts.in_force
    if compute is None or in_force or len(compute.optimizers) != 1 or fraction < LARGE:
        return []
    [optimizer] = compute.optimizers
    share = share_of(optimizer)
    if isinstance(share, str):
        return []
    evidence = f"{optimizer.name} takes {format_fraction(fraction)} of the steps' time: on a CPU torch loops over its "
    evidence += f"{optimizer.num_tensors:,} tensors, several operators for each; fused, it takes {share.low:.2f} to "
    evidence += f"{share.high:.2f} of that"
    edit = f"torch.optim.{optimizer.name}(..., fused=True)"
    return [Cause("compute.optimizer", optimizer.name, own_s * (1 - share.mid), evidence, edit, script=edit)]


def share_of(optimizer: OptimizerFacts) -> Share | str:
    """Return what the fused form takes of an optimizer's time, or why it is not proposed.

    >>> share_of(OptimizerFacts("LBFGS", device_type="cpu"))
    'LBFGS has no fused form that was measured to be faster'
    """
    if optimizer.is_fused is not None or optimizer.is_foreach is not None:
        return f"the script says itself which form of {optimizer.name} it wants"
    if optimizer.device_type != "cpu":
        return "on a device torch updates all tensors in a few kernels as it is"
    if not optimizer.is_plain:
        return f"{optimizer.name} updates sparse or complex numbers, or tensors that lie unlike their gradients"
    size = optimizer.num_elements / max(optimizer.num_tensors, 1)
    share = fused_share(optimizer.name, has_momentum=optimizer.has_momentum, mean_elements=size)
    return share or f"{optimizer.name} has no fused form that was measured to be faster"
