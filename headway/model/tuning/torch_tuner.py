"""Settings tuned inside one run (MLtuner, arXiv 1803.07445): trials are branches of the training state in memory.

    tuner = Tuner({"lr": Range(1e-5, 1, log=True)}, state=[model, optimizer])
    for batch in tuner.steps(loader, epochs=20):
        with tuner.guard():                 # not needed: what raises in a trial then counts as diverged
            loss = train(batch)
            tuner.report(loss)
        checkpointer.maybe_save()           # with tuner=tuner: a run that is killed in a trial goes on with it

A trial begins at the parent's state, with the parent's next batches and random
numbers. The state is written in place, so that code that refers to a parameter
or a moment goes on referring to it. The winner's state is what training goes
on from: its trial is no lost work. When the loss has not fallen for `plateau`
trial lengths, the search begins again from there.

           .--- lr 1e-3 ---x          x  freed
    parent +--- lr 3e-1 ---x
           '--- lr 3e-2 ------------------ goes on ------- plateau: parent of the next search

Time is steps: of two settings whose steps take differently long, the one that learns more per step wins.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch

from headway.core.errors import FormatError, InputError
from headway.core.tables import pick
from headway.model.tuning.search import CONVERGING, FIRST_STEPS, Search, Trial
from headway.model.tuning.space import SEARCHERS, Setting, Space, lowered
from headway.model.tuning.torch_branches import (
    Branch,
    LoaderPosition,
    Searching,
    Setter,
    TuningProgress,
    check_held,
    packed,
    setters,
    unpack,
)
from headway.runtime.torch_state import RngStates

PATIENCE = 10
"""Batches without a report after which the metric counts as never reported."""

FALL = 0.99
"""The best of the latest windows at more than this times the best before them is a plateau."""

LONGER = 4
"""Times the last trials' length that trials of a later search may take; where that shows nothing, the run goes on."""

PLATEAU_PASSES = 1
"""Pass over the data, at least, without a lower loss before a later search."""

SIGNS = {"min": 1.0, "max": -1.0}
STATE = "headway_tuner"
_END = object()


class Tuner:
    """Tunes settings while a loop trains; one per process, used by its training thread."""

    def __init__(
        self,
        space: Space,
        *,
        state: Sequence[Any] = (),
        metric: Literal["min", "max"] = "min",
        start: Setting | None = None,
        set: Mapping[str, Setter] | None = None,
        searcher: Literal["tpe", "random", "optuna"] = "tpe",
        trials: int = 16,
        plateau: int = 10,
        patience: int | None = PATIENCE,
        seed: int = 0,
    ) -> None:
        """Look for who sets what; nothing is changed yet.

        space
            Name -> `Range` or `Choice`: an option of an optimizer, or a name in `set`. With one value each, nothing is
            searched and the loop is the plain one.
        state
            What a branch consists of, besides the loader and the generators: modules, optimizers, schedulers, scalers,
            anything with `state_dict` and `load_state_dict`.
        metric
            Whether what is reported should fall ("min") or rise ("max").
        start
            The setting to try first: what the loop would have used. It may lie outside of the space.
        set
            Name -> a function of the value, for what is no option of an optimizer. It is called whenever a branch
            comes into force.
        searcher
            "tpe", "random", or "optuna" where that is installed.
        trials
            Most trials of the first search; a later one has at most as many as the one before.
        plateau
            Trial lengths without a lower loss, after which the search begins again, but PLATEAU_PASSES over the data
            at least; 0: never.
        patience
            Batches without a report after which the metric counts as never reported; None: any number.

        Raises `InputError` on what cannot be.
        """
        pick(SEARCHERS, searcher, "searcher")
        self._sign = pick(SIGNS, metric, "metric")
        if not space:
            raise InputError("there is nothing to tune. Pass a tunable, such as {'lr': Range(1e-5, 1, log=True)}.")
        if trials < 1 or plateau < 0:
            raise InputError(f"trials is {trials} and plateau {plateau}; pass at least 1 and at least 0.")
        for name, each in space.items():
            if not hasattr(each, "fixed"):
                raise InputError(f"the tunable {name!r} is {each!r}. Pass a Range or a Choice, such as Range(1e-5, 1).")
        self._fixed = all(each.fixed for each in space.values())
        if not self._fixed and not state:
            raise InputError("state=[] leaves nothing to branch. Pass the model, the optimizer, and what changes too.")
        if not self._fixed:
            check_held(state)
        self._space, self._searcher, self._trials, self._plateau, self._seed = space, searcher, trials, plateau, seed
        self._patience = patience
        self._own_set, self._start = dict(set or {}), start
        if start is not None and start.keys() != space.keys():
            raise InputError(f"start sets {sorted(start)}, the space has {sorted(space)}. Give each tunable a value.")
        self._setters = setters(space, state, self._own_set)
        self._objects: dict[str, Any] = {f"state[{index}]": thing for index, thing in enumerate(state)}
        self._progress = TuningProgress()
        self._search: Search | None = None
        self._parent: Branch | None = None
        self._branches: dict[int, Branch] = {}
        self._active: Trial | None = None
        self._saved: dict[str, Any] | None = None
        self._reported, self._unreported, self._epochs = False, 0, 1
        self.history: list[Trial] = []
        """Trials of all searches that have ended."""

    @property
    def setting(self) -> Setting | None:
        """The setting in force; None before the first is chosen or tried."""
        return dict(self._active.setting) if self._active else self._progress.setting

    @property
    def searching(self) -> bool:
        """Whether what runs now is a trial."""
        return self._search is not None

    @property
    def num_steps(self) -> int:
        """Losses reported, those of trials included."""
        return self._progress.num_steps

    @property
    def num_trials(self) -> int:
        """Trials so far, of all searches."""
        return self._progress.num_trials + (len(self._search.trials) if self._search else 0)

    @property
    def label(self) -> str:
        """The label of the trial that chose the setting; '' before, "unstable" where none made progress."""
        return self._progress.label

    @property
    def metric(self) -> float | None:
        """What was reported last."""
        return self._progress.metric

    @property
    def num_copies(self) -> int:
        """Copies of the training state in memory: at most one more than there are live branches."""
        return len(self._branches) + (self._parent is not None)

    @property
    def num_live(self) -> int:
        """Live branches of the search; 0 outside of one."""
        return sum(trial.live for trial in self._search.trials) if self._search else 0

    def steps(self, loader: Any, epochs: int = 1) -> Generator[Any, None, None]:
        """Yield the batches of `epochs` passes over `loader`; during a search, those of a pass again and again.

        A loop that is broken off in a search goes on from the best trial so far; after an error it is the parent.
        Raises `InputError` for a loader without `state_dict` and `load_state_dict`, one that ends before a trial could
        be compared, and where `patience` batches brought no report.
        """
        if self._fixed:
            yield from self._plain(loader, epochs)
            return
        self._join(loader, epochs)
        try:
            yield from self._walk(loader, epochs)
        except Exception:
            self.abandon()
            raise
        finally:
            if self._search is not None:  # the loop was broken off
                self._search.settle()
                again = self._search.winner is None
                self._finish()
                if again:  # with the next loop
                    self._progress.num_searches, self._progress.most_trials = self._progress.num_searches - 1, 0
            self._progress.place = LoaderPosition()  # the next loop begins a pass, also behind one that was broken off

    def _walk(self, loader: Any, epochs: int) -> Iterator[Any]:
        """Yield batches, and let the search decide behind each."""
        sized = hasattr(loader, "__len__")
        iterator: Iterator[Any] | None = None
        if self._search is None and not self._progress.num_searches:
            self._begin_search(None, 1)
            self._decide()
        while True:
            place = self._progress.place
            if iterator is None and sized and place.batches >= len(loader):  # the setting may change the length
                place.epoch, place.batches = place.epoch + 1, 0
            if place.epoch >= epochs:
                if self._search is None:
                    break
                self._compare_here()
                iterator = None
                continue
            # The state of a pass that has ended begins the next one, or brings nothing once: both are the next pass.
            fresh = iterator is None
            iterator = iter(loader) if iterator is None else iterator
            batch = next(iterator, _END)
            if batch is _END:
                iterator = None
                if not fresh or place.batches:
                    place.epoch, place.batches = place.epoch + 1, 0
                continue
            place.batches += 1
            self._ask_for_report()
            yield batch
            if self._decide():
                iterator = None

    def report(self, loss: Any) -> None:
        """Report the metric of this step: a number, or a tensor of one element, which is waited for."""
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._progress.metric, self._progress.num_steps = value, self._progress.num_steps + 1
        self._reported, self._unreported, value = True, 0, self._sign * value
        if self._active is not None:
            self._active.losses.append(value)
        elif not self._fixed:
            self._note(value)

    def shorten(self) -> None:
        """Let no trial run longer than the one in force has by now: its batches are all that can be read again."""
        if self._search is not None and self._active is not None:
            self._search.stop_at(max(len(self._active.losses), FIRST_STEPS))

    def abandon(self) -> None:
        """End a search as if it had not begun: the parent is put in force. Does nothing outside of one."""
        if self._search is not None:
            parent, self._search, self._parent, self._active = self._parent, None, None, None
            self._branches.clear()
            self._put(parent)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Let what raises inside, in a trial, count as a trial that diverged; outside of a trial it is raised."""
        try:
            yield
        except Exception as cause:
            if self._search is None or self._active is None:
                raise
            self._search.fail(self._active, f"{type(cause).__name__}: {cause}")
            cause.__traceback__ = None  # its frames hold the activations that did not fit
            self._reported = True
            for thing in self._objects.values():
                if isinstance(thing, torch.optim.Optimizer):
                    thing.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()  # does nothing where CUDA is not used

    def state_dict(self) -> dict[str, Any]:
        """Return the search with all its branches, as one value of bytes.

        Call it, or `Checkpointer.maybe_save`, at the end of a step, after `report`. It holds the branches that are not
        in force, and where the loader is; the objects in `state` are saved by themselves.
        """
        saved: dict[str, Any] = {"progress": msgspec.json.encode(self._progress), "search": b"", "active": -1}
        if self._objects.get("loader") is not None:
            saved["loader"] = self._objects["loader"].state_dict()
        if self._search is not None:
            found = self._search
            fields = {name: getattr(found, name) for name in Searching.__struct_fields__}
            fields["first"] = list(found.first)
            saved["search"] = msgspec.json.encode(Searching(**fields))
            saved["active"] = -1 if self._active is None else self._active.number
            saved["branches"] = self._written()
        saved["generators"] = RngStates().state_dict()
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        return {STATE: buffer.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state` at the next `steps`, when the objects have been restored. Raises `FormatError`."""
        try:
            self._saved = torch.load(io.BytesIO(bytes(state[STATE])), weights_only=True)
            self._progress = msgspec.json.decode(self._saved["progress"], type=TuningProgress)
        except Exception as cause:
            raise FormatError(f"this is no state of a Tuner ({cause}). Restore another step.") from cause

    def _plain(self, loader: Any, epochs: int) -> Iterator[Any]:
        """Yield the batches with the one setting there is."""
        if self._progress.setting is None:
            pairs = self._space.items()
            fixed = {name: each.values[0] if hasattr(each, "values") else each.low for name, each in pairs}
            self._apply(fixed)
            self._progress.setting = fixed
        for _ in range(epochs):
            yield from loader

    def _join(self, loader: Any, epochs: int) -> None:
        """Take the loader into the state, and what was loaded into force."""
        missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(loader, name)]
        if missing:
            raise InputError(
                f"{type(loader).__name__} has no {' and no '.join(missing)}, so a branch cannot see the batches of "
                "another again. Use headway.data.DataLoader, or a loader that has both."
            )
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise InputError("branches of several ranks would have to decide together. Tune on one rank.")
        if epochs < 1:
            raise InputError(f"epochs is {epochs}; pass 1 or more.")
        self._objects["loader"], self._epochs = loader, epochs
        if self._saved is not None:
            self._take_up(self._saved)
            self._saved = None

    def _left(self) -> int:
        """Return the steps of the longest trial that could begin now: a pass, or what is left of the call."""
        loader, place = self._objects["loader"], self._progress.place
        if not hasattr(loader, "__len__"):
            return 1 << 30
        return int(min(len(loader), (self._epochs - place.epoch) * len(loader) - place.batches))

    def _begin_search(self, start: float | None, start_count: int) -> None:
        most_steps = min(self._left(), LONGER * self._progress.trial_steps or self._left())
        if most_steps < FIRST_STEPS:
            raise InputError(
                f"{most_steps} batches are left; a trial needs {FIRST_STEPS}. Pass more: steps(loader, epochs=N)."
            )
        seed = self._seed + self._progress.num_searches
        now = self._progress.setting
        # On a plateau the noise of the updates is often what is in the way: lower rates are the first to try.
        first = [now, lowered(self._space, now)] if now else [self._start] if self._start else []
        self._search = Search(
            self._space, most_steps, self._progress.most_trials or self._trials, seed, self._searcher, start,
            start_count, first=first,
        )  # fmt: skip
        self._parent = self._captured()
        self._reported = True

    def _compare_here(self) -> None:
        """Compare at the length of the trial whose data has ended."""
        if self._search is not None and self._active is not None:
            self._search.stop_at(len(self._active.losses))
        self._reported = True
        self._decide()

    def _decide(self) -> bool:
        """Say whether another branch came into force."""
        if not self._reported:
            return False
        self._reported = False
        if self._search is None:
            if not self._on_plateau() or self._left() < 2 * FIRST_STEPS:
                return False
            self._begin_search(self._progress.means[-1], self._progress.window_steps)
        assert self._search is not None
        run = self._search.next_run()
        live = {trial.number for trial in self._search.trials if trial.live}
        for number in self._branches.keys() - live:
            del self._branches[number]
        if run is None:
            self._finish()
        elif run is self._active:
            return False
        else:
            self._activate(run, live)
        return True

    def _activate(self, trial: Trial, live: set[int]) -> None:
        """Put a trial's branch in force; a new one begins at the parent."""
        self._set_aside(live)
        branch = self._branches.pop(trial.number, None)
        self._put(branch or self._parent)
        self._apply(trial.setting, only_own=branch is not None)
        self._active = trial

    def _finish(self) -> None:
        """Go on from the winner, or from the parent where none made progress."""
        search, progress = self._search, self._progress
        assert search is not None
        before, winner = progress.setting, search.winner
        if winner is None:
            self._put(self._parent)
        elif winner is not self._active:
            self._put(self._branches.pop(winner.number))
        if winner is not None:
            progress.setting = dict(winner.setting)
        if progress.setting is not None:
            self._apply(progress.setting, only_own=True)
        progress.label = CONVERGING if winner and search.converged else "unstable"
        progress.num_searches += 1
        progress.fruitless = 0 if winner and winner.setting != before else progress.fruitless + 1
        progress.num_trials += len(search.trials)
        loader, wait = self._objects["loader"], max(self._plateau, 1)
        of_passes = PLATEAU_PASSES * len(loader) // wait if hasattr(loader, "__len__") else 0
        progress.trial_steps = max(search.trial_steps, FIRST_STEPS)
        progress.window_steps, progress.window, progress.means = max(progress.trial_steps, of_passes), [], []
        progress.most_trials = min(len(search.trials), search.most_trials)  # less the rival
        self.history += search.trials
        self._search = self._parent = self._active = None
        self._branches.clear()

    def _set_aside(self, live: set[int]) -> None:
        if self._active is not None and self._active.number in live:
            self._branches[self._active.number] = self._captured()

    def _captured(self) -> Branch:
        return Branch.of(self._objects, self._progress.place)

    def _put(self, branch: Branch | None) -> None:
        assert branch is not None
        self._progress.place = branch.put_back()

    def _apply(self, setting: Setting, *, only_own: bool = False) -> None:
        """Set the tunables; those of optimizers are part of a branch's state."""
        for name, value in setting.items():
            if not only_own or name in self._own_set:
                self._setters[name](value)

    def _ask_for_report(self) -> None:
        self._unreported += 1
        if self._patience is not None and self._unreported > self._patience:
            raise InputError(
                f"{self._patience} batches brought no metric. Call tuner.report(loss) in the loop, best in each step."
            )

    def _note(self, loss: float) -> None:
        """Note a loss of the run outside of trials."""
        progress = self._progress
        progress.window.append(loss)
        if progress.window_steps and len(progress.window) >= progress.window_steps:
            progress.means.append(sum(progress.window) / len(progress.window))
            progress.window = []

    def _on_plateau(self) -> bool:
        """Whether the loss has not fallen for `plateau` windows."""
        means, last = self._progress.means, self._plateau << self._progress.fruitless
        if not last or len(means) <= last:
            return False
        best, before = min(means[-last:]), min(means[:-last])
        return not best < before - (1 - FALL) * abs(before)

    def _written(self) -> dict[int, bytes]:
        """Return all branches that are not in force, by number; the parent is -1. They pass through the objects."""
        current = self._captured()
        found: dict[int, bytes] = {}
        for number, branch in [(-1, self._parent), *self._branches.items()]:
            self._put(branch)
            found[number] = packed(self._objects, self._progress.place)
        self._put(current)
        return found

    def _take_up(self, saved: Mapping[str, Any]) -> None:
        """Bring a saved search into force: its branches pass through the objects once."""
        self._progress = msgspec.json.decode(saved["progress"], type=TuningProgress)
        if "loader" in saved:
            self._objects["loader"].load_state_dict(saved["loader"])
        RngStates().load_state_dict(saved["generators"])
        if not saved["search"]:
            return
        kept = msgspec.json.decode(saved["search"], type=Searching)
        fields = {name: getattr(kept, name) for name in Searching.__struct_fields__}
        seed = self._seed + self._progress.num_searches
        self._search = Search(self._space, seed=seed, searcher=self._searcher, **fields)
        self._active = next((trial for trial in kept.trials if trial.number == saved["active"]), None)
        current = self._captured()
        for number, written in saved["branches"].items():
            self._progress.place = unpack(self._objects, written)
            if number < 0:
                self._parent = self._captured()
            else:
                self._branches[number] = self._captured()
        self._put(current)
        if self._active is not None:
            self._apply(self._active.setting, only_own=True)
        self._reported = True
        self._decide()
