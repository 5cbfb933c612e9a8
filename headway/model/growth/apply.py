"""A larger model that starts where a trained smaller one has come to: equal outputs, capacity to learn more.

Width: the residual stream is repeated, and every layer that reads it divides its weights among the copies at random.
Depth: new blocks add nothing to the stream at first. Source: LEMON (Wang et al., ICLR 2024, arXiv 2310.07999).

>>> def encoder(width: int, layers: int) -> nn.Module:
...     layer = nn.TransformerEncoderLayer(width, width // 4, 2 * width, batch_first=True, norm_first=True)
...     return nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False).double().eval()
>>> small, large = encoder(8, 1), encoder(20, 3)
>>> x = torch.randn(2, 3, 8, dtype=torch.float64)
>>> wide = repeat(x, 2, repeated(8, 20), "mean")
>>> bool((grow(small, large)(wide)[..., :8] - small(x)).abs().max() < 1e-12)
True

A small model filled from saved tensors, a large one grown from it, and the tensors to save of that.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.tables import pick, suggestion
from headway.model.growth.families import WRITES, ParameterRole, axes_of, family_of
from headway.model.growth.sizes import GrownLayer, blocks, check_heads, circular, eta, kv_rows, query_rows, repeated
from headway.model.growth.torch_model import Described, compared, describe, divide, repeat, stream_scale

DEPTHS = {"zero": "new blocks write zeros", "cancel": "new blocks write what cancels over copies"}
SPLITS = {"random": "copies differ, so that training tells them apart", "equal": "copies stay equal: net2net"}
EPSILONS = {
    "scale": "the epsilon of every norm is multiplied by eta^2, on the large module",
    "keep": "the stream is divided by eta instead, so that the state dict alone is enough",
}
"""Where the width is no multiple, a norm sees eta^2 of the variance."""

READS = ("read", "from_hidden", "from_query")
"""Axes of inputs: their weights are divided."""


@dataclass(frozen=True, slots=True)
class _Growth:
    """What all parameters of one growth share."""

    small: Described
    large: Described
    blocks: list[GrownLayer]
    depth: str
    split: str
    seed: int
    eta: float
    stream_scale: float
    """What the residual stream is multiplied by: 1, or 1 / eta."""

    def source_of(self, name: str) -> str:
        """Return the name of the small model's parameter that one of the large model's is a copy of."""
        layer = self.large.roles[name].layer
        if layer is None:
            return name
        return re.sub(rf"(?<=\.){layer}(?=\.)|^{layer}(?=\.)", str(self.blocks[layer].source), name, count=1)


def grow(
    small: nn.Module,
    large: nn.Module,
    *,
    family: str = "auto",
    depth: Literal["zero", "cancel"] = "zero",
    split: Literal["random", "equal"] = "random",
    eps: Literal["scale", "keep"] = "scale",
    seed: int = 0,
) -> nn.Module:
    """Fill `large` in place so that in evaluation its outputs are those of `small`; return it.

    `family` is a key of `headway.model.FAMILIES`, found by the names of parameters by default. `depth="zero"`: new
    blocks write zeros; `"cancel"`: weights that add up to zero over copies. `split="random"`: copies differ (drawn from
    `seed`); `"equal"`: they are equal, and stay so. `eps="scale"`: the epsilon of the norms of `large` is eta^2 times
    the small one's, which differs where the width is no multiple; `"keep"`: it is the same, and the stream is scaled.
    What cannot grow without loss is refused before anything is written: `InputError` names the module or the parameter.
    Then both are run on drawn inputs: `BarMissedError` where the outputs differ, a warning where nothing was compared.
    """
    family = family_of(small.state_dict()) if family == "auto" else family
    fill(small, large, family=family, depth=depth, split=split, eps=eps, seed=seed)
    _, not_compared = compared(small, large, family=family, eps=eps, seed=seed)
    if not_compared:
        warnings.warn(not_compared, stacklevel=2)
    return large


def fill(
    small: nn.Module, large: nn.Module, *, family: str, depth: str = "zero", split: str = "random",
    eps: str = "scale", seed: int = 0,
) -> None:  # fmt: skip
    """Fill `large` as `grow` does, and compare nothing."""
    pick(DEPTHS, depth, "depth")
    pick(SPLITS, split, "split")
    pick(EPSILONS, eps, "eps")
    before, after = describe(small, family), describe(large, family)
    growth = _growth(before, after, depth, split, eps, seed)
    _warn_of_dropout(small)
    sources = {name: _sources(growth, name) for name in after.tensors}
    factor = 1.0 if eps == "keep" else growth.eta**2
    _set_epsilons(growth, factor)
    tied = set() if after.tied is None else {after.tied}
    with torch.no_grad():
        for name in after.tensors.keys() - tied:
            after.tensors[name].copy_(_grown(growth, name, sources[name]))


def _growth(small: Described, large: Described, depth: str, split: str, eps: str, seed: int) -> _Growth:
    """Compare the two models; raise `InputError` where one cannot become the other."""
    if large.width < small.width:
        raise InputError(
            f"the width shrinks from {small.width} to {large.width}. Give the large model at least {small.width}."
        )
    order = blocks(small.num_layers, large.num_layers)
    if small.norm != large.norm or small.is_post != large.is_post:
        raise InputError(f"the small model has {small.norm_words}, the large one {large.norm_words}. Build both alike.")
    if small.is_post and large.width % small.width:
        raise InputError(
            f"{small.post_path} comes after the addition, where only a multiple of the width {small.width} is "
            f"lossless; the large model has {large.width}. Choose {large.width // small.width * small.width}."
        )
    if small.is_post and large.num_layers != small.num_layers:
        raise InputError(
            f"{small.post_path} comes after the addition, so no new block leaves the stream as it is. Keep "
            f"{small.num_layers} layers."
        )
    check_heads(small.heads, large.heads, small.attention_path)
    if large.tied is not None and small.tied is None:
        raise InputError(f"{large.tied} is tied in the large model and not in the small one. Untie it.")
    growth = _Growth(
        small, large, order, depth, split, seed, eta(small.width, large.width), stream_scale(small, large, eps)
    )  # fmt: skip
    wanted = {growth.source_of(name) for name in large.tensors}
    if odd := sorted(wanted ^ set(small.tensors)):
        raise InputError(
            f"the two models do not have the same parameters: one alone has {', '.join(odd[:6])}. Build both alike, "
            "with biases in both or in none."
        )
    return growth


def _sources(growth: _Growth, name: str) -> list[NDArray[np.int64]]:
    """Return, for each axis of a parameter, outputs first, the source of each element; check the sizes."""
    source = growth.source_of(name)
    before, after = growth.small.shape(source), growth.large.shape(name)
    axes = axes_of(growth.large.roles[name].role, len(after))
    if len(before) != len(after):
        raise InputError(f"{name}: shape {before} cannot become {after}. Build both models alike.")
    found = []
    for kind, small, large in zip(axes, before, after, strict=True):
        if large < small or (kind == "same" and large != small):
            rule = "must stay as it is" if kind == "same" else "may only grow"
            raise InputError(f"{name}: shape {before} cannot become {after}: {small} {rule}. Change the large model.")
        found.append(_source(growth, kind, small, large))
        if len(found[-1]) != large or found[-1].max(initial=-1) >= small:
            raise InputError(f"{name}: shape {before} cannot become {after}; the width or the heads say otherwise.")
    return found


def _source(growth: _Growth, kind: str, small: int, large: int) -> NDArray[np.int64]:
    """Return the source of each element of one axis."""
    before, after = growth.small.heads, growth.large.heads
    if kind in ("stream", "gain", "bias", "read"):
        return repeated(small, large)
    if kind in ("query", "from_query"):
        return query_rows(before, after)
    if kind == "kv":
        return kv_rows(before, after)
    if kind == "qkv by head":
        return query_rows(*(replace(each, size=3 * each.size) for each in (before, after)))
    if kind == "qkv":
        queries, keys = query_rows(before, after), kv_rows(before, after)
        first = before.query * before.size
        return np.concatenate([queries, keys + first, keys + first + before.kv * before.size])
    return circular(small, large)


def _grown(growth: _Growth, name: str, sources: list[NDArray[np.int64]]) -> torch.Tensor:
    """Return the value of one parameter of the large model."""
    source = growth.source_of(name)
    found, tensor = growth.large.roles[name], growth.small.tensors[source].detach()
    if not tensor.is_floating_point():
        return tensor
    turned = tensor.ndim == 2 and source in growth.small.turned
    value = (tensor.T if turned else tensor).to("cpu", torch.float64)
    spread = float(value.square().mean().sqrt())
    axes = axes_of(found.role, value.ndim)
    if found.layer is not None and growth.blocks[found.layer].is_new and found.role in WRITES:
        value = torch.zeros_like(value)
    rest = "mean" if growth.small.norm == "layer" else "zero"
    for dim, (kind, index) in enumerate(zip(axes, sources, strict=True)):
        if kind not in READS and kind != "same":
            value = repeat(value, dim, index, {"stream": rest, "gain": "mean"}.get(kind, "zero"))
        if kind == "stream":
            value = value * growth.stream_scale
        if kind == "gain":
            value = value * growth.eta
    for dim, (kind, index) in enumerate(zip(axes, sources, strict=True)):
        if kind in READS:
            value = _divided(growth, name, found, value, dim, index, spread)
    if found.role.startswith("final") and growth.large.tied is not None:
        value = value / (growth.large.width // growth.small.width * growth.stream_scale)
    if found.role == "head" and value.ndim > 1 and not growth.small.has_final_norm:
        value = value / growth.stream_scale
    return value.T if turned else value


def _divided(
    growth: _Growth,
    name: str,
    found: ParameterRole,
    value: torch.Tensor,
    dim: int,
    index: NDArray[np.int64],
    spread: float,
) -> torch.Tensor:
    """Return a weight divided among the copies of its inputs: at random, with the spread of a wider fresh weight."""
    is_new = found.layer is not None and growth.blocks[found.layer].is_new and found.role in WRITES
    drawn = None
    if growth.split == "random" and not (is_new and growth.depth == "zero"):
        generator = torch.Generator().manual_seed(derived_seed(growth.seed, "grow", name) % 2**63)
        shape = [len(index) if axis == dim else size for axis, size in enumerate(value.shape)]
        drawn = torch.randn(shape, generator=generator, dtype=value.dtype)
        drawn *= spread * (value.shape[dim] / len(index)) ** 0.5
    # A head that no norm precedes reads the stream itself, whose left-over elements are not zero.
    reads_rest = found.role == "head" and not growth.small.has_final_norm
    return divide(value, dim, index, drawn, reads_rest=reads_rest)


def _set_epsilons(growth: _Growth, factor: float) -> None:
    """Give every norm of the large model its source's epsilon times `factor`; raise `InputError` where it has none."""
    found: list[tuple[Any, str, float]] = []
    for name, module in growth.large.norms.items():
        source = growth.small.norms[growth.source_of(name)]
        attribute = next((each for each in ("eps", "variance_epsilon") if hasattr(module, each)), None)
        if attribute is None and factor != 1:
            raise InputError(
                f"{name}: {type(module).__name__} has neither eps nor variance_epsilon, which must be multiplied by "
                f'{factor:.6g}. Pass eps="keep", or a multiple of the width {growth.small.width}.'
            )
        value = getattr(source, attribute, None) if attribute is not None else None
        if attribute is not None and value is not None:  # None: torch.nn.RMSNorm takes the smallest of the type
            found.append((module, attribute, value * factor))
    for module, attribute, value in found:
        setattr(module, attribute, value)


def _warn_of_dropout(small: nn.Module) -> None:
    """Warn that the outputs of a model in training are not the same twice."""
    if small.training and any(isinstance(module, nn.Dropout) and module.p > 0 for module in small.modules()):
        warnings.warn(
            "the small model is in training with dropout; outputs are equal in evaluation: call eval() to compare.",
            stacklevel=3,
        )


class TensorSource(Protocol):
    """Saved tensors, read one at a time: `headway.checkpoint.torch_dcp.sources.SavedState` is one."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    """Name -> shape and element type."""

    def tensor(self, fqn: str) -> torch.Tensor:
        """Return a tensor."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A grown model, to be saved."""

    state: dict[str, torch.Tensor]
    """Name -> tensor of the large model."""

    max_relative_error: float | None
    """Of the large model's outputs on drawn inputs; None = its forward pass takes none of them."""

    not_compared: str
    """Why there is no error; '' = there is."""

    parameters: tuple[int, int]
    """Number of parameters before and after; what is tied counts once."""

    family: str
    """Key of `FAMILIES`."""

    prefix: str
    """What comes before the model's names in the saved state."""


def grow_saved(
    build: Callable[..., nn.Module],
    sizes: tuple[dict[str, Any], dict[str, Any]],
    saved: TensorSource,
    *,
    prefix: str | None = None,
    family: str = "auto",
    depth: Literal["zero", "cancel"] = "zero",
    split: Literal["random", "equal"] = "random",
    seed: int = 0,
) -> Grown:
    """Build the small and the large model, fill the small one with what was saved, and grow it.

    The norms keep their epsilon, so that the state is enough. Raises `InputError` on tensors that are missing or have
    other shapes, on what `build` refuses, and as `grow` does; `BarMissedError` where the outputs are not equal.
    """
    small, large = (_built(build, each).eval() for each in sizes)
    names = list(small.state_dict())
    prefix = _prefix(names, saved.tensors) if prefix is None else prefix
    held = [name for name in names if prefix + name in saved.tensors]
    kinds = [saved.tensors[prefix + name][1] for name in held]
    if kind := next((each for each in kinds if getattr(torch, each).is_floating_point), None):
        small, large = small.to(getattr(torch, kind)), large.to(getattr(torch, kind))
    own = small.state_dict(keep_vars=True)
    filled = {id(own[name]) for name in held}
    if missing := [name for name in names if id(own[name]) not in filled]:  # a tied head may be saved once
        raise InputError(
            f"the checkpoint has no tensor {prefix}{missing[0]} ({len(missing)} of {len(own)} are missing). Build the "
            "model that was saved, or say what comes before its names: --prefix"
        )
    with torch.no_grad():
        for name in held:
            shape = saved.tensors[prefix + name][0]
            if shape != tuple(own[name].shape):
                raise InputError(
                    f"{prefix}{name}: the checkpoint has shape {shape}, the small model {tuple(own[name].shape)}. Give "
                    "--small the sizes that were saved."
                )
            own[name].copy_(saved.tensor(prefix + name))
    family = family_of(names) if family == "auto" else family
    fill(small, large, family=family, depth=depth, split=split, eps="keep", seed=seed)
    error, not_compared = compared(small, large, family=family, eps="keep", seed=seed)
    state = {name: each.clone() for name, each in large.state_dict().items()}  # tied ones under each of their names
    before, after = (sum(each.numel() for each in model.parameters()) for model in (small, large))
    return Grown(state, error, not_compared, (before, after), family, prefix)


def _prefix(names: Sequence[str], saved: Mapping[str, Any]) -> str:
    """Return what comes before a model's names in saved state: what leaves the fewest without a tensor."""
    starts = {each.removesuffix(names[0]) for each in saved if each.endswith(names[0])}
    if not starts:
        raise InputError(
            f"the checkpoint has no tensor {names[0]}. Build the model that was saved. {suggestion(saved, names[0])}"
        )
    return min(starts, key=lambda start: (sum(start + name not in saved for name in names), len(start)))


def _built(build: Callable[..., nn.Module], sizes: dict[str, Any]) -> nn.Module:
    """Call what was named. Raises `InputError` where it takes other arguments or returns no module."""
    try:
        model = build(**sizes)
    except Exception as error:  # whatever the user's code raises
        said = f"{type(error).__name__}: {error}"
        raise InputError(f"the model cannot be built with {sizes}: {said}. Pass arguments that it takes.") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"the builder returned a {type(model).__name__}. Return a torch.nn.Module.")
    return model
