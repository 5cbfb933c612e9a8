"""Which random number generators a stretch of code draws from: states are compared, never touched.

The recording looks at a loader's first few loads with it, a remedy at the
examples it would keep: what draws gives other examples in another process,
and stale ones out of a cache. Known are the generators of `random`, numpy and
torch, and those that a dataset or its transforms hold as attributes ("own").

>>> import random
>>> before = fingerprints()
>>> _ = random.random()
>>> drawn(before, fingerprints())
['random']
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

OWN = "own"
"""Name of the generators that the dataset holds itself."""

DEPTH = 6
"""Objects inside each other that the search for own generators follows."""

MOST_OBJECTS = 128
"""Objects that it looks at."""


def fingerprints(own: Sequence[Any] = ()) -> dict[str, object]:
    """Return generator -> something that is equal as long as nobody draws; `own` are those of `own_generators`.

    What has not been imported, or was not set up, cannot be drawn from yet and is left out.
    """
    found: dict[str, object] = {"random": random.getstate()}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if hasattr(torch, "get_rng_state"):
        found["torch"] = torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]  # it has the attribute
        if torch.cuda.is_initialized():  # type: ignore[union-attr]  # the same
            found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]  # the same
    if hasattr(getattr(numpy, "random", None), "get_state"):
        found["numpy"] = _numpy_state(numpy.random.get_state(legacy=False))  # type: ignore[union-attr]  # the same
    return {**found, OWN: [_state(generator) for generator in own]} if own else found


def restorer(own: Sequence[Any]) -> Callable[[], None]:
    """Return a function that puts the generators in `own` back to where they are now."""
    acts: list[Callable[[], Any]] = []
    for generator in own:
        kind = _kind(generator)
        if kind == "torch":
            acts.append(partial(generator.set_state, generator.get_state()))
        elif kind == "random" and not isinstance(generator, random.SystemRandom):
            acts.append(partial(generator.setstate, generator.getstate()))
        elif kind == "numpy" and hasattr(generator, "bit_generator"):
            acts.append(partial(setattr, generator.bit_generator, "state", generator.bit_generator.state))
        elif kind == "numpy":
            acts.append(partial(generator.set_state, generator.get_state()))

    def restore() -> None:
        for act in acts:
            act()

    return restore


def drawn(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the generators whose state differs; one that appeared meanwhile was not there to be drawn from."""
    return sorted(name for name, state in before.items() if name in after and after[name] != state)


def _numpy_state(state: Any) -> object:
    """Return a numpy bit generator's state as one value: Mersenne's is an array, others' are numbers."""
    inner = state["state"]
    return {name: value.tobytes() if hasattr(value, "tobytes") else value for name, value in inner.items()}


def own_generators(*holders: Any) -> list[Any]:
    """Return the generators among the attributes of `holders`, such as a dataset, and of what they hold."""
    found: list[Any] = []
    seen: set[int] = set()
    stack = [(holder, 0) for holder in holders]
    while stack and len(seen) < MOST_OBJECTS:
        value, depth = stack.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(value))
        if _kind(value):
            found.append(value)
        elif depth < DEPTH:
            stack += [(part, depth + 1) for part in _parts(value)]
    return found


def _parts(value: Any) -> list[Any]:
    """Return what an object holds; long containers hold data, not generators."""
    if isinstance(value, (list, tuple)):
        return list(value) if len(value) <= MOST_OBJECTS else []
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= MOST_OBJECTS else []
    return list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []


def _kind(value: Any) -> str:
    """Return which kind of generator this is, '' for anything else."""
    if isinstance(value, random.Random):
        return "random"
    module, name = type(value).__module__, type(value).__name__
    if name == "Generator" and module.startswith("torch"):
        return "torch"
    return "numpy" if name in ("Generator", "RandomState") and module.startswith("numpy.random") else ""


def _state(generator: Any) -> object:
    """Return the state of an own generator as one value."""
    kind = _kind(generator)
    if kind == "random":
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if kind == "torch":
        return generator.get_state().numpy().tobytes()
    bits = getattr(generator, "bit_generator", None)
    return _numpy_state(bits.state if bits is not None else generator.get_state(legacy=False))
