"""Who may write a tensor while a device copies it, and how a writer is found that nobody announced.

Between two updates a snapshot reads parameters and optimizer state beside the computation. That is right only while
nothing but the update writes them. Torch has no record of all writes, so each kind is met by what sees it:

    attached optimizer's step     its hook makes the update wait for the copy
    replay of a captured graph    waits for the copy, whatever the graph holds
    in-place operation            raises `tensor._version`: the tensor is copied again before the next update
    `p.data.clamp_()`, kernels    raise nothing: sums of the bytes, taken where the save begins and of what was copied,
    of others, other streams      differ, and the agent refuses the image

Not seen: a write that leaves the sum of a tensor's words as it was (a permutation of its elements inside the tensor
while it is copied), and one that goes in through another name of the same memory without changing the bytes.

The first interval between a save and the next update is a trial. Its save waits at once; the sums at both ends tell
whether somebody else writes in every step, as a script that clips weights or a library with master weights does. Then
all later saves wait at once too.

>>> word_bytes(torch.ones(3)), sums_of([torch.tensor([1, 2]), torch.tensor([7])]).tolist()
(4, [3, 7])
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from headway.core.errors import InputError
from headway.runtime.calls.patches import replace_attribute

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

_CUDA: Any = torch.cuda
"""Events, whose constructor torch does not type."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes of a word -> type that a sum reads it as, as in `headway.checkpoint.agent.saving`."""

REPLAYS = ("torch.cuda.graphs:CUDAGraph.replay", "torch.accelerator.graphs:Graph.replay")
"""Functions that launch what a graph holds, without a call of any hook."""

CAPTURES = ("torch.cuda.graphs:CUDAGraph.capture_begin", "torch.accelerator.graphs:Graph.capture_begin")
"""Functions that begin to capture: until the end other threads must leave the device's library alone."""


def word_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the largest word that a tensor's memory can be read in; 0 where it cannot be summed."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or not tensor.nbytes or tensor.is_inference():
        return 0
    return next(size for size in _WORDS if tensor.nbytes % size == 0 and tensor.data_ptr() % size == 0)


def sums_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum modulo 2**64 of the words of each tensor, int64 [tensors], queued on the current stream.

    Reads every byte once: 10 GB take 2 to 5 ms at 2 to 5 TB/s. Integers, so that no order of summing matters.
    """
    words = [tensor.detach().reshape(-1).view(torch.uint8).view(_WORDS[word_bytes(tensor)]) for tensor in tensors]
    return torch.stack([word.sum(dtype=torch.int64) for word in words])


class Writers:
    """What is known of the writers of the tensors that attached optimizers hold; the optimizers may become more."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._places: frozenset[int] | None = frozenset()
        """Where memory begins that is written in attached updates alone; None: not looked up yet."""
        self._has_updated = self._is_proven = self._are_others = False
        self._trial: list[_Trial] | None = None
        self._num_tried = 0
        """Optimizers whose tensors the trial is about."""

    def before_update(self) -> None:
        """Note that an attached update begins: a trial ends."""
        for trial in self._trial or ():
            trial.end()

    def after_update(self) -> None:
        """Note that an attached update is over: until the next one nothing writes, as far as is known."""
        self._has_updated = True

    def distrust(self) -> None:
        """Note that there are other writers: from now on work waits for a snapshot at once."""
        self._are_others = True

    def begin(self) -> None:
        """Prepare for the questions of a save that begins now."""
        may_trust, self._has_updated = self._has_updated and not self._are_others, False
        self._places = None if may_trust else frozenset()
        if len(self._optimizers) > self._num_tried:  # one more is attached: its tensors are to be tried as well
            self._is_proven, self._trial, self._num_tried = False, None, len(self._optimizers)
        if not may_trust or self._is_proven:
            return
        if self._trial is None:
            self._trial = _trials(_tensors(self._optimizers))
        answers = [trial.answer() for trial in self._trial]
        if False in answers:
            LOG.warning("something writes parameters between attached updates: saves wait for their copy at once")
            self.distrust()
        if all(answers):
            self._is_proven, self._trial = True, []
        else:
            self._places = frozenset()

    def are_known(self, tensor: torch.Tensor) -> bool:
        """Whether nothing but an attached update writes this tensor; asked of CUDA tensors only."""
        if self._places is None:
            self._places = frozenset(each.untyped_storage().data_ptr() for each in _tensors(self._optimizers))
        return tensor.untyped_storage().data_ptr() in self._places and word_bytes(tensor) > 0


class _Trial:
    """The tensors of one device between a save and the next update."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._device = tensors, tensors[0].device
        self._before = sums_of(tensors)
        self._after: torch.Tensor | None = None
        self._done: Any = None

    def end(self) -> None:
        """Sum again, once."""
        if self._after is None:
            self._after, self._done = sums_of(self._tensors), _CUDA.Event()
            self._done.record(_CUDA.current_stream(self._device))
            self._tensors = []

    def answer(self) -> bool | None:
        """Return whether the sums are equal; None while that is not known."""
        if self._after is None or not self._done.query():
            return None
        with _CUDA.stream(_CUDA.Stream(self._device)):  # on that of training the host would wait for its work
            return self._before.tolist() == self._after.tolist()


def _trials(tensors: Iterable[torch.Tensor]) -> list[_Trial]:
    """Begin one trial for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cuda and word_bytes(tensor):
            by_device.setdefault(tensor.device, []).append(tensor)
    return [_Trial(some) for some in by_device.values()]


def _tensors(optimizers: list[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    """Yield parameters and optimizer state, of sharded ones what this rank holds."""
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
        for tensor in parameters + state:
            yield tensor.to_local() if hasattr(tensor, "to_local") else tensor


def before(targets: tuple[str, ...], call: Callable[[], None]) -> list[Callable[[], None]]:
    """Have the bound method `call` called before each call of one of the functions; return what undoes that.

    The object of the method is not kept alive. A `graph.replay` that was bound before is not seen.
    """
    weakly = weakref.WeakMethod(call)

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(*args: Any, **named: Any) -> Any:
            """Call the function, after `call`."""
            alive = weakly()
            if alive is not None:
                alive()
            return original(*args, **named)

        return called

    undos = []
    for target in targets:
        with suppress(InputError, ImportError):  # this torch has no such graphs
            undos.append(replace_attribute(target, around))
    return undos
