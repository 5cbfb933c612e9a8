"""What a module says about itself: width, layers, heads, the kind of its norms, tied weights.

Two operations on one axis of a weight: repeat outputs, and divide an input among its copies.

>>> repeat(torch.tensor([1.0, 3.0]), 0, np.array([0, 1, 0, 1, -1]), "mean").tolist()
[1.0, 3.0, 1.0, 3.0, 2.0]
>>> divide(torch.tensor([1.0, 3.0]), 0, np.array([0, 1, 0]), None).tolist()
[0.5, 3.0, 0.5]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headway.core.errors import BarMissedError, InputError
from headway.core.rng import derived_seed
from headway.model.growth.families import ParameterRole, family_of, roles_of
from headway.model.growth.sizes import Heads, eta, repeated

QUERY_HEADS = ("num_heads", "n_head", "num_attention_heads", "n_heads", "nhead", "heads")
"""What modules and configurations call the number of query heads."""

HEAD_SIZE = ("head_dim", "attention_head_size", "head_size")
"""What they call the elements of one head."""

GAINS = ("norm gain", "final gain", "post gain")


@dataclass(frozen=True, slots=True)
class Described:
    """A model, as growth sees it."""

    tensors: dict[str, torch.Tensor]
    """Name -> parameter or buffer, itself; tied ones under each of their names."""

    roles: dict[str, ParameterRole]
    """Name -> what it is."""

    norms: dict[str, nn.Module]
    """Name of a gain -> the norm."""

    turned: frozenset[str]
    """Names of weights that are stored inputs first."""

    width: int
    num_layers: int
    heads: Heads
    attention_path: str
    """Path of the first attention."""

    norm: str
    """'layer' or 'rms'."""

    post_path: str
    """Path of a norm after the addition; '' = all come before."""

    tied: str | None
    """Name of a head that is the token embedding."""

    @property
    def is_post(self) -> bool:
        """Return whether norms come after the addition."""
        return self.post_path != ""

    @property
    def has_final_norm(self) -> bool:
        """Return whether a head reads a norm's output."""
        return self.is_post or any(found.role == "final gain" for found in self.roles.values())

    @property
    def norm_words(self) -> str:
        """Return the kind of norms, in words."""
        return f"{'post' if self.is_post else 'pre'}-{self.norm} norms"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter, outputs first."""
        shape = tuple(self.tensors[name].shape)
        return shape[::-1] if len(shape) == 2 and name in self.turned else shape


def describe(module: nn.Module, family: str) -> Described:
    """Describe a model. Raises `InputError` naming the module or parameter that no rule covers."""
    modules = dict(module.named_modules())
    for path, each in modules.items():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"{path} is {type(each).__name__}, whose statistics over a batch no rule preserves. Use LayerNorm or "
                "RMSNorm."
            )
    tensors: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    tensors = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    roles = {
        name: ParameterRole("patch", None)
        if found.role == "token" and isinstance(modules[_owner(name)], nn.Linear)
        else found
        for name, found in roles_of(tensors, family).items()
    }
    norms = {name: modules[_owner(name)] for name, found in roles.items() if found.role in GAINS}
    if not norms:
        raise InputError(f"family {family!r} finds no norm among {', '.join(list(tensors)[:4])}. Add a row for it.")
    kinds = {_norm_kind(name, each) for name, each in norms.items()}
    if len(kinds) > 1:
        raise InputError(f"{', '.join(list(norms)[:4])} are of both kinds, layer and RMS. Use one of them.")
    turned = frozenset(name for name, each in tensors.items() if each.ndim == 2 and _is_turned(modules[_owner(name)]))
    layers = {found.layer for found in roles.values() if found.layer is not None}
    post = next((name for name, found in roles.items() if found.role == "post gain"), "")
    for path, each in modules.items():
        if getattr(each, "norm_first", True) is False:
            post = post or f"{path}.norm1"
    heads, where = _heads(modules, tensors, roles, turned)
    width = next(iter(tensors[name].shape[0] for name in norms))
    tied = _tied(tensors, roles)
    return Described(
        tensors, roles, norms, turned, width, len(layers), heads, where, kinds.pop(), post, tied
    )  # fmt: skip


def stream_scale(small: Described, large: Described, eps: str) -> float:
    """Return what the residual stream is multiplied by; 1 where it is an output of the model itself."""
    is_read = small.has_final_norm or any(found.role == "head" for found in small.roles.values())
    return 1 / eta(small.width, large.width) if eps == "keep" and is_read else 1.0


def _owner(name: str) -> str:
    """Return the path of the module that a parameter is in."""
    return name.rpartition(".")[0]


def _is_turned(module: nn.Module) -> bool:
    """Return whether a layer stores its weight inputs first, as GPT-2's Conv1D does: by its class, or its bias."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return False
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if not isinstance(weight, torch.Tensor) or not isinstance(bias, torch.Tensor):
        return False
    return "Conv1D" in type(module).__name__ or weight.shape[0] != weight.shape[1] == len(bias)


def _norm_kind(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.RMSNorm) or "RMS" in kind:
        return "rms"
    if isinstance(module, nn.LayerNorm) or "LayerNorm" in kind:
        return "layer"
    raise InputError(
        f"{_owner(name)} is {kind}, which is neither a LayerNorm nor an RMSNorm. Use one of them, or name its class so."
    )


def _tied(tensors: dict[str, torch.Tensor], roles: dict[str, ParameterRole]) -> str | None:
    """Return the head that shares its weight with the embedding; raise `InputError` for layers that share theirs."""
    seen: dict[int, str] = {}
    tied = None
    for name, tensor in tensors.items():
        other = seen.setdefault(id(tensor), name)
        if other == name:
            continue
        if roles[name].layer is not None or roles[other].layer is not None:
            raise InputError(f"{other} and {name} share one weight; layers that do cannot grow apart. Untie them.")
        if {roles[name].role, roles[other].role} == {"token", "head"}:
            tied = name if roles[name].role == "head" else other
    return tied


def _heads(
    modules: dict[str, nn.Module],
    tensors: dict[str, torch.Tensor],
    roles: dict[str, ParameterRole],
    turned: frozenset[str],
) -> tuple[Heads, str]:
    """Return the heads of the first attention, and its path."""
    found = {role: name for name, each in reversed(roles.items()) for role in [each.role] if _is_weight(name)}
    name = found.get("query") or found.get("qkv") or found.get("qkv by head")
    if name is None:
        raise InputError(f"no attention among {', '.join(list(tensors)[:4])}. Add rows for its query, key and value.")
    path = _owner(name)
    rows = {role: tensors[each].shape[-1 if each in turned else 0] for role, each in found.items()}
    inputs = tensors[found["attention output"]].shape[0 if found["attention output"] in turned else -1]
    parts = path.split(".")
    places: list[Any] = [modules[".".join(parts[:count])] for count in range(len(parts), -1, -1)]
    places = [each for place in places for each in (place, getattr(place, "config", None)) if each is not None]
    for place in places:
        if query := _first(place, QUERY_HEADS):
            break
        if size := _first(place, HEAD_SIZE):
            query = inputs // size
            break
    else:
        raise InputError(
            f"{path}: nothing there, or around it, says how many heads it has. Give the module an attribute num_heads."
        )
    if inputs % query:
        raise InputError(f"{path}: {inputs} rows are not a multiple of {query} heads.")
    size = inputs // query
    kv = rows["key"] // size if "query" in found else (rows.get("qkv", 3 * inputs) - inputs) // (2 * size)
    return Heads(query, max(1, kv), size), path


def _is_weight(name: str) -> bool:
    return name.endswith("weight")


def _first(place: Any, names: tuple[str, ...]) -> int | None:
    """Return the first whole number above 0 that a module or configuration has under one of the names."""
    for name in names:
        value = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


# Two operations on one axis of a weight: repeat outputs, and divide an input among its copies.


def repeat(weight: torch.Tensor, dim: int, source: NDArray[np.int64], rest: str) -> torch.Tensor:
    """Return `weight` with element `source[i]` at `i` of an axis; at -1 their mean (`rest="mean"`) or zero."""
    index = torch.from_numpy(source).to(weight.device)
    out = weight.index_select(dim, index.clamp(min=0))
    free = (index < 0).nonzero().flatten()
    if free.numel():
        shape = [free.numel() if axis == dim else size for axis, size in enumerate(weight.shape)]
        value = weight.mean(dim, keepdim=True) if rest == "mean" else weight.new_zeros(())
        out.index_copy_(dim, free, value.expand(shape).contiguous())
    return out


def divide(
    weight: torch.Tensor, dim: int, source: NDArray[np.int64], drawn: torch.Tensor | None, *, reads_rest: bool = False
) -> torch.Tensor:
    """Return `weight` with the weights of one input's copies adding up to that input's weight.

    The copies `c` of input `j` have `R_c + (W_j - sum R) / n_j`: the projection of the random `drawn`, of the result's
    shape, on what keeps the sum, so that copies differ and training tells them apart. Without `drawn` they are all
    `W_j / n_j`, which stay equal for ever. An input that has no source (-1) reads zeros, so its weight is free and is
    that of `drawn`; where it reads something (`reads_rest`) it must be zero. An input with one copy has its weight bit
    for bit.
    """
    known = torch.from_numpy(np.flatnonzero(source >= 0)).to(weight.device)
    index = torch.from_numpy(source[source >= 0]).to(weight.device)
    along = [-1 if axis == dim else 1 for axis in range(weight.ndim)]
    count = torch.bincount(index, minlength=weight.shape[dim]).to(weight.dtype)
    shape = [len(source) if axis == dim else size for axis, size in enumerate(weight.shape)]
    if drawn is None:
        drawn, reads_rest = weight.new_zeros(shape), True
    own = drawn.index_select(dim, known)
    sums = torch.zeros_like(weight).index_add_(dim, index, own)
    shifted = own + ((weight - sums) / count.view(along)).index_select(dim, index)
    single = (count == 1)[index].view(along)
    values = torch.where(single, weight.index_select(dim, index), shifted)
    out = torch.zeros_like(drawn) if reads_rest else drawn.clone()
    return out.index_copy_(dim, known, values)


# How far the outputs of a grown model are from those of the small one, on drawn inputs.

SEQUENCES, LENGTH = 2, 16
"""Of a drawn input; fewer positions where the model has fewer."""


LARGEST = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Element type -> relative error of outputs that is rounding, of deep models too; 0.1 for 16 bits and fewer."""


def compared(small: nn.Module, large: nn.Module, *, family: str, eps: str, seed: int = 0) -> tuple[float | None, str]:
    """Return the error of `max_relative_error` and "", or None and why nothing was compared.

    Raises `BarMissedError` where the outputs are not equal.
    """
    try:
        error = max_relative_error(small, large, family=family, eps=eps, seed=seed)
    except InputError as cause:
        return None, str(cause)
    kind = next((each.dtype for each in small.state_dict().values() if each.is_floating_point()), torch.float32)
    if not error <= LARGEST.get(kind, 0.1):
        raise BarMissedError(
            f"the outputs of the grown model differ by {error:.2g} of the largest, so something else in it depends on "
            "its size: a scale of attention, of logits, of layers, of the embedding. Make that equal in both models, "
            "and do not train this one."
        )
    return error, ""


def max_relative_error(
    small: nn.Module, large: nn.Module, *, family: str = "auto", eps: str = "scale", seed: int = 0
) -> float:
    """Return max |small(x) - large(x)| / max |small(x)| over drawn token ids, images, or elements of the stream.

    Both are put in evaluation for as long. Raises `InputError` where no such input suits the model's forward pass.
    """
    family = family_of(small.state_dict()) if family == "auto" else family
    before, after = describe(small, family), describe(large, family)
    modes = [(each, each.training) for model in (small, large) for each in model.modules()]
    small.eval(), large.eval()
    failures = []
    try:
        for inputs in _inputs(before, after, eps, seed):
            try:
                with torch.no_grad():
                    wanted, found = _output(small(inputs[0])), _output(large(inputs[1]))
            except Exception as error:  # the forward pass is the caller's: whatever it says
                failures.append(f"{tuple(inputs[0].shape)} {inputs[0].dtype}: {error}")
                continue
            found = found[..., : wanted.shape[-1]]  # a model without a head answers with its stream, copies and all
            return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    finally:
        for module, was in modes:
            module.training = was
    raise InputError(
        f"the model takes none of the inputs that were drawn ({'; '.join(failures)}), so nothing was compared. Give "
        "its forward pass one argument: token ids, images, or the stream."
    )


def _inputs(small: Described, large: Described, eps: str, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs that a model of these parameters may take, for the small and for the large one."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "agreement") % 2**63)
    by_role: dict[str, list[tuple[int, ...]]] = {}
    for name, found in small.roles.items():
        by_role.setdefault(found.role, []).append(tuple(small.tensors[name].shape))
    rows = [shape[-2] for shape in by_role.get("position", []) if len(shape) > 1 and shape[-2] > 1]
    length = min([LENGTH, *rows])
    gain = small.tensors[next(iter(small.norms))]
    for shape in by_role.get("token", []):
        ids = torch.randint(0, shape[0], (SEQUENCES, length), generator=generator).to(gain.device)
        yield ids, ids
    for shape in by_role.get("patch", []):
        if len(shape) == 2:
            features = torch.randn(SEQUENCES, length, shape[1], generator=generator).to(gain)
            yield features, features
        if len(shape) == 4:
            side = int(max(rows, default=5) ** 0.5) * shape[-1]
            image = torch.randn(SEQUENCES, shape[1], side, side, generator=generator).to(gain)
            yield image, image
    stream = torch.randn(SEQUENCES, length, small.width, generator=generator).to(gain)
    wide = repeat(stream, 2, repeated(small.width, large.width), "mean" if small.norm == "layer" else "zero")
    yield stream, wide * stream_scale(small, large, eps)


def _output(answer: Any) -> torch.Tensor:
    """Return the first tensor of what a forward pass returns."""
    if isinstance(answer, torch.Tensor):
        return answer
    values = answer.values() if isinstance(answer, Mapping) else answer
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
    raise InputError(f"the forward pass returns a {type(answer).__name__} without tensors. Return one.")
