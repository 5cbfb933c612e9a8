"""The state of a training job in memory: captured between steps, put back in place as often as needed.

Use it to try something and return: train some steps with one setting, put the
state back, train them with another. Tensors are written where they are, so
whoever refers to a parameter, a buffer or an optimizer's moment goes on
referring to it (graphs that were captured, DDP's buckets, other modules).

    objects = {"model": model, "optimizer": optimizer, "scaler": scaler, "loader": loader}
    state = TrainingState(objects)      # at the end of a step: gradients are no part of it
    ...                                 # train
    state.put_back()                    # parameters, buffers, moments, generators, positions as they were

>>> model = torch.nn.Linear(2, 2)
>>> state, weight = TrainingState({"model": model}), model.weight
>>> drawn = torch.rand(3)
>>> with torch.no_grad():
...     before, _ = weight.clone(), weight.zero_()
>>> state.put_back()
>>> bool((weight == before).all()), model.weight is weight, bool((torch.rand(3) == drawn).all())
(True, True, True)

The random number generators of this process as state: saved and restored with every checkpoint.

Torch's on the host and on each CUDA device, Python's and, where it is loaded,
numpy's global one. Generators of the script's own are state of their own. The
state is bytes without a pickle, so that nobody has to trust it.

>>> states = RngStates()
>>> before = states.state_dict()
>>> first = torch.rand(3), random.random()
>>> states.load_state_dict(before)
>>> bool((torch.rand(3) == first[0]).all()), random.random() == first[1]
(True, True)

The copy of a tensor into memory that is there already.

>>> slot = torch.zeros(3)
>>> copy_into(slot, torch.ones(3))
>>> slot.tolist()
[1.0, 1.0, 1.0]

One state from several copies of a job that trained apart, by the steps that each has done.

>>> consolidate([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], weights=[1, 3])["w"].tolist()
[0.75, 0.75]
"""

from __future__ import annotations

import copy
import gc
import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import msgspec
import torch

from headway.core.errors import FormatError, InputError
from headway.core.machine import native as streamed
from headway.core.machine.interruptions import pass_on
from headway.storage.digests import checksum
from headway.storage.manifest import GENERATORS

# The random number generators of this process as state: saved and restored with every checkpoint.

RNG_STATE = f"{GENERATORS}.state"
"""Name of the value in a checkpoint; of ranks beside the first with `@rank<r>` behind it."""


class _Numpy(msgspec.Struct, array_like=True):
    """numpy.random.get_state()."""

    name: str
    keys: bytes
    """[624] uint32."""
    place: int
    has_gauss: int
    gauss: float


class _State(msgspec.Struct):
    """All generators of a process."""

    torch: bytes
    cuda: list[bytes]
    """[devices]"""
    python_version: int
    python: list[int]
    python_gauss: float | None
    numpy: _Numpy | None = None
    branch: int = 0
    """Above 0: the generators are seeded anew, from all this and the number."""


def branched(state: bytes, rank: int) -> bytes:
    """Return the state for a rank (> 0) that the saving job did not have: a stream of its own, made of a saved one.

    >>> state = RngStates().state_dict()["state"]
    >>> drawn = []
    >>> for one in (state, branched(state, 3), branched(state, 4), branched(state, 3)):
    ...     RngStates().load_state_dict({"state": one})
    ...     drawn.append((torch.rand(1).item(), random.random()))
    >>> len(set(drawn)), drawn[1] == drawn[3]
    (3, True)
    """
    found = msgspec.msgpack.decode(state, type=_State)
    found.branch = rank
    return msgspec.msgpack.encode(found)


class RngStates:
    """The process's generators, as an object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, bytes]:
        """Return where the generators are."""
        version, words, gauss = random.getstate()
        cuda = [_bytes(state) for state in torch.cuda.get_rng_state_all()] if _is_on_cuda() else []
        state = _State(_bytes(torch.get_rng_state()), cuda, version, list(words), gauss, _numpy_state())
        return {"state": msgspec.msgpack.encode(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put them there again; those that the saving process did not have stay. Raises `FormatError`."""
        try:
            found = msgspec.msgpack.decode(state["state"], type=_State)
        except (KeyError, TypeError, msgspec.DecodeError) as cause:
            raise FormatError(
                f"this is no state of random number generators ({cause}). Restore another step."
            ) from cause
        torch.set_rng_state(_tensor(found.torch))
        if found.cuda and torch.cuda.is_available():
            for index, one in enumerate(found.cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_tensor(one), index)
        random.setstate((found.python_version, tuple(found.python), found.python_gauss))
        if found.numpy is not None:
            import numpy as np

            kept = found.numpy
            keys = np.frombuffer(kept.keys, np.uint32)
            np.random.set_state((kept.name, keys, kept.place, kept.has_gauss, kept.gauss))
        if found.branch:
            seed = int(checksum(bytes(state["state"])), 16) % (1 << 63)
            torch.manual_seed(seed)
            random.seed(seed)
            if found.numpy is not None:
                np.random.seed(seed % (1 << 32))


def _is_on_cuda() -> bool:
    """Whether this process uses CUDA: asking its generators would begin to."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def _numpy_state() -> _Numpy | None:
    """Return numpy's global generator, where the script has loaded numpy."""
    if "numpy.random" not in sys.modules:
        return None
    name, keys, place, has_gauss, gauss = sys.modules["numpy.random"].get_state()
    return _Numpy(name, keys.tobytes(), int(place), int(has_gauss), float(gauss))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


# The copy of a tensor into memory that is there already.

STREAMED_THREADS = 2
"""Up to so many intra-op threads, one that goes past the caches takes as long as torch's at their best: two cores
hardly copy faster than one. Where others want the cores torch's threads wait for each other, many times as long."""


def copy_into(slot: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the host, past the caches where the memory is equal and torch's threads are few: training needs them."""
    plain = type(source) is torch.Tensor and source.device.type == slot.device.type == "cpu" and not source.is_conj()
    if (
        plain and source.dtype == slot.dtype and source.shape == slot.shape and not source.is_neg()
        and source.is_contiguous() and slot.is_contiguous() and torch.get_num_threads() <= STREAMED_THREADS
    ):  # fmt: skip
        streamed.copy(slot.data_ptr(), source.data_ptr(), slot.numel() * slot.element_size())
    else:
        slot.copy_(source)  # torch's threads share the work


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A state dict, and the elements that its tensors had."""

    state: Any
    """The mappings, lists and values, copied; the tensors in it are the state's own."""

    elements: list[tuple[torch.Tensor, torch.Tensor]]
    """Each tensor, and a copy of it."""

    @classmethod
    def of(cls, state: Any, tensors: Iterable[torch.Tensor]) -> StateCopy:
        """Copy `state`, in which `tensors` are; what `copy.deepcopy` raises of a value is raised."""
        found = list(tensors)
        apart = copy.deepcopy(state, {id(tensor): tensor for tensor in found})
        return cls(apart, _elements(found))

    def write(self) -> Any:
        """Write the elements into the tensors again, and return the state itself: who changes it has used it up."""
        _write(self.elements)
        return self.state

    def put_back(self) -> Any:
        """Write the elements into the tensors again, and return the state with mappings and lists of its own."""
        _write(self.elements)
        return copy.deepcopy(self.state, {id(tensor): tensor for tensor, _ in self.elements})


def living(*kinds: type) -> list[Any]:
    """Return the objects of these kinds that are alive in this process, but for modules that are parts of others."""
    # By type: `isinstance` asks an object for its class, which wakes lazy ones.
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    modules = [thing for thing in alive if isinstance(thing, torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [thing for thing in alive if id(thing) not in inner]


class TrainingState:
    """The state of some objects and of the process's generators, when it was made.

    It takes as much memory as the tensors, on their devices.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Capture `objects`: name -> a module, an optimizer, or anything with `state_dict` and `load_state_dict`.

        Of a module also the buffers that its state dict leaves out. Raises
        `InputError` for an object of which there is no state, or none that can be copied.
        """
        self._modules: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._optimizers: list[_OptimizerCopy] = []
        self._others: dict[str, tuple[Any, StateCopy]] = {}
        for name, thing in objects.items():
            if isinstance(thing, torch.nn.Module):
                self._modules.append(_elements([*thing.parameters(), *thing.buffers()]))
            elif isinstance(thing, torch.optim.Optimizer):
                self._optimizers.append(_OptimizerCopy(thing))
            else:
                self._others[name] = (thing, _state_copy(name, thing))
        self._generators = RngStates().state_dict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies of tensors."""
        lists = [
            *self._modules,
            *(optimizer.elements for optimizer in self._optimizers),
            *(kept.elements for _, kept in self._others.values()),
        ]
        return sum(slot.nbytes for elements in lists for _, slot in elements)

    def put_back(self) -> None:
        """Give every object the state that it had. Raises `InputError` where one refuses; the others have theirs."""
        for elements in self._modules:
            _write(elements)
        for optimizer in self._optimizers:
            optimizer.put_back()
        refusal: InputError | None = None
        for name, (thing, kept) in self._others.items():
            try:
                thing.load_state_dict(kept.put_back())
            except Exception as cause:  # whatever the user's object raises
                pass_on(cause)
                refusal = InputError(f"'{name}' refuses the state that it had ({type(cause).__name__}: {cause}).")
                refusal.__cause__ = cause
        RngStates().load_state_dict(self._generators)  # last: a load_state_dict may draw
        if refusal is not None:
            raise refusal


class _OptimizerCopy:
    """An optimizer's groups and state; torch's own load_state_dict would replace the tensors instead."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        tensors = list(_tensors([_settings(optimizer), list(optimizer.state.values())]))
        # Parameters are keys of the state and shared with the module: they are no part of this copy.
        state = {id(parameter): values for parameter, values in optimizer.state.items()}
        self._kept = StateCopy.of({"groups": _settings(optimizer), "state": state}, tensors)
        self.elements = self._kept.elements

    def put_back(self) -> None:
        """Restore settings and state; what a parameter did not have yet is dropped."""
        kept, optimizer = self._kept.put_back(), self._optimizer
        # Groups that were added since keep their settings.
        for group, settings in zip(optimizer.param_groups, kept["groups"], strict=False):
            group.update(settings)
        for parameter in list(optimizer.state):
            if id(parameter) not in kept["state"]:
                del optimizer.state[parameter]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in kept["state"]:
                    optimizer.state[parameter] = kept["state"][id(parameter)]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group, without its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _state_copy(name: str, thing: Any) -> StateCopy:
    """Return a copy of the state of an object that has a state dict."""
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise InputError(
            f"'{name}' is a {type(thing).__name__}, which has no state_dict and load_state_dict. Pass an object that "
            "has both."
        )
    state = thing.state_dict()
    try:
        return StateCopy.of(state, _tensors(state))
    except Exception as cause:
        pass_on(cause)
        raise InputError(
            f"the state of '{name}' cannot be copied ({type(cause).__name__}: {cause}). Leave the object out."
        ) from cause


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested mappings, lists and tuples."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def _elements(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor once, with a copy of its elements."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor in tensors:
        if id(tensor) not in found:
            slot = torch.empty_like(tensor.detach())
            copy_into(slot, tensor.detach())
            found[id(tensor)] = (tensor, slot)
    return list(found.values())


def _write(elements: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write elements into their tensors, by torch: autograd then refuses a graph that has saved what they were."""
    with torch.no_grad():
        for tensor, kept in elements:
            tensor.copy_(kept)


# One state from the states of copies that trained apart, as local SGD and HadarE (arXiv 2503.10918) need it.
#
#     copy 0   w0, 30 steps  --.
#     copy 1   w1, 60 steps  ---+-->  w = (30 w0 + 60 w1 + 10 w2) / 100   -->  all copies go on from w
#     copy 2   w2, 10 steps  --'

COUNTERS = frozenset({"step"})
"""Keys whose scalars count although they are floating-point: Adam's and Adagrad's number of updates."""

AVERAGED_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})
"""Types of counters. Bytes, int8 and bool are flags, generators or codes: an average of them has no meaning."""


def consolidate(states: Sequence[Mapping[str, object]], weights: Sequence[float]) -> dict[str, object]:
    """Return the average of the state dicts of copies of one job, by weights > 0 (the steps that each copy has done).

    Mappings, lists and tuples are followed, so that a state may be a model's,
    an optimizer's, or a mapping of both. Averaged element by element in
    float64 and returned in the type and on the device of the first copy:
    parameters, momenta, Adam's second moments, running statistics of
    BatchNorm, learning rates. Counters (integers such as
    `num_batches_tracked`, and `step`) become the weighted mean, rounded.
    Whatever else there is must be equal in all copies. Elements that are equal in
    all copies stay as they are, bit for bit; one copy is returned as it is,
    in tensors of its own. A copy without steps is left out by the caller.
    Raises `InputError` that names the key where copies differ in keys,
    shapes, types or values without a mean, and for weights that are not above 0.
    """
    if not states or len(states) != len(weights):
        raise InputError(f"there are {len(states)} states and {len(weights)} weights. Pass one weight per state.")
    for index, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise InputError(f"the weight of copy {index} is {weight:g}. Leave out copies that did no step.")
    total = math.fsum(weights)
    with torch.no_grad():
        return cast("dict[str, object]", _average(list(states), [weight / total for weight in weights], ()))


def _average(values: list[Any], fractions: list[float], path: tuple[object, ...]) -> object:
    """Return the mean of what the copies have at `path`; fractions [copies] sum to 1."""
    first = values[0]
    for index, value in enumerate(values):
        if type(value) is not type(first) and not (_is_number(value) and _is_number(first)):
            _differ(path, index, f"is a {type(value).__name__}, not a {type(first).__name__} as in copy 0")
    if isinstance(first, torch.Tensor):
        return _average_tensor(values, fractions, path)
    if isinstance(first, Mapping):
        for index, value in enumerate(values):
            unlike = sorted(map(str, first.keys() ^ value.keys()))
            if unlike:
                lacks = index if any(str(key) == unlike[0] for key in first) else 0
                _differ((*path, unlike[0]), lacks, f"is missing; copy {index - lacks} has it")
        apart: Any = copy.copy(first)  # an OrderedDict stays one, with its versions of modules
        apart.update({key: _average([v[key] for v in values], fractions, (*path, key)) for key in first})
        return apart
    if isinstance(first, list | tuple):
        for index, value in enumerate(values):
            if len(value) != len(first):
                _differ(path, index, f"has {len(value)} entries, not {len(first)} as in copy 0")
        entries = [_average(list(column), fractions, (*path, i)) for i, column in enumerate(zip(*values, strict=True))]
        return entries if isinstance(first, list) else tuple(entries)
    index = next((index for index, value in enumerate(values[1:], 1) if value != first), 0)
    if not index:
        return copy.deepcopy(first)
    if not _is_number(first):
        _differ(path, index, f"is {str(values[index])[:40]!r}, not {str(first)[:40]!r} as in copy 0")
    mean = math.fsum(value * fraction for value, fraction in zip(values, fractions, strict=True))
    return round(mean) if all(isinstance(value, int) for value in values) else mean


def _average_tensor(values: list[torch.Tensor], fractions: list[float], path: tuple[object, ...]) -> torch.Tensor:
    first = values[0].detach()
    for index, value in enumerate(values):
        if value.shape != first.shape or value.dtype != first.dtype:
            names = [f"{str(copied.dtype).removeprefix('torch.')} {list(copied.shape)}" for copied in (value, first)]
            _differ(path, index, f"is {names[0]}, not {names[1]} as in copy 0")
    # x0 + sum of f_i (x_i - x0): no rounding where copies agree, and what is infinite in all of them (a mask) stays.
    wide = torch.complex128 if first.is_complex() else torch.float64
    base, result, same = first.to(wide), first.to(wide, copy=True), torch.ones_like(first, dtype=torch.bool)
    for index, (value, fraction) in enumerate(zip(values[1:], fractions[1:], strict=True), 1):
        copied = value.detach().to(first.device)
        equal = copied == first
        if not (first.is_floating_point() or first.is_complex() or first.dtype in AVERAGED_INTEGERS or equal.all()):
            _differ(path, index, f"holds other {str(first.dtype).removeprefix('torch.')} values than in copy 0")
        same &= equal
        result += fraction * (copied.to(wide) - base)
    if first.dtype in AVERAGED_INTEGERS or (path[-1] in COUNTERS and not first.dim() and not first.is_complex()):
        result.round_()
    return torch.where(same, first, result.to(first.dtype)) if len(values) > 1 else first.clone()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _differ(path: tuple[object, ...], index: int, how: str) -> NoReturn:
    key = ".".join(map(str, path)) or "state"
    raise InputError(
        f"'{key}' of copy {index} {how}. Consolidate copies of one model and one optimizer; leave out what differs."
    )
