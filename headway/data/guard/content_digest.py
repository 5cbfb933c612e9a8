"""A digest of an object by what is in it, equal in every process that built it in the same way.

Two jobs that name one data server by it read the same data: their datasets
have the same classes and functions (by their code), attributes, files and
arrays. What says nothing about the data is left out: random generators, locks,
open connections. Long containers are seen by some of their entries, arrays
beyond 64 MB by some of their bytes, a global that a function reads not at all:
a dataset that differs only there says so with `fingerprint()` of its own.

>>> portrait([1, {"a": torch.zeros(3)}]) == portrait([1, {"a": torch.zeros(3)}])
True
>>> portrait(lambda x: x + 1) == portrait(lambda x: x + 2)
False
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

from headway.runtime.script.object_graph import closure_of, slots_of

MOST_VALUES = 1 << 16
"""Values that are looked into; of what comes later only type and length count."""

MOST_ENTRIES = 1024
"""A longer container is seen by so many of its entries, evenly spread."""

MOST_BYTES = 1 << 26
"""A larger array is seen by one page in several."""

_PAGE = 4096
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_OPAQUE = ("_thread", "threading", "multiprocessing", "ctypes", "queue", "weakref", "logging", "io", "_io", "socket")
"""Modules whose objects are handles: they say how data is reached, not what it is."""


def portrait(value: object) -> str:
    """Return 32 hexadecimal digits; raises nothing, whatever `value` is."""
    digest = xxhash.xxh3_128()
    for token in _ObjectWalk().tokens(value):
        digest.update(len(token).to_bytes(8, "little"))
        digest.update(token)
    return digest.hexdigest()


class _ObjectWalk:
    """One walk over an object: every part is looked into once."""

    def __init__(self) -> None:
        self._left = MOST_VALUES
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []

    def tokens(self, value: Any) -> Iterator[bytes]:
        """Yield what tells `value` from others."""
        self._left -= 1
        kind = type(value)
        yield kind.__qualname__.encode()  # its module is __main__ in the script, and has a name elsewhere
        if isinstance(value, (bool, int, float, complex, type(None), range, slice, PurePath, np.dtype, torch.dtype)):
            yield repr(value).encode()
        elif isinstance(value, str):
            yield value.encode(errors="surrogatepass")
        elif isinstance(value, (bytes, bytearray)):
            yield bytes(value)
        elif isinstance(value, np.generic):
            yield value.tobytes()
        elif not isinstance(value, _GENERATORS) and self._is_new(value):
            yield from self._inside(value)

    def _inside(self, value: Any) -> Iterator[bytes]:
        """Yield what is in an object that was not met before."""
        if isinstance(value, torch.Tensor):
            yield f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
            if value.layout is torch.strided and value.device.type == "cpu" and value.numel():
                plain = value.detach().resolve_conj().resolve_neg().contiguous()
                yield from _memory(plain.view(-1).view(torch.uint8).numpy())
        elif isinstance(value, np.ndarray):
            yield from self._array(value)
        elif isinstance(value, (type, FunctionType, CodeType, MethodType, BuiltinFunctionType, ModuleType, partial)):
            yield from self._code(value)
        elif isinstance(value, Mapping):
            yield from self._entries(len(value), (part for entry in value.items() for part in entry), 2)
        elif isinstance(value, (set, frozenset)):
            apart = sorted(portrait(part) for part in islice(value, MOST_ENTRIES)) if len(value) <= MOST_ENTRIES else []
            yield f"{len(value)} {apart}".encode()
        elif isinstance(value, (list, tuple)):
            step = max(len(value) // MOST_ENTRIES, 1)
            yield from self._entries(len(value), value[::step], 1)
        if type(value).__module__.split(".")[0] not in _OPAQUE:
            yield from self._attributes(value)

    def _array(self, value: np.ndarray[Any, Any]) -> Iterator[bytes]:
        yield f"{value.dtype} {value.shape}".encode()
        if isinstance(value, np.memmap) or isinstance(value.base, np.memmap):
            file: Any = value if isinstance(value, np.memmap) else value.base
            yield f"{file.filename} {file.offset}".encode()  # a file's content is not read for its name
        elif value.dtype.hasobject:
            yield from self._entries(value.size, value.ravel()[:MOST_ENTRIES].tolist(), 1)
        elif value.size:
            yield from _memory(np.ascontiguousarray(value).reshape(-1).view(np.uint8))

    def _code(self, value: Any) -> Iterator[bytes]:
        """Yield what a function or class does, wherever its file lies."""
        if isinstance(value, CodeType):
            yield value.co_code
            yield repr((value.co_names, value.co_varnames)).encode()
            yield from self._entries(len(value.co_consts), value.co_consts, 1)
        elif isinstance(value, FunctionType):
            parts = [value.__code__, value.__defaults__, value.__kwdefaults__]
            cells = closure_of(value)
            yield from self._entries(0, [*parts, cells], 1)
        elif isinstance(value, MethodType):
            yield from self._entries(0, [value.__self__, value.__func__], 1)
        elif isinstance(value, partial):
            yield from self._entries(0, [value.func, value.args, value.keywords], 1)
        elif isinstance(value, type):
            yield value.__qualname__.encode()
            methods = [part for kind in value.__mro__ for _, part in sorted(vars(kind).items())]
            yield from self._entries(0, [part for part in methods if isinstance(part, FunctionType)], 1)
        else:
            yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".encode()

    def _attributes(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, (type, FunctionType, CodeType, MethodType, BuiltinFunctionType, ModuleType, partial)):
            return
        kind: type = type(value)
        slots = {name: getattr(value, name, None) for name in slots_of(kind)}
        found = {**slots, **getattr(value, "__dict__", {})}
        if found or type(value).__module__ != "builtins":
            yield from self.tokens(type(value))
        yield from self._entries(len(found), (part for entry in sorted(found.items()) for part in entry), 2)

    def _entries(self, size: int, parts: Iterable[Any], width: int) -> Iterator[bytes]:
        yield str(size).encode()
        for part in islice(parts, MOST_ENTRIES * width):
            if self._left <= 0:
                return
            yield from self.tokens(part)

    def _is_new(self, value: object) -> bool:
        """Note an object by the order in which it was met; the identity itself says nothing elsewhere."""
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)  # or its identity could be another's a moment later
        return True


def _memory(raw: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """Yield a hash of [n] uint8, all of it or a page in several."""
    if raw.size <= MOST_BYTES:
        yield xxhash.xxh3_128_digest(raw.data)
        return
    pages = raw[: raw.size // _PAGE * _PAGE].reshape(-1, _PAGE)
    yield xxhash.xxh3_128_digest(np.ascontiguousarray(pages[:: -(-raw.size // MOST_BYTES)]).data)
