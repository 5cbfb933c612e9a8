"""Operators as their author declares them, and which of them may change places.

A stage says what it does to an example (`kind`), whether it draws random
numbers, and whether it looks at its example alone. Two stages may change
places when every result stays the same bit by bit: one that picks pixels
(crop, flip) and one that treats each pixel by itself (colour, conversion).
All others keep their order; a function that nothing is known about also keeps
all others on their sides.

>>> stages = [Stage("to_float", "dtype", id=1), Stage("jitter", "photometric", id=2), Stage("crop", "geometric", id=3)]
>>> [(op.name, op.depends_on) for op in planned_ops("files", stages)]
[('files', ()), ('to_float', (0,)), ('jitter', (0, 1)), ('crop', (0,))]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.data.planning.optimize import Op

KINDS: dict[str, tuple[str, ...]] = {
    "geometric": ("photometric", "dtype"),
    "photometric": ("geometric",),
    "dtype": ("geometric",),
    "resample": (),
    "neighbourhood": (),
    "decode": (),
    "filter": (),
    "cache": (),
    "opaque": (),
}
"""What a stage does -> the kinds it changes places with. geometric: picks or moves pixels; photometric: computes each
pixel from itself alone; dtype: converts each value; resample: computes other pixels from neighbours (resize);
neighbourhood: computes the same pixels from neighbours (blur); opaque: unknown."""

PROMISED: dict[str, tuple[str, ...]] = {
    "resample": ("photometric", "dtype"),
    "neighbourhood": ("geometric", "dtype"),
}
"""Kind -> the kinds that it may pass on its author's word (`commutes=True`). Results differ then: by rounding and
clipping where a resize passes colours, at the border where a blur passes a crop; `check` says by how much."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One operator of a pipeline: `function(example, rng)` for a random one, `function(example)` otherwise."""

    name: str
    kind: str
    function: Callable[..., Any] | None = None
    random: bool = False
    row_pure: bool = True
    """Whether the result depends on the example alone; what does not is never cached."""
    commutes: bool = False
    """The author's word that it may change places although results differ a little: see `PROMISED`."""
    cache_bytes: int = 0
    """Room of a cache stage."""
    id: int = -1
    """Place in the pipeline as written, from 1; it decides the stage's random numbers wherever it runs."""

    def __post_init__(self) -> None:
        """Raise `UnknownNameError` on an unknown kind, `InputError` on a wrong promise."""
        pick(KINDS, self.kind, "kind of operator")
        if self.commutes and self.kind not in PROMISED:
            raise InputError(f"{self.name} is {self.kind}; commutes=True is for {', '.join(PROMISED)}. Drop it.")


def may_swap(one: Stage, other: Stage) -> bool:
    """Return whether two stages may change places.

    >>> may_swap(Stage("flip", "geometric"), Stage("normalise", "photometric"))
    True
    >>> may_swap(Stage("grey", "photometric"), Stage("jitter", "photometric"))
    False
    """
    exact = other.kind in KINDS[one.kind]
    return exact or other.kind in _promised(one) or one.kind in _promised(other)


def _promised(stage: Stage) -> tuple[str, ...]:
    return PROMISED[stage.kind] if stage.commutes else ()


def planned_ops(source: str, stages: Sequence[Stage]) -> tuple[Op, ...]:
    """Return what the planner is told: the source (id 0) and the stages, each after all it may not pass."""
    found = [Op(0, source, source=True)]
    for place, stage in enumerate(stages):
        earlier = tuple(other.id for other in stages[:place] if not may_swap(other, stage))
        random = stage.random or not stage.row_pure
        # What changes places with nothing keeps its own.
        fixed = not any(may_swap(stage, other) for other in stages)
        found.append(Op(stage.id, stage.name, (0, *earlier), random=random, fixed=fixed))
    return tuple(found)


def check_stages(stages: Sequence[Stage]) -> None:
    """Raise `InputError` where a cache would keep random draws, or what depends on more than its example."""
    for place, stage in enumerate(stages):
        if stage.kind != "cache":
            continue
        for other in stages[:place]:
            if other.random or not other.row_pure:
                why = "is random: every epoch would see the same draw" if other.random else "is not row-pure"
                raise InputError(f"cache() stands behind {other.name}, which {why}. Put cache() before it.")
