"""How far the outputs of a grown model are from those of the small one, on drawn inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from headway.core.errors import BarMissedError, InputError
from headway.core.rng import derived_seed
from headway.model.growth.families import family_of
from headway.model.growth.sizes import repeated
from headway.model.runtime.axes import repeat
from headway.model.runtime.described import Described, describe, stream_scale

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
