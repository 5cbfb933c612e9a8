"""Orders of a pipeline step: pure functions from a shape to what each rank computes, in which order.

Here are the orders with a closed form; those that split the backward are in
`split_backward`. Every rank has `interleave` stages. With p ranks, m
microbatches, v stages per rank, forward and backward F and B per rank, equal
ranks and free transfers (Megatron-LM, SC'21, and PipeDream-2BW, ICML'21):

    order         makespan - m (F + B)     activations of rank r, in shares of a rank
    gpipe         (p - 1)(F + B)           m
    1f1b          (p - 1)(F + B)           min(m, p - r)
    interleaved   (p - 1)(F + B) / v       min(m, (2(p - r - 1) + (v - 1)p + 1) / v)

>>> " ".join(map(str, one_f_one_b(PipelineShape(num_ranks=2, num_microbatches=3))[0]))
'0F0 0F1 0B0 0F2 0B1 0B2'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headway.core.errors import InputError
from headway.sim.pipeline.actions import Action, B, F, Orders

MOST_ACTIONS = 1 << 18
"""Microbatches x stages of one step: each takes 40 us."""

MOST_NS = 1 << 60
"""Nanoseconds of a step without overlap, times the stages of a rank."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """What an order is made for. Times are those of a whole rank and one microbatch: a stage takes 1/interleave."""

    num_ranks: int
    """p: ranks."""

    num_microbatches: int
    """m: microbatches of one step."""

    interleave: int = 1
    """v: stages per rank."""

    forward_ns: int = 1
    """tF: forward."""

    input_ns: int = 1
    """tI: backward, gradient of the input."""

    weight_ns: int = 1
    """tW: backward, gradient of the weights."""

    comm_ns: int = 0
    """One message between stages."""

    cap: float | None = None
    """Activations that a rank may hold, in shares of a whole rank; None = no limit."""

    num_steps: int = 1
    """Steps that a schedule without a flush runs as one stream; all others make one."""

    def __post_init__(self) -> None:
        """Raise `InputError` on counts below 1, negative times, and a cap below one activation."""
        for name in ("num_ranks", "num_microbatches", "interleave", "num_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give at least 1.")
        for name in ("forward_ns", "input_ns", "weight_ns", "comm_ns"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; give nanoseconds >= 0.")
        actions, all_ns = (
            self.num_stages * self.num_microbatches * self.num_steps,
            self.forward_ns + self.input_ns + self.weight_ns,
        )
        if actions > MOST_ACTIONS or actions * self.interleave * (all_ns + self.comm_ns) > MOST_NS:
            raise InputError(
                f"{actions:.3g} microbatches on all stages, {all_ns + self.comm_ns:.3g} ns each; at most "
                f"{MOST_ACTIONS:,}, and {MOST_NS:.0e} ns in all, are computed. Give fewer, or larger units."
            )
        if self.forward_ns + self.input_ns + self.weight_ns == 0:
            raise InputError("forward and backward both take 0 ns; give the time of at least one.")
        if self.cap is not None and not self.cap >= 1:
            raise InputError(
                f"infeasible: stage 0 needs 1 activation, cap {self.cap:g}. Raise the cap or make microbatches smaller."
            )

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.num_ranks * self.interleave


class OrderFn(Protocol):
    """An order of a pipeline step. Write a function of this shape and add a line to `SCHEDULES`."""

    def __call__(self, shape: PipelineShape) -> Orders:
        """Return the computations of each rank, in order."""
        ...


def gpipe(shape: PipelineShape) -> Orders:
    """Run all forwards, then all backwards (GPipe), each in the order of microbatches, as torch does."""
    _one_stage_per_rank(shape, "gpipe")
    all_of = range(shape.num_microbatches)
    return tuple(tuple(Action(op, rank, j) for op in (F, B) for j in all_of) for rank in range(shape.num_ranks))


def one_f_one_b(shape: PipelineShape) -> Orders:
    """Alternate one backward, one forward after p - rank forwards (PipeDream-Flush)."""
    _one_stage_per_rank(shape, "1f1b")
    p, m = shape.num_ranks, shape.num_microbatches
    orders = []
    for rank in range(p):
        warm_up = min(m, p - rank)
        actions = [Action(F, rank, j) for j in range(warm_up)]
        for j in range(m):
            actions.append(Action(B, rank, j))
            if warm_up + j < m:
                actions.append(Action(F, rank, warm_up + j))
        orders.append(tuple(actions))
    return tuple(orders)


def interleaved(shape: PipelineShape) -> Orders:
    """Run v stages per rank, p microbatches of each in turn (Megatron-LM, SC'21); stage s is on rank s mod p.

    Forward k of a rank is microbatch (k // pv) p + k mod p of its stage (k mod pv) // p; backwards take the stages
    the other way round. Raises `InputError` where m is no multiple of p.
    """
    p, m, v = shape.num_ranks, shape.num_microbatches, shape.interleave
    if m % p:
        near = max(p, round(m / p) * p)
        raise InputError(f"{m} microbatches are no multiple of {p} ranks; interleaving needs one. Give {near}.")
    total = m * v
    order = [((k % (p * v)) // p, k // (p * v) * p + k % p) for k in range(total)]
    orders = []
    for rank in range(p):
        forwards = [Action(F, part * p + rank, j) for part, j in order]
        backwards = [Action(B, (v - 1 - part) * p + rank, j) for part, j in order]
        # The first backward of the last rank follows (v - 1)p + 1 forwards; each rank before it runs two more ahead.
        warm_up = min(total, 2 * (p - rank - 1) + (v - 1) * p + 1)
        actions = forwards[:warm_up]
        for k in range(total):
            actions.append(backwards[k])
            actions += forwards[warm_up + k : warm_up + k + 1]
        orders.append(tuple(actions))
    return tuple(orders)


def _one_stage_per_rank(shape: PipelineShape, name: str) -> None:
    """Refuse interleaving where the order has none."""
    if shape.interleave != 1:
        raise InputError(f"{name} has one stage per rank, not {shape.interleave}. Choose 'interleaved' for several.")
