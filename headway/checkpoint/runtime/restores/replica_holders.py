"""Which ranks hold equal copies of a plain tensor, and whose buffers are stored.

>>> holders = ReplicaHolders({"norm": torch.nn.BatchNorm1d(2)}, [1, 3])
>>> holders["norm.running_mean"], holders["norm.weight"]
((1,), [1, 3])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


class ReplicaHolders(Mapping[str, Sequence[int]]):
    """Name of a plain tensor -> the ranks that hold equal copies of it; a name that is not here: all ranks.

    Of a module's buffers the first holder's are stored. Running statistics differ between ranks, and none are the
    right ones; data parallelism trains with the first rank's, which it sends to the others before each forward.
    """

    def __init__(self, objects: Mapping[str, Any], holders: Sequence[int] | None) -> None:
        self.first = min(holders or (0,))
        """The rank whose buffers are stored."""
        self._holders = holders
        modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        self._buffers = {
            f"{name}.{key}"
            for name, module in modules.items()
            for key, buffer in module.named_buffers()
            if type(buffer) in (torch.Tensor, torch.nn.Buffer)
        }

    def __getitem__(self, name: str) -> Sequence[int]:
        """Return the holders of a tensor; raises `KeyError` where they are all ranks."""
        if name in self._buffers:
            return (self.first,)
        if self._holders is None:
            raise KeyError(name)
        return self._holders

    def __eq__(self, other: object) -> bool:
        """Whether every name has the same holders."""
        return isinstance(other, ReplicaHolders) and (other._holders, other._buffers) == (self._holders, self._buffers)

    def __iter__(self) -> Iterator[str]:
        """Go over the buffers: other names are not known beforehand."""
        return iter(self._buffers)

    def __len__(self) -> int:
        """Return how many buffers there are."""
        return len(self._buffers)

    def without_buffers(self, name: str, state: Any) -> Any:
        """Return the state of the object `name` without buffers that another rank stores."""
        if not any(fqn.startswith(f"{name}.") for fqn in self._buffers):
            return state
        return {key: value for key, value in state.items() if f"{name}.{key}" not in self._buffers}
