"""Gradients that nobody uses, and what models compute again: watched for a few dozen backwards, once.

A gradient is unused where the backward that computed it fed an update of other parameters, while this one was cleared
before any update, or belongs to no optimizer at all, and its parameter stayed what it was:

    D(x), D(G(z).detach()) -> backward -> update of D        gradients of D are used
    D(G(z))                -> backward -> update of G        those of G are used, those of D are cleared: unused
    head(backbone(x))      -> backward -> update of head     those of the backbone are unused each time

Scripts that use gradients themselves are left alone: they clear them without an update of other parameters, set
gradients of their own before an update, change the parameters, hook them, or step an optimizer within the backward.
Only who reads `p.grad` and does nothing else cannot be told.

One parameter stands for all of a model that the same optimizer updates: the smallest. Values are read in the host's
memory, by no operator of torch's and no method that the script could see; on a device none is read.

A call is repeated where a model is called on all that its last gradients came of, and is called on something else
before the next backward.

    model(x) -> loss -> backward -> update -> model(x).argmax() -> model(next x)

A module without trainable parameters, in evaluation mode, on tensors of a batch computes in each pass what it computed
in the one before: `frozen`, as long as its parameters stay what they are.

>>> GradientUses().on
[False]
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypedDict, TypeGuard

from headway.core.machine.interruptions import pass_on
from headway.runtime.script.compute_facts import parameters_of, unseen

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

FROM, MOST = 16, 64
"""Updates before the watch, when all optimizers have stepped, and backwards that it takes."""

LATER = 1 << 40
"""Updates until a listener is called again that has nothing more to do."""

MOST_PADDED = 16
"""Calls with gradients in whose arguments padding is looked for."""

LARGEST = 1 << 20
"""Bytes of a parameter that is compared with what it was."""

MOST_COMPARED = 32
"""Parameters without an optimizer that are compared at the end of the watch."""

Row = dict[str, int]

Value = tuple[int, bytes | None]
"""The version of a parameter, and its numbers where they may be read."""

Input = tuple[Callable[[], object], int]
"""Returns a tensor that a model was called on, with its version; of anything else its `id`."""


class FrozenRow(TypedDict):
    """Calls of a module without trainable parameters, and ns that they took."""

    name: str
    ns: int
    calls: int


P = ParamSpec("P")


def _unseen(
    look: Callable[Concatenate[GradientUses, P], None],
) -> Callable[Concatenate[GradientUses, P], None]:
    """Read tensors as `unseen` does; what cannot be read, a tensor of `torch.inference_mode` say, ends the watch."""
    reads = unseen(look)

    @functools.wraps(look)
    def called(self: GradientUses, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            reads(self, *args, **kwargs)
        except Exception as cause:
            pass_on(cause)
            self.on[0] = False

    return called


@dataclass(slots=True)
class _Group:
    """The parameters of a model that one optimizer updates, or none (-1)."""

    row: Row
    optimizer: int
    parameter: Callable[[], Parameter | None]
    """Returns the smallest of them, None once it is gone."""
    pending: list[int] = field(default_factory=lambda: [0, 0])
    """[2] Calls whose gradients no update has used yet; those of them whose inputs needed gradients."""
    is_fresh: bool = False
    """Whether the newest backward gave it gradients."""
    fed_others: bool = False
    """Whether a backward that gave it gradients fed an update of other parameters."""
    before: tuple[int, int] = (0, 0)
    """The gradient and its version when the backward began."""
    value: Value = (-1, None)
    """The parameter as it was when that backward had ended."""
    gradient: Callable[[], object] = object
    """Returns the gradient that the newest backward left, None once it is gone."""
    is_by_hand: bool = False
    """Whether the script uses the gradients in its own way."""
    first: list[tuple[Callable[[], Parameter | None], Value]] = field(default_factory=list)
    """Where no optimizer has them: the largest parameters, and what they were when the watch began."""


@dataclass(slots=True)
class _Frozen:
    """A module without trainable parameters that was called on tensors of a batch."""

    row: FrozenRow
    parameter: Callable[[], Parameter | None]
    """Returns the smallest one."""
    value: Value
    """As it was at the first call."""


class GradientUses:
    """Watches the gradients of all models during `MOST` backwards. The one-element list is bound by the probes."""

    def __init__(self) -> None:
        self.on = [False]
        """[1] Whether backwards, updates and calls are to be told."""
        self.optimizers: dict[int, Callable[[], Optimizer | None]] = {}
        """Number of an optimizer -> returns it, None once it is gone."""
        self._groups: list[_Group] = []
        self._backwards = 0
        self._calls: dict[int, list[int]] = {}
        self._inputs: dict[int, tuple[list[Input], list[bool], list[int]]] = {}
        """Model -> what it was called on last, whether a backward came behind that, and ns of repeats."""
        self._compute: dict[str, object] = {}
        self._is_inside = False
        self._repeats: Row = {}
        self._padding: list[float] = []
        self._since_ns = 0
        self._batch: list[Callable[[], Tensor | None]] = []
        self._frozen: dict[int, _Frozen] = {}
        self._rows: list[FrozenRow] = []

    def listener(
        self, modules: Callable[[], Iterable[tuple[int, Module]]], compute: Callable[[], dict[str, object]]
    ) -> Callable[[int], int]:
        """Return what begins the watch when it is called at its step (`Probes.wake`).

        `modules` returns (model, module) of what was called, `compute` the table that gets the rows.
        """
        update = 1

        def gradient_uses(_: int) -> int:
            nonlocal update
            if update == 1:
                update = FROM
                return FROM - 1
            if update == FROM:
                self._begin(modules(), compute())
            else:
                self._join()
            update *= 2
            return update // 2 if self._groups else LATER

        return gradient_uses

    def _owners(self) -> dict[int, int]:
        """Return `id` of a parameter -> number of the optimizer that has it."""
        return {
            id(parameter): index
            for index, reference in self.optimizers.items()
            for group in getattr(reference(), "param_groups", ())
            for parameter in group["params"]
        }

    @_unseen
    def _begin(self, modules: Iterable[tuple[int, Module]], compute: dict[str, object]) -> None:
        torch = sys.modules["torch"]
        owners, plain, numel = self._owners(), torch.nn.Parameter, torch.Tensor.numel
        members: dict[tuple[int, int], dict[int, Parameter]] = {}
        for model, module in modules:
            for parameter in parameters_of(module):
                if type(parameter) is plain and parameter.requires_grad and parameter.is_leaf:
                    members.setdefault((model, owners.get(id(parameter), -1)), {})[id(parameter)] = parameter
        for (model, index), parameters in members.items():
            by_size = sorted(parameters.values(), key=lambda parameter: (parameter.grad is None, numel(parameter)))
            elements = sum(map(numel, by_size))
            row = {"model": model, "optimizer": index, "elements": elements, "calls": 0, "unused": 0, "given": 0}
            group = _Group(row, index, weakref.ref(by_size[0]))
            group.is_by_hand = any(map(_is_hooked, by_size))
            if index < 0:
                readable = [value for value in by_size if value.nbytes <= LARGEST] or by_size
                group.first = [(weakref.ref(value), _value(value)) for value in readable[-MOST_COMPARED:]]
            self._groups.append(group)
        self._repeats = dict.fromkeys(("calls", "repeated", "repeated_ns", "learning", "same", "watched_ns"), 0)
        self._since_ns, self._compute = time.perf_counter_ns(), compute
        compute["padding"] = self._padding
        self.on[0] = bool(self._groups)

    @_unseen
    def _join(self) -> None:
        """Leave parameters alone that an optimizer has got since: they were frozen too late, or learn from now on."""
        owners = self._owners()
        for group in self._groups:
            if group.optimizer < 0 and any(id(parameter()) in owners for parameter, _ in group.first):
                group.row.update(unused=0, given=0)
                group.is_by_hand = True

    def _end(self) -> None:
        """Say what was seen, of parameters that stayed what they were where no optimizer has them."""
        self.on[0] = False
        for group in self._groups:
            changed = not all(_is_same(parameter(), value) for parameter, value in group.first)
            if group.is_by_hand or changed:
                group.row.update(unused=0, given=0)
            # Their numbers are not needed any more.
            group.first = [(parameter, (-1, None)) for parameter, _ in group.first]
        self._compute["gradient_uses"] = [group.row for group in self._groups]
        self._compute["repeats"], self._compute["frozen"] = self._repeats, self._rows

    @_unseen
    def took(self, batch: object) -> None:
        """Note the tensors of the newest batch: of a list, tuple or dict those that lie in it."""
        values: Iterable[object] = [batch]
        if type(batch) in (list, tuple) and isinstance(batch, (list, tuple)):
            values = batch
        elif type(batch) is dict and isinstance(batch, dict):
            values = batch.values()
        self._batch = [weakref.ref(value) for value in values if is_tensor(value)]

    @_unseen
    def called(self, module: Module, model: int, arguments: Sequence[object], duration_ns: int, learns: bool) -> None:
        """Note a call of a model that took `duration_ns`, and whether it was made with gradients enabled."""
        tensors: list[Tensor] = [value for value in arguments if is_tensor(value)]
        if model < 0:
            self._called_frozen(module, tensors, duration_ns)
            return
        if learns:
            calls = self._calls.setdefault(model, [0, 0])
            calls[0] += 1
            calls[1] += any(value.requires_grad for value in tensors)
            if len(self._padding) < MOST_PADDED:
                self._padding.append(_padding_share(tensors))
        if not tensors:
            return
        self._repeats["calls"] += 1
        self._repeats["learning"] += learns
        newest = self._inputs.get(model)
        if newest is not None and len(newest[0]) == len(arguments) and all(map(_is_given, newest[0], arguments)):
            self._repeats["same"] += learns
            if newest[1][0]:
                newest[2].append(duration_ns)
            return
        if newest is not None:
            self._repeats["repeated"] += len(newest[2])
            self._repeats["repeated_ns"] += sum(newest[2])
        given: list[Input] = [(weakref.ref(value), value._version) if is_tensor(value) else (object, id(value))
                 for value in arguments]  # fmt: skip
        self._inputs[model] = given, [False], []

    def _called_frozen(self, module: Module, tensors: list[Tensor], duration_ns: int) -> None:
        of_batch = [value for value in tensors if any(value is reference() for reference in self._batch)]
        if module.training or not tensors or len(of_batch) < len(tensors):
            return
        parameter = min(parameters_of(module), key=sys.modules["torch"].numel, default=None)
        if parameter is None:
            return
        frozen = self._frozen.get(id(module))
        if frozen is None:
            value = _value(parameter)
            if value[1] is None:
                return  # an average of a trained model would be changed without another version
            row: FrozenRow = {"name": type(module).__name__, "ns": 0, "calls": 0}
            frozen = self._frozen[id(module)] = _Frozen(row, weakref.ref(parameter), value)
            self._rows.append(row)
        if frozen.parameter() is not parameter or not _is_same(parameter, frozen.value):
            self._rows[:] = [row for row in self._rows if row is not frozen.row]
        frozen.row["ns"] += duration_ns
        frozen.row["calls"] += 1

    @_unseen
    def began(self) -> None:
        """Look at the gradients when a backward begins: what was cleared since the last one nobody has used."""
        self._is_inside = True
        self.differentiated()
        for group in self._groups:
            parameter = group.parameter()
            if parameter is None:
                continue
            if group.pending[0] and (group.optimizer < 0 or _is_cleared(parameter)):
                if group.fed_others and _is_same(parameter, group.value):
                    group.row["unused"] += group.pending[0]
                    group.row["given"] += group.pending[1]
                group.pending, group.fed_others = [0, 0], False
            group.before = _signature(parameter.grad)

    @_unseen
    def ended(self) -> None:
        """Note which parameters that backward gave gradients."""
        reached, self._is_inside = set[int](), False
        for group in self._groups:
            parameter = group.parameter()
            if parameter is None:
                continue
            group.is_fresh = parameter.grad is not None and _signature(parameter.grad) != group.before
            if group.is_fresh:
                model, group.value, group.gradient = group.row["model"], _value(parameter), weakref.ref(parameter.grad)
                reached.add(model)
                count, given = self._calls.get(model, (0, 0))
                group.row["calls"] += count
                group.pending = [group.pending[0] + count, group.pending[1] + given]
        for model in reached:
            self._calls.pop(model, None)
        for newest in self._inputs.values():
            newest[1][0] = True
        self._repeats["watched_ns"] = time.perf_counter_ns() - self._since_ns
        self._backwards += 1
        if self._backwards >= MOST:
            self._end()

    def differentiated(self) -> None:
        """Note that gradients are computed: something may learn from the calls so far."""
        for _, _, repeats in self._inputs.values():
            repeats.clear()

    @_unseen
    def updated(self, optimizer: int) -> None:
        """Note an update: it has used what its parameters had, and was fed by the newest backward if that gave any."""
        if self._is_inside:  # an optimizer that steps in a hook of the backward
            self.on[0] = False
        feeds = any(group.is_fresh and group.optimizer == optimizer for group in self._groups)
        for group in self._groups:
            if group.optimizer == optimizer:
                group.pending, group.fed_others = [0, 0], False
                parameter = group.parameter()
                if parameter is not None and parameter.grad is not None and parameter.grad is not group.gradient():
                    group.is_by_hand = True  # a gradient that the script has set
            elif group.is_fresh and feeds:
                group.fed_others = True


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether an object is a plain tensor, of which no method of the script's is asked."""
    torch = sys.modules["torch"]
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _is_given(before: Input, value: object) -> bool:
    """Whether an argument is what it was in an earlier call."""
    return before[0]() is value and value._version == before[1] if is_tensor(value) else before[1] == id(value)


def _value(parameter: Parameter) -> Value:
    return parameter._version, _bytes(parameter)


def _signature(gradient: Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _is_cleared(parameter: Parameter) -> bool:
    """Whether a parameter has no gradient, or one of zeros that may be read."""
    if parameter.grad is None:
        return True
    numbers = _bytes(parameter.grad)
    return numbers is not None and numbers.count(0) == len(numbers)


def _bytes(value: Tensor) -> bytes | None:
    """Return the numbers of a tensor as they lie in memory; None where they lie elsewhere, or are too many."""
    from headway.runtime.script.batches import tensor_memory  # it loads numpy, which few processes need

    return tensor_memory(value) if value.nbytes <= LARGEST else None


def _padding_share(tensors: list[Tensor]) -> float:
    from headway.runtime.script.batches import padding_share  # the same

    return padding_share(tensors)


def _is_hooked(parameter: Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _is_same(parameter: Parameter | None, before: Value) -> bool:
    """Whether a parameter is what it was: an update by hand would have changed it."""
    if parameter is None:
        return False
    return parameter._version == before[0] and (before[1] is None or before[1] == _bytes(parameter))
