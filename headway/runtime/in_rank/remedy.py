"""Apply the remedies of a plan inside a rank, or say why not.

A remedy is a function `apply(parameters, context) -> Applied | RefusedRemedy` in a
room's `runtime`. The plan names remedies, the launcher says where the record
of each name lies (`headway.core.remedies`); nothing here knows a room. A
remedy that lacks its grant is refused, one that raises is refused with its
message, and one that fails later, in a function that it has replaced, is
undone (`guard`): a plan can leave a job slower than promised, never broken.

>>> RefusedRemedy("data.cache", "the dataset draws random numbers").json()["reason_not_applied"]
'the dataset draws random numbers'
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import InputError
from headway.core.files.planfile import Remedy, read_plan
from headway.core.machine.interruptions import pass_on
from headway.core.remedies import record_at
from headway.core.tables import pick, resolved
from headway.runtime.calls.patches import Undo, replace_attribute
from headway.runtime.in_rank.guard import Passing, Restoring, guarded
from headway.runtime.recorder.probes import CallFn, Probes, write_json


@dataclass(frozen=True, slots=True)
class Applied:
    """A remedy that is in effect."""

    name: str
    """Name of the remedy, such as 'comm.bucket'."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """What it did, for the report. A remedy may keep the mapping and fill it in while the job runs."""

    def json(self) -> dict[str, object]:
        """Return the entry of RUN/applied."""
        return {"name": self.name, "applied": True, "facts": dict(self.facts), "reason_not_applied": None}


@dataclass(frozen=True, slots=True)
class RefusedRemedy:
    """A remedy that cannot be applied to this script."""

    name: str
    """Name of the remedy."""

    reason: str
    """Why not: value, rule."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was found, for the plans that are made from this run."""

    def json(self) -> dict[str, object]:
        """Return the entry of RUN/applied."""
        return {"name": self.name, "applied": False, "facts": dict(self.facts), "reason_not_applied": self.reason}


@dataclass(slots=True)
class Context:
    """What a remedy gets to work with."""

    probes: Probes
    """The recording of this process: `probes.listeners` (see `Probes.wake`) for what happens at steps."""

    allow: str = ""
    """What the user allowed besides changes that keep every result: '' or 'result-equivalent'."""

    verify: str = ""
    """Which batches under a remedy are compared with the script's own: 'some', within a share of the time; 'all' that
    are due (`headway run --verify`); '' for none (`--no-verify`)."""

    step_s: float | None = None
    """Seconds of an optimizer step in the run that the plan was made from; None = unknown."""

    shared: dict[str, Any] = field(default_factory=dict)
    """What the remedies of a plan have together, by name."""

    undos: list[Undo] = field(default_factory=list)
    """Undos of what the remedy patched, in order."""

    outcomes: list[Applied | RefusedRemedy] = field(default_factory=list)
    """Outcomes so far, of all remedies of the plan."""

    remedy: str = ""
    """Name of the remedy that is being applied."""

    in_force: dict[str, list[Undo]] = field(default_factory=dict)
    """Name of a remedy that was applied -> its undos, in order."""

    failed: dict[str, RefusedRemedy] = field(default_factory=dict)
    """Name of a remedy that failed later -> what is said of it from then on."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.probes.recorder.rank

    @property
    def run(self) -> str:
        """Run folder."""
        return self.probes.run

    def patch(
        self, target: str, wrapper: Callable[[Any], Any], *, restoring: Restoring | None = None, passing: Passing = ()
    ) -> Undo:
        """Replace 'module:path' by `wrapper(original)`; undone with the remedy, or by the function returned.

        Where the replacement fails, the remedy is undone and the original called: see `guarded`, also for the rest.
        """
        undo = replace_attribute(target, self.guarded(wrapper, restoring, passing))
        self.undos.append(undo)
        return undo

    def around_forward(self, wrapper: Callable[[CallFn], CallFn]) -> Undo:
        """Make the outermost calls of modules by `wrapper(inner)`, on the thread that trains; undone with the remedy.

        Where the replacement fails, the remedy is undone and `inner` is called.
        """
        undo = self.probes.outer_call.add(self.guarded(wrapper))
        self.undos.append(undo)
        return undo

    def guarded(
        self, wrapper: Callable[[Any], Any], restoring: Restoring | None = None, passing: Passing = ()
    ) -> Callable[[Any], Any]:
        """Return `wrapper` with a guard: should it fail, the remedy that is being applied now is undone."""
        name = self.remedy

        def failed(cause: BaseException, first: bool) -> None:
            when = "failed while it was set up" if first else "failed in use, and was undone"
            self.fail(name, f"{when}: {type(cause).__name__}: {cause}")

        return guarded(wrapper, failed, lambda: name in self.failed, restoring, passing)

    def hook(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return `function` as a hook of torch's: should it fail, the remedy that is being applied now is undone."""
        hooked: Callable[..., None] = self.guarded(lambda _: function)(_nothing)
        return hooked

    def fail(self, name: str, reason: str) -> None:
        """Undo a remedy that has failed while the script runs, and say why; only the first time. Raises nothing."""
        if name in self.failed:
            return
        self.failed[name] = RefusedRemedy(name, reason)
        self.take_back(name)
        self.note(self.failed[name])

    def take_back(self, name: str) -> None:
        """Undo a remedy, the newest change first; does nothing where it is not in force. Raises nothing."""
        for undo in reversed(self.in_force.pop(name, [])):
            try:
                undo()
            except Exception as cause:
                self.probes.failed(f"undoing {name}", cause)

    def listen(self, listener: Callable[[int], int]) -> Undo:
        """Call `listener(optimizer)` at the next optimizer step; it returns the number of steps until its next call."""
        self.probes.listeners.append(listener)
        self.probes.due[0] = 0

        def undo() -> None:
            """Call it no more."""
            if listener in self.probes.listeners:
                self.probes.listeners.remove(listener)

        self.undos.append(undo)
        return undo

    def note(self, outcome: Applied | RefusedRemedy) -> None:
        """Replace the outcome of a remedy, when it is known better later, and write RUN/applied again."""
        outcome = self.failed.get(outcome.name, outcome)
        self.outcomes[:] = [old for old in self.outcomes if old.name != outcome.name] + [outcome]
        self.write()

    def write(self) -> None:
        """Write RUN/applied/r<rank>.json; only ranks do. A full disk is one warning: remedies write while jobs run."""
        if not self.probes.leads:
            return
        try:
            content = {"rank": self.rank, "remedies": [outcome.json() for outcome in self.outcomes]}
            write_json(f"{self.run}/applied/r{self.rank}.json", content)
        except (OSError, TypeError, ValueError) as cause:
            self.probes.failed("applied file", cause)


def _nothing(*_: Any) -> None:
    """What is called in the place of a hook that has failed."""


def on_scaled_loss(context: Context, act: Callable[[], None]) -> None:
    """Call `act` before a loss is scaled (GradScaler): what `backward` begins from then is not the loss."""

    def scaling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            """Scale, and say so."""
            if scaler.is_enabled():
                act()
            return original(scaler, outputs)

        return scale

    context.patch("torch.amp.grad_scaler:GradScaler.scale", scaling)


def apply_plan(probes: Probes, environ: Mapping[str, str]) -> list[Undo]:
    """Apply the plan that HEADWAY_PLAN names; returns the undos. Writes RUN/applied/r<rank>.json."""
    path = environ.get("HEADWAY_PLAN", "")
    if not path:
        return []
    context = Context(probes, verify=environ.get("HEADWAY_VERIFY", ""))
    probes.context = context
    try:
        table = json.loads(environ.get("HEADWAY_REMEDIES") or "{}")
        plan = read_plan(path)
        remedies, context.step_s = plan.remedies, plan.step_s
    except Exception as cause:
        probes.failed(f"plan {path}", cause)
        return []
    for remedy in remedies:
        outcome = apply_one(remedy, table, context)
        context.outcomes[:] = [old for old in context.outcomes if old.name != remedy.name] + [outcome]
    context.write()
    return context.undos


def apply_one(remedy: Remedy, table: Mapping[str, str], context: Context) -> Applied | RefusedRemedy:
    """Apply one remedy; whatever goes wrong becomes a `RefusedRemedy`, and what it had patched is put back."""
    done = len(context.undos)
    outcome: Applied | RefusedRemedy
    try:
        record = record_at(pick(table, remedy.name, "remedy"), remedy.name)
        context.allow, context.remedy = remedy.allow or "", remedy.name
        parameters = record.read(remedy.parameters)
        rivals = [one.name for one in context.outcomes if isinstance(one, Applied) and one.name in record.conflicts]
        found: object
        if rivals:
            found = RefusedRemedy(remedy.name, f"it cannot be applied beside {rivals[0]}, which the plan has before it")
        elif record.allow not in (None, context.allow):
            found = RefusedRemedy(remedy.name, record.asks)
        else:
            found = resolved(str(record.apply))(parameters, context)
        if not isinstance(found, (Applied, RefusedRemedy)):
            raise InputError(
                f"{remedy.name} returned {found!r}; a remedy returns Applied or RefusedRemedy. Report this."
            )
        outcome = found
    except Exception as cause:
        pass_on(cause)
        outcome = RefusedRemedy(remedy.name, f"{type(cause).__name__}: {cause}")
    outcome = context.failed.get(remedy.name, outcome)  # a function that it has replaced may have been called already
    if isinstance(outcome, RefusedRemedy):
        for undo in reversed(context.undos[done:]):
            undo()
        del context.undos[done:]
    context.in_force[remedy.name] = context.undos[done:]
    return outcome
