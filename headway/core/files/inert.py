"""What a pickle may be made into: inert stand-ins, plain containers, numbers; each counted before it is made.

`StandIn` is what every class and function becomes; `MAKERS` are the few
classes that are themselves, made here so that none is asked for more than
what is there already; `Room` counts memory, and what keys cost to hash. The
machine that uses them is `headway.core.files.unpickler`.

>>> room = Room(100)
>>> MAKERS[list](room, ((1, 2),)), MAKERS[set](room, ([3],))
([1, 2], {3})
>>> MAKERS[list](room, (range(10**8),))
Traceback (most recent call last):
TypeError: list is called with a range

Arrays of an NPZ file that a stranger may have written, read within bounds.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "a.npz"
>>> np.savez(path, power_w=[1.0, 2.0])
>>> read_arrays(path, ["power_w"])
[array([1., 2.])]
"""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import RoomError, check_room, read_regular, room_for, unpacked_room

LIST_BYTES, DICT_BYTES, SET_BYTES, TUPLE_BYTES = 72, 80, 232, 56
"""What an empty container costs in memory, with the collector's part."""

SLOT_BYTES, PAIR_BYTES, NUMBER_BYTES, KIND_BYTES = 9, 80, 32, 1600
"""What one more entry of a list, of a dict or set, a number, and a class of its own cost."""

FREE_KEY_PARTS = 100_000
"""Parts of keys that a pickle of any size may have: a tuple of three is three parts and itself."""

MOST_KEY_PARTS = 1_000
"""Parts that one key may have, which also bounds how deep it is: hashing is recursive, in C, and unguarded."""

LARGE_INT_BITS, LARGE_INT_PARTS = 61, 100
"""An integer of more bits is not its own hash, so a writer could choose many that collide: it counts as many parts."""


class StandIn:
    """What a pickle's global becomes: a call keeps its arguments, a state is kept, nothing runs.

    The class stands for the global itself (`torch.float32`), an instance for a call of it or an object of it.
    """

    __slots__ = ("args", "entries", "state")

    path = ""
    """The global: `module.name`."""

    args: tuple[Any, ...]
    """What it was called with."""

    state: Any
    """What the object's attributes were set to; None where they were not."""

    entries: list[tuple[Any, Any]] | tuple[()]
    """What the pickle adds to a subclass of dict, or, each with its index, to one of list."""

    def __new__(cls, *args: Any) -> StandIn:
        """Keep the arguments."""
        made = object.__new__(cls)
        made.args, made.state, made.entries = args, None, ()
        return made

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute out of the state, where the state is a dict of attributes."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class Room:
    """What a pickle in a file of `num_bytes` may still take."""

    def __init__(self, num_bytes: int) -> None:
        self.left = room_for(num_bytes)
        """Bytes of memory."""
        self.key_parts = FREE_KEY_PARTS + num_bytes
        """Parts of keys."""

    def spend(self, num_bytes: int) -> None:
        """Count memory that is about to be taken; raise `RoomError` where it is more than the pickle may take."""
        self.left -= num_bytes
        if self.left < 0:
            raise RoomError("it asks for more room than its bytes can fill")

    def put(self, target: Any, key: Any, value: Any) -> None:
        """Set an entry of a dict."""
        self.check_key(key)
        self.spend(PAIR_BYTES)
        target[key] = value

    def check_key(self, key: Any) -> None:
        """Raise `FormatError` for a key that would be dear to hash or to compare."""
        if isinstance(key, (str, bytes)):
            return
        parts, above = [key], 0
        while parts and above < MOST_KEY_PARTS:
            part = parts.pop()
            above += 1
            if isinstance(part, (tuple, frozenset)):
                parts += part
            elif isinstance(part, int) and part.bit_length() > LARGE_INT_BITS:
                above += LARGE_INT_PARTS + part.bit_length() // 1000
        self.key_parts -= above
        if parts or self.key_parts < 0:
            raise FormatError("it has keys of more parts than a program writes")


def _whole(kind: type, most: int) -> Callable[[Room, tuple[Any, ...]], Any]:
    """Return a maker of numbers: of at most `most` plain arguments."""

    def make(room: Room, args: tuple[Any, ...]) -> Any:
        if len(args) > most or not all(isinstance(arg, (int, float, str, bool, type(None))) for arg in args):
            raise TypeError(f"{kind.__name__} is called with what is no number")
        if any(isinstance(arg, str) and len(arg) > 100 for arg in args):
            raise ValueError("a number is longer than any that a program writes")
        room.spend(2 * NUMBER_BYTES + sum(arg.bit_length() // 4 for arg in args if isinstance(arg, int)))
        return kind(*args)

    return make


def _filled(kind: type) -> Callable[[Room, tuple[Any, ...]], Any]:
    """Return a maker of lists, tuples and sets: from one container that is there already."""

    def make(room: Room, args: tuple[Any, ...]) -> Any:
        if not args:
            room.spend(SET_BYTES)
            return kind()
        (entries,) = args
        if not isinstance(entries, (list, tuple, set, frozenset)):
            raise TypeError(f"{kind.__name__} is called with a {type(entries).__name__}")
        hashed = kind in (set, frozenset)
        room.spend(SET_BYTES + len(entries) * (PAIR_BYTES if hashed else SLOT_BYTES))
        if hashed:
            for entry in entries:
                room.check_key(entry)
        return kind(entries)

    return make


def _mapping(kind: type) -> Callable[[Room, tuple[Any, ...]], Any]:
    """Return a maker of dicts: empty ones, of pairs, or of another dict."""

    def make(room: Room, args: tuple[Any, ...]) -> Any:
        room.spend(3 * DICT_BYTES)
        if kind is defaultdict and args:
            args = args[1:]  # the factory would be called for a missing key; no reader asks for one
        made = kind()
        for entries in args:
            pairs = list(entries.items()) if isinstance(entries, dict) else entries
            if not isinstance(pairs, (list, tuple)):
                raise TypeError(f"{kind.__name__} is called with a {type(entries).__name__}")
            for key, value in pairs:
                room.put(made, key, value)
        return made

    return make


def _plain_object(room: Room, args: tuple[Any, ...]) -> Any:
    room.spend(TUPLE_BYTES)
    return object()


MAKERS: dict[type, Callable[[Room, tuple[Any, ...]], Any]] = {
    OrderedDict: _mapping(OrderedDict), defaultdict: _mapping(defaultdict), dict: _mapping(dict),
    set: _filled(set), frozenset: _filled(frozenset), list: _filled(list), tuple: _filled(tuple),
    complex: _whole(complex, 2), int: _whole(int, 2), float: _whole(float, 1), bool: _whole(bool, 1),
    slice: _whole(slice, 3), range: _whole(range, 3), object: _plain_object,
}  # fmt: skip
"""Class that is itself in a pickle -> how one is made of the arguments, without its own constructor's trust in them."""


def read_arrays(path: str | Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Return the arrays of these names. Raises `InputError` where the file cannot be read, `FormatError` otherwise."""
    try:
        packed = read_regular(path)
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of an NPZ file.") from cause
    try:
        size = sum(entry.file_size for entry in zipfile.ZipFile(io.BytesIO(packed)).infolist())
        check_room(size, unpacked_room(len(packed)), str(path), "arrays")
        with np.load(io.BytesIO(packed), allow_pickle=False) as found:
            if absent := [name for name in names if name not in found]:
                needed = ", ".join(names)
                raise FormatError(f"{path} has no array {absent[0]!r}; it needs {needed}. Write it so.")
            return [found[name] for name in names]
    except FormatError:
        raise
    except Exception as error:  # numpy's reader evaluates headers: foreign bytes make it raise anything
        raise FormatError(f"{path} cannot be read as NPZ: {error}. Write it with numpy.savez.") from error
