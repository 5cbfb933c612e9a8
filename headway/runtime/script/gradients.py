"""What the probes of one process know of gradients: whether an update, or a backward, begins a new step.

A step is a cycle of gradients. An `Optimizer.step` is one when a gradient was computed since that optimizer's last
one; where no optimizer of torch steps, a backward begins a new cycle when the gradients are fresh. Which basis
counts is decided when the run is finalised (`headway.trace.recording.basis`); here the same rule only wakes those who
wait for steps. No value of a tensor is read, and no device is waited for.

Known limit: where no optimizer of torch steps, a script that clears its gradients by `p.grad.data.zero_()` is counted
as one that accumulates for ever. `.data` is another tensor over the same memory with a version of its own, so object,
version and address stay what they were. The values would tell, at the price of a wait for the device, and not for
certain: zeros may be a true gradient, and changed ones may have been scaled. A wrapper around every `Tensor.zero_`
would see it, and all scripts would pay for that. `p.grad.zero_()` and `p.grad = None` are seen.

>>> GradientCounter().counts(0)
True
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.runtime.script.compute_facts import unseen
from headway.runtime.script.gradient_uses import GradientUses

PATIENCE = 16
"""Updates without any gradient that are not counted: a restore steps an optimizer once to make its state."""

CYCLES = 3
"""Fresh backwards before which none counts as a step: an optimizer may still come."""

FORWARDS = 20
"""Forwards without any gradient before which none counts as a step: an evaluation may precede the training."""

MOST_FUNCTIONS = 4096
"""Functions of a graph that are looked at for a leaf."""

BACKWARD, FORWARD = -1, -2
"""What a listener is called with where a backward, or a forward, counts as the step: no optimizer has such a number."""


@dataclass(slots=True)
class GradientCounter:
    """Gradients so far. The one-element lists are bound by the probes and changed in place."""

    begun: list[int] = field(default_factory=lambda: [0])
    """[1] Backwards, and gradients computed in other ways, that have begun."""

    counted: dict[int, int] = field(default_factory=dict)
    """Optimizer -> `begun` at its last update that counted."""

    optimized: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether an update of an optimizer has counted: from then on nothing else does."""

    watched: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether backwards are seen at all; with the timers switched off every update counts."""

    parameter: Callable[[], Any] | None = None
    """Returns the first trainable parameter of the model that computed last with gradients; None before the first."""

    uses: GradientUses = field(default_factory=GradientUses)
    """Which gradients nobody uses."""

    _seen: dict[int, tuple[Callable[[], Any], int]] = field(default_factory=dict)
    """`id` of a watched parameter -> its gradient after the last backward (a weak reference) and that one's version."""

    _watch: Any = None
    _unfit: set[int] = field(default_factory=set)
    _strays: int = 0
    _cycles: int = 0
    _forwards: int = 0

    def counts(self, optimizer: int) -> bool:
        """Say whether an update of `optimizer` counts, and note it."""
        begun = self.begun[0]
        if begun == self.counted.get(optimizer, 0) and self.watched[0]:
            if begun:
                return False
            self._strays += 1
            if self._strays <= PATIENCE:
                return False
        self.counted[optimizer] = begun
        self.optimized[0] = True
        return True

    @unseen
    def began(self, roots: Any) -> tuple[int, bool]:
        """Look at the gradients when a backward from `roots` begins, while no optimizer has counted.

        Returns 1 if they are fresh, else 0, and whether a step has ended by that.
        """
        self._watch = parameter = self._chosen(roots)
        if parameter is None:
            return 0, False
        gradient, (before, version) = parameter.grad, self._seen.get(id(parameter), (_nothing, -1))
        # `is None` apart: a gradient that is gone leaves a weak reference that returns None as well.
        fresh = gradient is None or gradient is not before() or gradient._version != version
        if fresh:
            self._cycles += 1
        return int(fresh), fresh and self._cycles > CYCLES

    @unseen
    def ended(self) -> None:
        """Note how the gradients are when that backward has ended."""
        parameter, self._watch = self._watch, None
        if parameter is None:
            return
        gradient = parameter.grad
        if gradient is not None:
            self._seen[id(parameter)] = (weakref.ref(gradient), gradient._version)
        elif self.parameter is not None and parameter is self.parameter():
            self._unfit.add(id(parameter))  # not part of the graph: it would seem fresh for ever

    def inferred(self) -> bool:
        """Note a forward while no gradient was ever computed; says whether it counts as a step."""
        self._forwards += 1
        return self._forwards > FORWARDS

    def differentiated(self) -> bool:
        """Note a gradient that was computed without a backward; says whether it counts as a step."""
        if self.optimized[0] or self._seen:
            return False
        self._cycles += 1
        return self._cycles > CYCLES

    def _chosen(self, roots: Any) -> Any:
        parameter = self.parameter() if self.parameter is not None else None
        if parameter is None or id(parameter) in self._unfit:
            parameter = leaf_of(roots)
        return parameter


def _nothing() -> None:
    """Stand for a gradient that was never seen."""


def leaf_of(roots: Any) -> Any:
    """Return a leaf that a backward from `roots` (a tensor, or several) would accumulate into; None if none is near."""
    first = roots[0] if isinstance(roots, Sequence) and len(roots) else roots
    function = getattr(first, "grad_fn", None)
    if function is None:
        return first if getattr(first, "requires_grad", False) else None
    pending, seen = [function], {function}
    while pending and len(seen) < MOST_FUNCTIONS:
        function = pending.pop()
        leaf = getattr(function, "variable", None)  # of an AccumulateGrad
        if leaf is not None:
            return leaf
        for after, _ in function.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                pending.append(after)
    return None
