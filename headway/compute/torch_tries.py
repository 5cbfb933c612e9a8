"""'measure.try': candidates on branches of a script's training state, each on the same batches; then the script ends.

    warm-up | copy of the state | plain | candidate | candidate | ...      each: put the state back, change, k steps

A branch begins behind an optimizer step, where gradients are no part of the state. Its first step does not count, and
the state is put back once more behind it: a script that fetches batches ahead has used up what it had by then. The
loader that trains yields from there on what it yielded in the first branch; where the script draws its batches itself
its generators are put back, and whether the model was given the same numbers is looked at. The time in which a step
waits for its batch, or its thread for a core, does not count: batches of later branches are in memory. What is measured
is written behind each branch to RUN/try/r<rank>.json, so that a script that ends early, or is ended, loses nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sized
from time import perf_counter
from typing import NoReturn, cast

import msgspec
import psutil
import torch
from torch.optim.lr_scheduler import LRScheduler

from headway.compute.advise import CANDIDATES, Tries, TryBranch, schedule
from headway.compute.apply import on_optimizer_steps
from headway.compute.remedies import TryParameters
from headway.compute.torch_forward import TRIAL
from headway.core.files.planfile import Remedy
from headway.core.machine.interruptions import pass_on
from headway.core.units import format_bytes
from headway.runtime.host.device import in_use, synchronize, take_peak_bytes
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy, apply_one
from headway.runtime.recorder.probes import NEVER, Args, CallFn, Kwargs, write_json
from headway.runtime.script.run_delay import open_schedstat, read_delay
from headway.runtime.torch_state import RngStates, TrainingState, living
from headway.trace.rings.ring import warn

NAME = "measure.try"
FOLDER = "try"
"""Folder of a run folder that receives the measurements."""

MOST_ENDS = 8
"""How often a script is asked to end."""

MANY = 500
"""Steps, of whatever is counted, after which an optimizer should have been seen."""

PLACES = dict.fromkeys(CANDIDATES, "headway.compute.remedies:REMEDIES")
"""Candidate -> where its record lies."""

NOT_COUNTED = 4
"""A branch's first steps, one in so many, do not count: what a switch costs (caches, compilers) is paid in them."""


def tries(parameters: TryParameters, context: Context) -> Applied:
    """Install the trial of candidates."""
    trial = _TryDriver(parameters, context)
    context.shared[TRIAL] = True
    context.patch("torch.utils.data.dataloader:DataLoader.__iter__", trial.iterate)
    context.patch("torch._tensor:Tensor.backward", trial.backward)
    context.around_forward(trial.around_forward)
    on_optimizer_steps(context, trial.stepped)
    context.listen(trial.no_optimizer)
    return Applied(NAME, {"steps": parameters.steps})


class _Pass:
    """A pass over a loader: from `keep` on its batches stay in memory, and `rewind` goes back there."""

    def __init__(self, fresh: Callable[[], Iterator[object]], trial: _TryDriver) -> None:
        self.fresh, self.trial = fresh, trial
        self.iterator = fresh()
        self.batches: list[tuple[object, dict[str, bytes]]] | None = None  # with the generators behind the load
        self.position = 0

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        """Return the next batch: one that was kept, else the loader's; a pass that is tried on has no end."""
        self.trial.leave_if_over()
        begin, delay_ns = perf_counter(), read_delay(open_schedstat())
        try:
            if self.batches is None:
                batch = next(self.iterator)
            elif self.position < len(self.batches):
                batch, generators = self.batches[self.position]
                RngStates().load_state_dict(generators)
            else:
                try:
                    batch = next(self.iterator)
                except StopIteration:
                    self.iterator = self.fresh()
                    batch = next(self.iterator)
                self.batches.append((batch, RngStates().state_dict()))  # what loading drew is drawn again
            self.position += 1
        finally:
            self.trial.waited(perf_counter() - begin, read_delay(open_schedstat()) - delay_ns)
        self.trial.latest = self
        return batch

    def __getattr__(self, name: str) -> object:
        """What loaders' iterators have besides."""
        return getattr(self.iterator, name)

    def __len__(self) -> int:
        """Return the batches of a pass, as torch's iterators do."""
        return len(cast("Sized", self.iterator))

    def keep(self) -> None:
        self.batches, self.position = [], 0

    def rewind(self) -> None:
        self.position = 0


class _TryDriver:
    """The trial in one process."""

    def __init__(self, parameters: TryParameters, context: Context) -> None:
        self.parameters, self.context = parameters, context
        self.found = Tries()
        self.latest: _Pass | None = None
        self._pid = os.getpid()
        self._wait_s = 0.0
        self._mark = perf_counter()
        self._leader = 0  # `id` of the optimizer whose steps are those of a branch: the last one of a training cycle
        self._optimizers = set[int]()  # those that stepped before the first branch
        self._num_ends = 0
        self._num_steps = 0
        self._loss: torch.Tensor | None = None
        self._state: TrainingState | None = None
        self._schedule = schedule(parameters.candidates, parameters.rounds)
        self._branch = TryBranch()
        self._firsts: list[float] = []  # of the first branch: a number of what the model was given in each step
        self._given: list[float] = []
        self._waits: list[float] = []
        self._is_flushing = False
        self._delay_ns = 0
        self._over = False

    def iterate(self, original: Callable[[object], Iterator[object]]) -> Callable[[object], Iterator[object]]:
        """Wrap `DataLoader.__iter__`."""

        @functools.wraps(original)
        def __iter__(loader: object) -> Iterator[object]:  # noqa: N807 - the name it has in torch
            if self._over or os.getpid() != self._pid:
                return original(loader)
            return _Pass(lambda: original(loader), self)

        return __iter__

    def leave_if_over(self) -> None:
        """End a script that goes on behind the last branch."""
        if self._over and os.getpid() == self._pid:
            self._leave()

    def waited(self, seconds: float, delay_ns: int) -> None:
        """Note that the step waited for a batch, and how long it had no core meanwhile: that is not taken off twice."""
        self._wait_s += seconds
        self._delay_ns += delay_ns

    def around_forward(self, original: CallFn) -> CallFn:
        """Note what the model is given: the sum of the first tensor."""

        def forward(module: torch.nn.Module, args: Args, kwargs: Kwargs) -> object:
            if self._state is not None and len(self._given) <= self._num_steps and _learns(module):
                tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
                self._given.append(float(tensors[0].detach().double().sum()) if tensors else 0.0)
            return original(module, args, kwargs)

        return forward

    def backward(self, original: Callable[..., object]) -> Callable[..., object]:
        """Note the loss."""

        @functools.wraps(original)
        def backward(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            if tensor.numel() == 1:
                self._loss = tensor.detach()
            return original(tensor, *args, **kwargs)

        return backward

    def no_optimizer(self, _: int) -> int:
        """End a script that trains without an optimizer of torch's: behind which step to begin is not known."""
        if self.context.probes.steps[0] < MANY:
            return MANY
        if not self._leader and os.getpid() == self._pid:
            self._end("no optimizer of torch's steps")
        return NEVER

    def stepped(self, optimizer: int) -> int:
        """Behind an optimizer step: note it, and begin the next branch where this one has its steps."""
        if os.getpid() != self._pid:
            return NEVER
        if self._over:
            self._leave()
        if self._state is None and optimizer not in self._optimizers:
            # Of several, behind the one that came last no graph of another one is waiting for its backward.
            self._optimizers.add(optimizer)
            self._leader, self._num_steps = optimizer, 0
        if optimizer != self._leader:
            return 1
        if any(name in self.context.failed for name in self._branch.remedies):
            self._note(self._branch)
            self._start_clock()
            return 1
        synchronize()
        delay_ns = max(0, read_delay(open_schedstat()) - self._delay_ns)
        step_s = perf_counter() - self._mark - self._wait_s - delay_ns / 1e9
        self._num_steps += 1
        if self._is_flushing:
            self._flush()
            return 1
        if self._state is None:
            if self._num_steps > self.parameters.warmup:
                self._begin()
        else:
            if self._num_steps > self.parameters.steps // NOT_COUNTED:
                self._branch.step_s.append(step_s)
                self._waits.append(self._wait_s)
            if self._num_steps >= self.parameters.steps:
                self._next_branch()
        self._start_clock()
        return 1

    def _flush(self) -> None:
        """Put the state back behind the first step of a branch, with the generators where that step has left them."""
        assert self._state is not None
        generators = RngStates().state_dict()
        self._state.put_back()
        RngStates().load_state_dict(generators)
        self._is_flushing, self._num_steps, self._given = False, 0, []
        self._start_clock()

    def _start_clock(self) -> None:
        self._wait_s, self._delay_ns, self._mark = 0.0, read_delay(open_schedstat()), perf_counter()

    def _begin(self) -> None:
        """Copy the state and begin the first branch, the script as it is."""
        reason = self._objection()
        if reason:
            self._end(reason)
        objects, num_bytes = _state_of_script()
        if num_bytes > (available := psutil.virtual_memory().available) and not in_use():
            self._end(f"a copy of the state takes {format_bytes(num_bytes)}, and {format_bytes(available)} are free")
        try:
            self._state = TrainingState(objects)
        except Exception as cause:
            pass_on(cause)
            self._end(f"the state cannot be copied: {cause}")
        assert self._state is not None
        self.found.state_bytes = self._state.num_bytes
        if self.latest is not None:
            self.latest.keep()
        self._change(next(self._schedule))

    def _objection(self) -> str:
        """Return why nothing can be tried."""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            return "candidates are tried on one rank, and the job has more"
        return ""

    def _next_branch(self) -> None:
        """Note the branch that has its steps, and begin the next one that can begin."""
        branch = self._branch
        branch.wait_s = statistics.median(self._waits)
        branch.loss = None if self._loss is None else float(self._loss)
        branch.memory_bytes = take_peak_bytes()
        self._firsts = self._firsts or self._given
        branch.same_batches = self._given == self._firsts
        self._note(branch)

    def _note(self, branch: TryBranch) -> None:
        """Take back what a branch has changed, write it down, and go on with the next one."""
        for name in reversed(branch.remedies):
            self._take_back(name)
        self.found.branches.append(branch)
        self._write()
        assert self._state is not None
        self._state.put_back()
        try:
            following = self._schedule.send(branch)
        except StopIteration:
            self._end("")
        self._change(following)

    def _change(self, remedies: tuple[str, ...]) -> None:
        """Begin a branch: apply its remedies, and go back to the first batch."""
        self._branch, self._num_steps, self._loss = TryBranch(remedies), 0, None
        self._given, self._waits, self._is_flushing = [], [], True
        if self.latest is not None:
            self.latest.rewind()
        take_peak_bytes()
        warn(f"{' + '.join(remedies) or 'as it is'}, {self.parameters.steps} steps")
        for name in remedies:
            outcome = apply_one(Remedy(name, allow=CANDIDATES[name]), PLACES, self.context)
            if isinstance(outcome, RefusedRemedy):
                self._branch.refused = outcome.reason
                self._note(self._branch)
                return

    def _take_back(self, name: str) -> None:
        """Undo a remedy; where it failed meanwhile, the branch says why."""
        outcome = next((outcome for outcome in self.context.outcomes if outcome.name == name), None)
        outcome = self.context.failed.pop(name, outcome)
        if isinstance(outcome, RefusedRemedy):
            self._branch.refused, self._branch.step_s = outcome.reason, []
        self.context.take_back(name)
        self.context.outcomes[:] = [outcome for outcome in self.context.outcomes if outcome.name != name]

    def _write(self) -> None:
        write_json(f"{self.context.run}/{FOLDER}/r{self.context.rank}.json", msgspec.to_builtins(self.found))

    def _end(self, reason: str) -> None:
        """Write why there is no more, and end the script out of its step, in the state before the trials."""
        self._over, self.found.ended = True, reason
        self._write()
        if self._state is not None:
            with contextlib.suppress(Exception):  # what the script saves on its way out is what it had trained
                self._state.put_back()
        self._leave()

    def _leave(self) -> NoReturn:
        """End the script; one that catches that, and everything else around its step, is ended without being asked."""
        self._num_ends += 1
        if self._num_ends > MOST_ENDS:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise SystemExit(0)


def _learns(module: torch.nn.Module) -> bool:
    """Whether a model is called to train: transforms of a dataset may be modules too."""
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())


def _state_of_script() -> tuple[dict[str, object], int]:
    """Return what holds the training state, by name, and the bytes of its tensors: roots, optimizers, schedulers."""
    roots = living(torch.nn.Module, torch.optim.Optimizer, LRScheduler)
    tensors = {id(p): p.nbytes for thing in roots if isinstance(thing, torch.nn.Module) for p in thing.parameters()}
    moments = [
        value.nbytes for thing in roots if isinstance(thing, torch.optim.Optimizer)
        for state in thing.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]  # fmt: skip
    return {f"{type(thing).__name__}-{index}": thing for index, thing in enumerate(roots)}, sum(tensors.values()) + sum(
        moments
    )
