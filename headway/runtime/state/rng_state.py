"""The random number generators of this process as state: saved and restored with every checkpoint.

Torch's on the host and on each CUDA device, Python's and, where it is loaded,
numpy's global one. Generators of the script's own are state of their own. The
state is bytes without a pickle, so that nobody has to trust it.

>>> states = RngStates()
>>> before = states.state_dict()
>>> first = torch.rand(3), random.random()
>>> states.load_state_dict(before)
>>> bool((torch.rand(3) == first[0]).all()), random.random() == first[1]
(True, True)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from headway.core.errors import FormatError
from headway.storage.stored.digests import checksum
from headway.storage.stored.manifest import GENERATORS

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
