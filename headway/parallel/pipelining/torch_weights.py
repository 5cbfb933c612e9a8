"""The weights of one stage in the versions that are in use, their gradients, and the optimizer that makes the next one.

A version is a dict of leaf tensors, and a forward runs the module on one of
them (`torch.func.functional_call`). Two shorter ways are wrong:

    an optimizer's step in place between a forward and its backward     autograd refuses: what it saved has changed
    other data for the same parameters (`p.data = ...`)                 autograd sees nothing: gradients of the inputs
                                                                        of LayerNorm and Conv are of other weights

The newest version lies in the memory of the module's parameters. When an
update comes and somebody still reads that version, the parameters move to
other memory first, and the leaves keep the old one:

    parameters   |  memory A  |          | memory B = copy of A, updated in place |
    leaves       version 3: A            version 3: A, version 4: B

So versions cost what the schedule needs and no copy more; a stage that reads
only the newest one runs its module as it is, and updates in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from headway.core.errors import BackgroundError, InputError
from headway.parallel.pipelining.torch_cut import ModelStage

OptimizerFn = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer over the parameters of a stage."""

Leaves = dict[str, torch.Tensor]
"""Name of a parameter in its module -> leaf tensor."""


class StageWeights:
    """Parameters of one stage, which a program reads by version."""

    def __init__(self, stage: ModelStage, optimizer: OptimizerFn, *, stashes: bool) -> None:
        """Make the optimizer; `stashes` says whether the program reads other versions than the newest.

        Raises `InputError` where `optimizer` is no function, or steps other parameters than it was given.
        """
        self.stage, self.stashes = stage, stashes
        self.parameters = {
            name: parameter for name, parameter in stage.module.named_parameters() if parameter.requires_grad
        }
        self.optimizer = _made(optimizer, list(self.parameters.values()))
        self.newest = 0
        """Number of the newest version."""
        self.versions: dict[int, Leaves] = {}
        """Number -> leaves, of every version that is in use."""
        self.most_versions = 1
        """The most of them at once so far."""
        self._gradients: Leaves = {}
        self._added = 0
        self._marks: dict[str, int] = {}
        self._is_tried = False
        self.restart(stashes=stashes)

    def restart(self, *, stashes: bool | None = None, previous: Leaves | None = None) -> None:
        """Begin anew from the parameters as they are: version 0, and -1 where `previous` weights are known."""
        self.stashes = self.stashes if stashes is None else stashes
        self.newest, self.versions = 0, {0: self._leaves()}
        if previous is not None and self.stashes:
            self.versions[-1] = previous
        self._mark()

    def renew(self) -> None:
        """Take the parameters as the caller has left them: nothing is in flight."""
        if self._changed():
            self.versions[self.newest] = self._leaves()
            self._mark()

    def number(self, version: int) -> int:
        """Return the version to read: the one before the first is the first, unless it is known."""
        return version if version in self.versions or version >= 0 else 0

    def run(self, version: int, arguments: Sequence[torch.Tensor]) -> object:
        """Run the module on a version. Raises `InputError` where somebody else has changed the parameters in place."""
        if not self.stashes:
            return self.stage.module(*arguments)
        changed = self._changed()
        if changed:
            raise InputError(
                f"{self.stage.prefix}{changed} was changed in place while {len(self.versions)} versions of it are in "
                "use. Change weights by the function that was given as optimizer=, or after runner.flush()."
            )
        return torch.func.functional_call(self.stage.module, self.versions[version], tuple(arguments))

    @contextmanager
    def collecting(self, version: int, *, counts: bool = True) -> Iterator[list[torch.Tensor]]:
        """Let a backward add its gradients to those since the last update; yields the leaves that get them.

        Raises `InputError` where the module has read its weights past `functional_call`.
        """
        if not self._added and not self._gradients:
            for parameter in self.parameters.values():
                parameter.grad = None
        leaves = self.versions[version] if self.stashes else dict[str, torch.Tensor](self.parameters)
        for name, leaf in leaves.items():
            leaf.grad = self._gradients.get(name)
        yield list(leaves.values())
        self._gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        self._added += counts
        if not self.stashes:
            return
        for leaf in leaves.values():
            leaf.grad = None
        past = (
            []
            if self._is_tried
            else [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        )
        self._is_tried = True
        if past:
            raise InputError(
                f"the module reads {self.stage.prefix}{past[0]} past its attributes (nn.LSTM and nn.GRU do), so that "
                "it cannot run on another version of it. Take a schedule with a flush, such as 1f1b."
            )

    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of a parameter so far; zero where there is none."""
        gradients = self._gradients.get(name)
        return torch.zeros_like(self.parameters[name]) if gradients is None else gradients

    def set_gradient(self, name: str, value: torch.Tensor) -> None:
        """Replace it."""
        self._gradients[name] = value

    def sum_gradients(self, add_up: Callable[[torch.Tensor], None], num_microbatches: int) -> None:
        """Sum the gradients since the last update over the ranks of this stage, by `add_up` in place.

        Raises `BackgroundError` where all of them together have not computed each micro-batch of a step once.
        """
        count = torch.tensor([self._added], dtype=torch.int64)
        add_up(count)
        if int(count) != num_microbatches:
            raise BackgroundError(
                f"the ranks of {self.stage.prefix or 'a stage'} have computed {int(count)} micro-batches of a step of "
                f"{num_microbatches}; each must be computed once. Report this schedule."
            )
        # One message per type. A parameter that no micro-batch of this rank has reached may have a gradient elsewhere.
        by_type: dict[torch.dtype, list[str]] = {}
        for name, parameter in self.parameters.items():
            by_type.setdefault(parameter.dtype, []).append(name)
        for names in by_type.values():
            used = torch.tensor([name in self._gradients for name in names], dtype=torch.int64)
            flat = torch.cat([self.gradient(name).flatten() for name in names])
            add_up(used)
            add_up(flat)
            sums = torch.split(flat, [self.parameters[name].numel() for name in names])
            for name, times, gradient in zip(names, used.tolist(), sums, strict=True):
                if times:
                    self._gradients[name] = gradient.view_as(self.parameters[name])
        self._added = int(count)

    def discard(self) -> None:
        """Drop the gradients since the last update."""
        self._gradients, self._added = {}, 0

    def update(self, version: int, keep: Iterable[int], at_least: int) -> None:
        """Step the optimizer with the mean gradient; make `version`, drop what is neither in `keep` nor `at_least`."""
        for name, parameter in self.parameters.items():
            gradient = self._gradients.get(name)
            # In place: nobody else has it. As torch's schedules do, the sum is divided once.
            parameter.grad = gradient if gradient is None or self._added == 1 else gradient.div_(self._added)
        self._gradients, self._added = {}, 0
        self.drop(keep, at_least)
        if self.stashes and self.newest in self.versions:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
        self.optimizer.step()
        self.newest = version
        self.versions[version] = self._leaves()
        self.most_versions = max(self.most_versions, len(self.versions))
        self._mark()

    def drop(self, keep: Iterable[int], at_least: int) -> None:
        """Drop the versions that no forward in flight has read (`keep`) and none will read (from `at_least` on)."""
        in_use = set(keep)
        self.versions = {
            number: parameter for number, parameter in self.versions.items() if number in in_use or number >= at_least
        }

    def _leaves(self) -> Leaves:
        # `.data` shares the memory, not the counter of changes: an update of other memory leaves these leaves alone.
        if not self.stashes:
            return {}
        return {name: parameter.data.requires_grad_() for name, parameter in self.parameters.items()}

    def _mark(self) -> None:
        self._marks = {name: parameter._version for name, parameter in self.parameters.items()}

    def _changed(self) -> str:
        """Return the name of a parameter that has changed since the last update, '' where none has."""
        marks = self._marks
        return next((name for name, parameter in self.parameters.items() if parameter._version != marks[name]), "")


def _made(function: OptimizerFn, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Call the function that makes an optimizer, and look at what it made."""
    if isinstance(function, torch.optim.Optimizer) or not callable(function):
        raise InputError(
            f"optimizer is a {type(function).__name__}; one that exists already would step the weights in place while "
            "micro-batches read them. Give a function: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=.1)."
        )
    made = function(parameters) if parameters else torch.optim.SGD([torch.zeros(0)], lr=0.0)
    groups = getattr(made, "param_groups", None)
    if not callable(getattr(made, "step", None)) or groups is None:
        raise InputError(f"the function given as optimizer returns a {type(made).__name__}. Return a torch optimizer.")
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    if parameters and stepped != {id(parameter) for parameter in parameters}:
        raise InputError(
            "the function given as optimizer returns one over other parameters than it got, and would step weights in "
            "place that micro-batches read. Build it over its argument."
        )
    return made


# An optimizer's state under the names of the whole model, so that it goes where the parameters go.


def optimizer_state(weights: Iterable[StageWeights]) -> dict[str, dict[str, torch.Tensor]]:
    """Return name of a parameter -> its state, its group's numbers (`group.lr`), and the weights before the newest.

    All values are tensors, because tensors can be restored on another number of ranks.
    """
    state: dict[str, dict[str, torch.Tensor]] = {}
    for stage_weights in weights:
        groups = {
            id(parameter): group for group in stage_weights.optimizer.param_groups for parameter in group["params"]
        }
        previous = stage_weights.versions.get(stage_weights.newest - 1, {})
        for name, parameter in stage_weights.parameters.items():
            values = {
                key: torch.as_tensor(value) for key, value in stage_weights.optimizer.state.get(parameter, {}).items()
            }
            for key, value in groups[id(parameter)].items():
                if isinstance(value, int | float):
                    values[f"group.{key}"] = torch.tensor(float(value), dtype=torch.float64)
            if name in previous:
                values["previous"] = previous[name].detach()
            state[stage_weights.stage.prefix + name] = values
    return state


def load_optimizer_state(weights: Iterable[StageWeights], state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Put back what `optimizer_state` returned; names of other stages are passed over."""
    for stage_weights in weights:
        previous: Leaves = {}
        for group in stage_weights.optimizer.param_groups:
            for parameter in group["params"]:
                name = next(
                    (name for name, candidate in stage_weights.parameters.items() if candidate is parameter), None
                )
                values = state.get(stage_weights.stage.prefix + name, {}) if name is not None else {}
                for key, value in values.items():
                    head, _, setting = key.partition(".")
                    if head == "group":
                        group[setting] = type(group[setting])(value.item())
                    elif key == "previous":
                        previous[str(name)] = value.detach().clone().requires_grad_()
                    else:
                        current = stage_weights.optimizer.state[parameter].get(key)
                        plain = current is not None and not isinstance(current, torch.Tensor)
                        stage_weights.optimizer.state[parameter][key] = (
                            type(current)(value.item()) if plain else value.clone()
                        )
        stage_weights.restart(previous=previous or None)
