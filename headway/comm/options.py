"""Every way to bring the gradients of one tensor together with at most one codec: Espresso's tree of options.

An option is a sequence of actions, written PLACE.VERB with spaces between them:

    inside.reduce_scatter gpu.encode between.all_gather gpu.decode inside.all_gather

Places are the group of all ranks (`flat`), the ranks of a host (`inside`), the ranks of the same number on all hosts
(`between`), and the device that encodes or decodes (`gpu`, `cpu`). Communication is whole (one collective) or divided
into two that belong together; what travels is raw or a packet:

                 whole         divided, by parts              divided, at a root
    raw          all_reduce    reduce_scatter .. all_gather   reduce .. broadcast
    packets      all_gather    all_to_all .. all_gather       gather .. broadcast

Inside a host it is always divided, with the step between hosts in the middle. Packets cannot be added: each of
several is decoded, and the sum is raw again, which may be encoded anew. An option ends raw. There are 4341 of them
with two devices and 174 with one, the counts that the paper gives.

>>> len(OPTIONS), len(tuple(options(("gpu",))))
(4341, 174)
>>> [f"{step.verb} {step.blocks}x{step.packets}" for step in steps("gpu.encode flat.all_gather gpu.decode", 2, 2)]
['encode 4x1', 'all_gather 4x1', 'decode 4x4']

Source: Wang et al., "Hi-Speed DNN Training with Espresso", EuroSys 2023.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.core.errors import InputError, UnknownNameError

DEVICES = ("gpu", "cpu")
"""What encodes and decodes."""

PAIRS = {
    "reduce_scatter": "all_gather",
    "reduce": "broadcast",
    "all_to_all": "all_gather",
    "gather": "broadcast",
}
"""First step of divided communication -> the second one."""

DIVIDED = {False: ("reduce_scatter", "reduce"), True: ("all_to_all", "gather")}
"""Whether packets travel -> the first steps."""

WHOLE = {False: "all_reduce", True: "all_gather"}
"""Whether packets travel -> the one collective."""

Path = tuple[str, ...]
"""Actions, one after the other."""


def options(devices: Sequence[str] = DEVICES) -> Iterator[str]:
    """Yield all options whose codecs run on `devices`. Raises `InputError` where one is unknown or there are none."""
    if not devices or not set(devices) <= set(DEVICES) or len(set(devices)) < len(devices):
        raise InputError(f"devices are {','.join(devices)!r}; name gpu, cpu, or both: gpu,cpu.")
    return (" ".join(path) for path in _Tree(tuple(devices)).paths())


@dataclass(frozen=True, slots=True)
class _Tree:
    """The grammar: each method yields the ways to go on from one state, to the end of the option."""

    devices: tuple[str, ...]

    def paths(self) -> Iterator[Path]:
        """Yield every option: over all ranks at once, or inside hosts and between them."""
        yield ("flat.all_reduce",)
        for packed, head in ((False, ()), *((True, head) for head in self._on("encode"))):
            if packed:
                for tail in self._on("decode"):
                    yield (*head, "flat.all_gather", *tail)
            for first in DIVIDED[packed]:
                for tail in self._closing("flat", first, packed):
                    yield (*head, f"flat.{first}", *tail)
                for tail in self._between(first, packed):
                    yield (*head, f"inside.{first}", *tail)

    def _on(self, verb: str) -> Iterator[Path]:
        """Yield the coding action on each device."""
        for device in self.devices:
            yield (f"{device}.{verb}",)

    def _closing(self, place: str, first: str, packed: bool) -> Iterator[Path]:
        """Yield the last second step, after which the option ends raw."""
        second = f"{place}.{PAIRS[first]}"
        if packed:
            for tail in self._on("decode"):
                yield (second, *tail)
                for end in self._closing(place, first, False):
                    yield (*tail, *end)
            return
        yield (second,)
        for head in self._on("encode"):
            for tail in self._on("decode"):
                yield (*head, second, *tail)

    def _between(self, inside: str, packed: bool) -> Iterator[Path]:
        """Yield what follows the first step inside hosts: `inside` is that step."""
        if packed:
            for head in self._on("decode"):
                for tail in self._between(inside, False):
                    yield (*head, *tail)
            yield from self._packets_between(inside)
            return
        for tail in self._closing("inside", inside, False):
            yield ("between.all_reduce", *tail)
        for first in DIVIDED[False]:
            for tail in self._second_between(first, inside):
                yield (f"between.{first}", *tail)
        for head in self._on("encode"):
            for tail in self._packets_between(inside):
                yield (*head, *tail)

    def _packets_between(self, inside: str) -> Iterator[Path]:
        """Yield the ways of packets between hosts, and back inside."""
        for tail in self._closing("inside", inside, True):
            yield ("between.all_gather", *tail)
        for first in DIVIDED[True]:
            for head in self._on("decode"):
                for tail in self._second_between(first, inside):
                    yield (f"between.{first}", *head, *tail)
            for tail in self._closing("inside", inside, True):
                yield (f"between.{first}", f"between.{PAIRS[first]}", *tail)

    def _second_between(self, first: str, inside: str) -> Iterator[Path]:
        """Yield the second step between hosts from raw parts, and what follows inside."""
        second = f"between.{PAIRS[first]}"
        for tail in self._closing("inside", inside, False):
            yield (second, *tail)
        for head in self._on("encode"):
            for tail in self._closing("inside", inside, True):
                yield (*head, second, *tail)


OPTIONS: tuple[str, ...] = tuple(options())
"""All options on both devices."""

_KNOWN = frozenset(OPTIONS)


@dataclass(frozen=True, slots=True)
class OptionStep:
    """One action of an option, and what it finds. A tensor is cut into as many equal blocks as there are ranks."""

    place: str
    """`flat`, `inside`, `between`, or the device of a codec."""

    verb: str
    """A collective, `encode` or `decode`."""

    second: bool
    """Whether it is the second step of divided communication."""

    packed: bool
    """Whether packets are there, else raw blocks."""

    blocks: int
    """Blocks that an acting rank has before it."""

    packets: int
    """Packets of each block before it, of as many senders; 1 where blocks are raw."""

    at_roots: tuple[str, ...]
    """Places at whose roots alone the data is: other ranks wait."""


def checked_option(option: str) -> str:
    """Return an option of the tree; raises `UnknownNameError` with the nearest one."""
    if option not in _KNOWN:
        close = difflib.get_close_matches(option, OPTIONS, n=1, cutoff=0.3)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise UnknownNameError(f"unknown option {option!r}. {hint}All are listed by: headway comm options.")
    return option


def steps(option: str, ranks_per_host: int, hosts: int) -> list[OptionStep]:
    """Return what each action of an option finds.

    Raises `UnknownNameError` with the nearest option, `InputError` on counts below 1.
    """
    checked_option(option)
    if ranks_per_host < 1 or hosts < 1:
        raise InputError(f"there are {hosts} hosts of {ranks_per_host} ranks; give at least 1 of each.")
    sizes = {"flat": ranks_per_host * hosts, "inside": ranks_per_host, "between": hosts}
    blocks, packets, packed = sizes["flat"], 1, False
    divided: dict[str, tuple[str, int]] = {}
    found = []
    for action in option.split():
        place, verb = action.split(".")
        second = place in divided
        at_roots = tuple(one for one, (first, _) in divided.items() if PAIRS[first] == "broadcast")
        found.append(OptionStep(place, verb, second, packed, blocks, packets, at_roots))
        if verb in ("encode", "decode"):
            packed, packets = verb == "encode", 1
        elif second:
            blocks = divided.pop(place)[1]
        else:
            if verb in PAIRS:
                divided[place] = verb, blocks
                blocks = blocks // sizes[place] if PAIRS[verb] == "all_gather" else blocks
            packets *= sizes[place] if packed else 1
    return found
