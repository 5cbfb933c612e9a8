"""What compression left out, by parameter: added to the next gradient, so that nothing is lost, only late.

A biased codec sends C(q) of q = gradient + residual, and q - D(C(q)) is the next residual (error feedback). Both who
sends and who answers keep one. Residuals are flat float32, keyed by the parameter's name: DDP lays its buckets out
anew after the first step, and a saved state has to fit the next process.

A step is taken back whole when a gradient turns out not to be finite, so new residuals are written beside the old ones
and take their place when the step is over.

>>> residuals = Residuals()
>>> new = residuals.fresh("weight", 2, torch.device("cpu"))
>>> _ = new.fill_(1.0)
>>> residuals.commit(); residuals.tensors["weight"].tolist()
[1.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headway.core.errors import InputError


class RankTensor(torch.Tensor):
    """A tensor that differs between ranks: code that saves plain tensors once for all ranks stores it for each."""


class Residuals:
    """Residuals of one side. Not thread-safe: the lane's thread alone works with them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Parameter -> [n] float32 of the last whole step."""
        self._next: dict[str, torch.Tensor] = {}
        self._written: set[str] = set()

    def fresh(self, name: str, n: int, device: torch.device) -> torch.Tensor:
        """Return the [n] tensor for the next residual of a parameter, the same one until the step ends."""
        if name not in self._written:
            spare = self._next.get(name)
            if spare is None or spare.numel() != n or spare.device != device:
                self._next[name] = torch.zeros(n, device=device)
            self._written.add(name)
        return self._next[name]

    def last(self, name: str, n: int, device: torch.device) -> torch.Tensor:
        """Return the [n] residual of the last step, zeros at first. Raises `InputError` where it has another size."""
        known = self.tensors.get(name)
        if known is None:
            known = self.tensors[name] = torch.zeros(n, device=device)
        if known.numel() != n:
            raise InputError(
                f"the residual of {name} has {known.numel()} numbers, its gradient {n}. Load the state of this model "
                "and this number of ranks, or begin without one."
            )
        if known.device != device:
            known = self.tensors[name] = known.to(device)
        return known

    def commit(self) -> None:
        """End a step: what was written becomes the residuals."""
        for name in self._written:
            old = self.tensors.get(name)
            self.tensors[name] = self._next.pop(name)
            if old is not None:
                self._next[name] = old
        self._written.clear()

    def roll_back(self) -> None:
        """End a step that does not count."""
        self._written.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the residuals of the last step."""
        return {name: tensor.clone().as_subclass(RankTensor) for name, tensor in self.tensors.items()}

    def load(self, saved: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Take saved residuals; `sizes` is parameter -> numbers. Raises `InputError` where they do not fit."""
        for name, tensor in saved.items():
            if name not in sizes:
                raise InputError(f"there is a residual of {name!r}, and the model has no such compressed parameter.")
            if tensor.numel() != sizes[name]:
                raise InputError(
                    f"the residual of {name} has {tensor.numel()} numbers; this rank of this model keeps "
                    f"{sizes[name]}. Load the state of the same model and number of ranks, or begin without residuals."
                )
        plain = {name: tensor.detach().as_subclass(torch.Tensor) for name, tensor in saved.items()}
        self.tensors = {name: tensor.clone().reshape(-1).float() for name, tensor in plain.items()}
        self._next.clear()
        self._written.clear()
