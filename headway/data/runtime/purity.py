"""The purity probe: may this dataset's examples be kept, or be made in another process?

A dataset is pure when reading an example changes nothing and depends on
nothing but its index. The probe reads a few examples twice and looks for every
difference it can see: between the results, in the random number states, in
the dataset's own attributes. It restores what it disturbed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from headway.data.runtime.examples import decode, encode, equal


def impurity(dataset: Any, indices: Sequence[int]) -> str | None:
    """Say why the examples of `dataset` may not be kept, or None when the probe found nothing.

    Reads each of `indices` twice. An exception of the dataset is a finding, not a failure.
    """
    states = _random_states()
    try:
        for index in indices:
            first = dataset[index]
            attributes = _attributes(dataset)  # after the first reading: opening a file lazily is no impurity
            second = _read_as_a_worker_would(dataset, index)
            if not _same_states(states, _random_states()):
                return f"reading example {index} draws random numbers"
            if not equal(first, second):
                return f"reading example {index} twice gave two different results"
            if _attributes(dataset) != attributes:
                return f"reading example {index} changes attributes of the dataset"
            if not equal(decode(encode(first)), first):
                return f"example {index} does not survive being copied"
    except Exception as failure:
        return f"the probe of an example raised {type(failure).__name__}: {failure}"
    finally:
        _restore(states)
    return None


def _read_as_a_worker_would(dataset: Any, index: int) -> Any:
    """Read with one intra-op thread, as loader workers do: a sum over more threads may differ in its last bit."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return dataset[index]
    finally:
        torch.set_num_threads(num_threads)


def _random_states() -> dict[str, Any]:
    """Return the state of every random number generator an example could draw from."""
    states: dict[str, Any] = {"random": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _same_states(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Compare; a generator that appeared meanwhile was not there to be drawn from."""
    return all(equal(state, after[name]) for name, state in before.items())


def _restore(states: dict[str, Any]) -> None:
    """Put every generator back to where it was."""
    random.setstate(states["random"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _attributes(dataset: Any) -> dict[str, object]:
    """Return a shallow picture of the dataset: small values as they are, containers by identity and size."""
    picture: dict[str, object] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, (bool, int, float, str, bytes, type(None))):
            picture[name] = value
        else:
            size = len(value) if hasattr(value, "__len__") and not isinstance(value, torch.nn.Module) else -1
            version = value._version if isinstance(value, torch.Tensor) else 0
            picture[name] = (id(value), size, version)
    return picture
