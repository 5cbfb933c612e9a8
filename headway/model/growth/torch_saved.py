"""A small model filled from saved tensors, a large one grown from it, and the tensors to save of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from headway.core.errors import InputError
from headway.core.tables import suggestion
from headway.model.growth.apply import fill
from headway.model.growth.families import family_of
from headway.model.growth.torch_model import compared


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
