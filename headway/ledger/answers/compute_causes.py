"""Causes inside useful time: what a few words in the script would make faster. Times are device-seconds."""

from __future__ import annotations

from headway.core.units import NS_PER_S, format_fraction, plural
from headway.cost.fused import Share, fused_share
from headway.ledger.answers.evidence import booked_s, lines_in_words, mean_of, span_of
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


LEAST_SAMPLES = 8
"""Samples of lines that wait below which none is named: the next one could turn their shares over."""

LARGE_WAIT = 0.02
"""Share of the device time that ending the waits must win to be named."""


def host_launch(ledger: Ledger) -> list[Cause]:
    """Devices that waited for the host to launch the next kernel, and the lines at which it waited for them before.

    A host that waits for W of the time and launches in the rest of it has a device that idles for I. Without the waits
    a step takes as long as the longer of launching, 1 - W, and computing, 1 - I: what is won is the lesser of W and I.
    """
    idle_s = booked_s(ledger, "host.launch", "host.copy")
    idle = format_fraction(idle_s * NS_PER_S / max(ledger.total_ns, 1))
    kernels, lines = span_of(ledger, "kernel.compute"), ledger.wait_lines
    many = sum(row.count for row in lines) >= LEAST_SAMPLES
    waited_ns = sum(row.ns for row in lines) if many else 0
    won_s = min(waited_ns / NS_PER_S, idle_s)
    causes = list[Cause]()
    if won_s * NS_PER_S >= LARGE_WAIT * ledger.total_ns:
        evidence = f"the host waited for the device for {format_fraction(waited_ns / ledger.total_ns)} of the time "
        evidence += f"({', '.join(lines_in_words(lines))}) and launched nothing; the device idled {idle} of the time "
        evidence += "for the next kernel"
        fix = "read values less often, or all at the end of an epoch: until then they stay on the device"
        edit = "total += loss.detach()  # and total.item() every 50 steps"
        causes.append(Cause("compute.sync", lines[0].words, won_s, evidence, fix, script=edit))
    evidence = f"devices idled {idle} of the time because no kernel had been launched"
    if kernels.count:
        evidence += f"; {plural(kernels.count, 'kernel')} took {mean_of(kernels.total_ns / NS_PER_S, kernels.count)}"
    fix = "launch less from Python: torch.compile or CUDA graphs, larger batches"
    if span_of(ledger, "graph.replay").count:
        fix = "do less in Python between replays of the graph: prepare its inputs while it runs"
    fix += "" if causes else ", no .item() inside the step"
    return [*causes, Cause("host.launch", plural(ledger.devices, "device"), idle_s - won_s, evidence, fix)]


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
