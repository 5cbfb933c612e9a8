"""'model.tune': an unmodified script's settings are tuned while it trains. Needs `--allow lossy`.

Found at the first batch of the first loader that is read with gradients on, and
refused with the reason where it is not so: one optimizer; the root modules that
hold its parameters; the schedulers and scalers of it; one loader. The loss is
what `Tensor.backward` is called on, the mean of those since the last update.

    for epoch in ...:
        for batch in loader:       <- the batches come from Tuner.steps: of a trial, the same ones again
            loss.backward()        <- noted
            optimizer.step()       <- reported

A trial is at most what is left of a pass, so no trial crosses the script's own
code between passes. Batches of a pass stay in memory while it is searched:
torch's loader has no state. What the script does besides training in its loop
(printing, counting, saving) sees the steps of trials, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.core.errors import InputError
from headway.model.remedies import TuneParameters
from headway.model.tuning.search import FIRST_STEPS
from headway.model.tuning.space import parsed
from headway.model.tuning.torch_tuner import Tuner
from headway.runtime.in_rank.guard import OfScript
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy, on_scaled_loss
from headway.runtime.torch_state import living

NAME = "model.tune"
DEFAULT = ("lr=1e-5:1:log",)
_END = object()
MOST_BYTES = 1 << 30
"""Most memory for the batches of a pass."""


def tune(parameters: TuneParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    script = _Script(context, dict(map(parsed, parameters.settings)), parameters.trials, parameters.seed)
    script.install()
    return Applied(NAME, script.facts)


class ReplayedPasses:
    """Passes over a loader without a state: the batches of the pass so far stay in memory, and can be read again."""

    def __init__(self, fresh: Callable[[], Iterator[Any]], length: int) -> None:
        self._iterator, self._length = fresh(), length
        self._batches: list[Any] = []
        self._num_bytes = 0
        self._position = 0
        self.of_script = OfScript()
        """Errors of reading, which are the script's."""
        self.forget: Callable[[], bool] = lambda: False
        """Whether nobody will read the next batch again."""
        self.full: Callable[[], None] = lambda: None
        """What is called while the batches take more than MOST_BYTES."""

    def __len__(self) -> int:
        """Return the batches of the pass that were not read before the tuner began."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Yield from the position on: first what is in memory."""
        while True:
            if self._position < len(self._batches):
                batch = self._batches[self._position]
            else:
                with self.of_script:
                    batch = next(self._iterator, _END)
                if batch is _END:
                    return
                self._batches.append(batch)
                self._num_bytes += 0 if self.forget() else _num_bytes(batch)
                if self._num_bytes > MOST_BYTES:
                    self.full()
            if self.forget():
                self._batches[self._position] = None
            self._position += 1
            yield batch

    def begin_here(self) -> None:
        """Take what was read so far for no part of the pass."""
        self._length -= self._position

    def state_dict(self) -> dict[str, int]:
        """Return the position in the pass."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Read from there at the next `iter`."""
        self._position = state["position"]


class _Script:
    """The remedy in one process."""

    def __init__(self, context: Context, space: dict[str, Any], trials: int, seed: int) -> None:
        self.context, self.space, self.trials, self.seed = context, space, trials, seed
        self.facts: dict[str, Any] = {"setting": None, "metric": None, "steps": 0, "trials": 0, "label": ""}
        self.tuner: Tuner | None = None
        self._loader: Callable[[], Any] = lambda: None
        self._optimizer: Any = None
        self._tuned: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._over = False

    def install(self) -> None:
        """Patch loaders, `backward` and the optimizers' steps."""
        self.context.patch("torch.utils.data.dataloader:DataLoader.__iter__", self._iterate)
        self.context.patch("torch._tensor:Tensor.backward", self._backward)
        on_scaled_loss(self.context, self._refuse_scaling)
        self.context.undos.append(register_optimizer_step_post_hook(self.context.hook(self._stepped)).remove)

    def _is_over(self) -> bool:
        """Tell whether nothing is tuned any more: it was refused, or a hook of it has failed."""
        self._over = self._over or NAME in self.context.failed
        return self._over

    def _refuse(self, reason: str) -> None:
        self._over = True
        self.context.fail(NAME, reason)

    def _iterate(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807 - the name it has in torch
            """Iterate; over the loader that trains, as the tuner says."""
            if self._over or self._loader() not in (None, loader) or not torch.is_grad_enabled():
                return original(loader)
            try:
                length = len(loader)
            except TypeError:  # an iterable dataset
                length = 0
            if length < FIRST_STEPS:
                self._waits(f"a pass over a loader has {length} batches, and a trial needs {FIRST_STEPS}")
                return original(loader)
            return self._batches(loader, ReplayedPasses(lambda: original(loader), length))

        return __iter__

    def _batches(self, loader: Any, passes: ReplayedPasses) -> Iterator[Any]:
        """Yield the batches of one pass; the script's own where there is nothing to tune with."""
        plain = iter(passes)
        passes.forget = lambda: True
        if self.tuner is None:
            # Which optimizer and loss there are shows in the first step: it is the script's own.
            self._waits("no loader's batches led to `backward` of a scalar and a step of an optimizer")
            self._losses.clear()  # those of another loader's batches: this one may only be evaluated
            self._optimizer = None
            for batch in plain:
                yield batch
                if self._over or self._found():
                    self._loader = weakref.ref(loader)
                    passes.begin_here()
                    break
        if self.tuner is None or self._over or len(passes) < FIRST_STEPS:
            yield from plain
            return
        tuner = self.tuner
        self._losses.clear()
        passes.forget, passes.full = (lambda: not tuner.searching), tuner.shorten
        steps = tuner.steps(passes)
        try:
            for batch in steps:
                yield batch
                if self._is_over():
                    break
                self._tell()
        except Exception as error:
            if error in passes.of_script:
                raise
            self._refuse(f"failed in use, and was undone: {type(error).__name__}: {error}")
        if self._is_over():  # from where the search began, on the script's own settings
            tuner.abandon()
            steps.close()
            yield from passes

    def _waits(self, reason: str) -> None:
        """Note why nothing is tuned so far; another loader may be the one that trains."""
        if self.tuner is None and self.facts.get("reason") != reason:
            self.facts["reason"] = reason
            self.context.note(Applied(NAME, self.facts))

    def _found(self) -> bool:
        """Look for what is tuned, once a loss and a step were seen."""
        if self._optimizer is None or not self._losses:
            return False
        parameters = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        alive = living(torch.nn.Module, LRScheduler)
        modules = [each for each in alive if isinstance(each, torch.nn.Module)]
        roots = [module for module in modules if any(id(p) in parameters for p in module.parameters())]
        schedulers = [s for s in alive if isinstance(s, LRScheduler) and s.optimizer is self._optimizer]
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self._refuse("branches of several ranks would have to decide together, which is not there yet")
            return False
        owned = {id(p) for module in roots for p in module.parameters()}
        if not parameters <= owned:
            self._refuse(f"{len(parameters - owned)} parameters of the optimizer belong to no module that is alive")
            return False
        try:
            self.tuner = Tuner(
                self.space, state=[*roots, self._optimizer, *schedulers], trials=self.trials, seed=self.seed,
                patience=None,
            )  # fmt: skip
        except InputError as error:
            self._refuse(str(error))
            return False
        return True

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Report the loss of an update."""
        if self._over or not self._losses:
            return
        if self._optimizer is not None and optimizer is not self._optimizer:
            self._over = self.tuner is not None and self.tuner.setting is not None and not self.tuner.searching
            if not self._over:  # what was found for an earlier one stands
                self._refuse("the script steps two optimizers, and a tunable belongs to one")
            return
        tuned = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if self.tuner is not None and self.tuner.searching and tuned != self._tuned:
            self._refuse("the script changes what its optimizer updates while settings are tried")
        self._tuned = tuned
        if self.tuner is None:
            self._optimizer = optimizer
        else:
            self.tuner.report(torch.stack(self._losses).mean())
            self._losses.clear()

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            """Run backward, and note the loss."""
            if not self._over and tensor.numel() == 1:
                if self.tuner is None:  # only whether there is one counts, and a tuner may never come
                    self._losses.clear()
                self._losses.append(tensor.detach().reshape(()))
            return original(tensor, *args, **kwargs)

        return backward

    def _refuse_scaling(self) -> None:
        if not self._over:
            self._refuse("the loss is scaled (GradScaler), so what `backward` sees is not the loss")

    def _tell(self) -> None:
        """Write what is known, when a search has ended and now and then."""
        tuner = self.tuner
        assert tuner is not None
        before = (self.facts["trials"], self.facts["label"])
        self.facts.pop("reason", None)
        self.facts |= {
            "setting": tuner.setting, "metric": tuner.metric, "steps": tuner.num_steps, "trials": tuner.num_trials,
            "label": tuner.label,
        }  # fmt: skip
        if before != (tuner.num_trials, tuner.label) or tuner.num_steps & (tuner.num_steps - 1) == 0:
            self.context.note(Applied(NAME, self.facts))


def _num_bytes(batch: Any) -> int:
    """Return the bytes of the tensors in nested lists and mappings."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(map(_num_bytes, batch.values()))
    return sum(map(_num_bytes, batch)) if isinstance(batch, (list, tuple)) else 0
