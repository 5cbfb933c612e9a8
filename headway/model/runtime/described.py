"""What a module says about itself: width, layers, heads, the kind of its norms, tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.core.errors import InputError
from headway.model.growth.families import ParameterRole, roles_of
from headway.model.growth.sizes import Heads, eta

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
