"""What a checkpoint holds: values that are no tensors, in short and in full, and the element types of those that are.

Values come out of `safe_pickle`, so they are plain, or a stand-in for an
object of which only the class, the arguments and the state are known.

>>> StoredValue("epoch", 7).kind, StoredValue("epoch", 7).text
('int', '7')
>>> StoredValue("ids", list(range(1000))).text
'[0, 1, 2, 3, 4, 5, ...]'

Element types go by their names in torch; the tables have their sizes, and what other formats call them.

>>> ITEM_BYTES["bfloat16"], FROM_SAFETENSORS["F8_E4M3"], STORAGE_DTYPES["HalfStorage"]
(2, 'float8_e4m3fn', 'float16')
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from headway.core.errors import FormatError
from headway.core.files.inert import StandIn
from headway.storage.formats.safe_pickle import path_of

ITEM_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "qint8": 1, "quint8": 1, "qint32": 4,
}  # fmt: skip
"""Name of a dtype in torch -> bytes of one element."""

STORAGE_DTYPES: dict[str, str] = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32", "DoubleStorage": "float64", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32", "UntypedStorage": "uint8",
}  # fmt: skip
"""Class of a storage in a torch.save file -> dtype of its elements."""

FROM_SAFETENSORS: dict[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Name of a dtype in safetensors -> its name in torch."""


ATOMS = (type(None), bool, int, float, complex, str, bytes)
"""Types of values that hold no others."""

MOST_BITS = 12_000
"""An integer of more is told by its first bits: Python refuses to write one of more than 4,300 digits as text."""

MOST_LEVELS = 300
"""Values in each other, when they are compared."""

MAKERS = ("._reconstruct", "._reconstructor")
"""Functions that make an object of the class that is their first argument: numpy's, copyreg's."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value of a checkpoint that is no tensor."""

    name: str
    """The keys that lead to it, joined by dots; "" where it is all there is."""

    value: Any
    """What the pickle says it is; a `StandIn` for an object."""

    @property
    def kind(self) -> str:
        """Its type, or the class or function that its pickle names: `float`, `argparse.Namespace`, `torch.float16`."""
        path = path_of(self.value)
        if path.endswith(MAKERS) and self.value.args:
            path = path_of(self.value.args[0]) or path
        return path or type(self.value).__name__

    @property
    def text(self) -> str:
        """The value in short, on one line; of an object the plain values that it was called with."""
        if isinstance(self.value, StandIn):
            plain = all(isinstance(entry, (*ATOMS, tuple)) for entry in self.value.args)
            return ", ".join(SHORT.repr(entry) for entry in self.value.args) if plain else ""
        return "" if path_of(self.value) else SHORT.repr(self.value)

    @property
    def digest(self) -> bytes:
        """What is equal for values that are equal, whatever bytes say them, and differs for others."""
        return _Digester().of(self.value)

    def to_json(self) -> dict[str, object]:
        """Return name, type and value: numbers, text and truth as they are, anything else in short."""
        plain = self.value is None or isinstance(self.value, (bool, float, str))
        plain = plain or (isinstance(self.value, int) and self.value.bit_length() <= MOST_BITS)
        return {"name": self.name, "type": self.kind, "value": self.value if plain else self.text}


class _Digester:
    """Hashes values without writing them out: a container that is named again and again is hashed once."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    def of(self, value: Any, depth: int = 0) -> bytes:
        """Return the digest of a value; one that holds itself is hashed as far as it is new."""
        if isinstance(value, ATOMS) and not isinstance(value, (str, bytes)):
            return _hashed(type(value).__name__, _number_text(value))
        if id(value) in self._known:
            return self._known[id(value)]
        if depth > MOST_LEVELS:
            raise FormatError(f"a value has more than {MOST_LEVELS} values in each other. Load it with torch.")
        self._known[id(value)] = b"around"
        self._known[id(value)] = found = _hashed(*self._parts(value, depth + 1))
        return found

    def _parts(self, value: Any, depth: int) -> Iterator[bytes | str]:
        """Yield what tells a value from others."""
        yield path_of(value) or type(value).__name__
        if isinstance(value, str):
            yield value.encode("utf-8", "surrogatepass")
        elif isinstance(value, (bytes, bytearray)):
            yield bytes(value)
        elif isinstance(value, StandIn):
            yield from (self.of(part, depth) for part in (value.args, value.state, value.entries))
        elif isinstance(value, dict):
            yield from sorted(self.of(key, depth) + self.of(entry, depth) for key, entry in value.items())
        elif isinstance(value, (set, frozenset)):
            yield from sorted(self.of(entry, depth) for entry in value)
        elif isinstance(value, (list, tuple)):
            yield from (self.of(entry, depth) for entry in value)
        elif isinstance(value, (range, slice)):
            yield from (self.of(number, depth) for number in (value.start, value.stop, value.step))


def _hashed(*parts: bytes | str) -> bytes:
    """Return the digest of parts, each told from the next by its length."""
    found = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()


def _number_text(value: Any) -> str:
    return hex(value) if isinstance(value, int) else repr(value)


class _Teller(reprlib.Repr):
    """The standard library's bounded repr, which also knows bytes, stand-ins and integers of any size."""

    def __init__(self, most: int, entries: int, depth: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = most
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = entries
        self.maxlevel = depth

    def repr_int(self, value: int, level: int) -> str:
        bits = value.bit_length()
        return super().repr_int(value, level) if bits <= MOST_BITS else f"{value >> (bits - 64):#x}... of {bits} bits"

    def repr_OrderedDict(self, value: dict[Any, Any], level: int) -> str:  # noqa: N802 - reprlib looks for this name
        return f"OrderedDict({self.repr_dict(value, level)})"

    def repr_defaultdict(self, value: dict[Any, Any], level: int) -> str:
        return f"defaultdict({self.repr_dict(value, level)})"

    def repr_bytes(self, value: bytes, level: int) -> str:
        most = self.maxstring // 3
        return repr(value[:most]) + (f"... {len(value)} bytes" if len(value) > most else "")

    def repr_type(self, value: type, level: int) -> str:
        return path_of(value) or repr(value)

    def repr_StandIn(self, value: StandIn, level: int) -> str:  # noqa: N802 - reprlib looks for the type's own name
        if level <= 0:
            return f"{path_of(value)}(...)"
        state = [value.state] if value.state is not None else []
        held = [*value.args, *value.entries, *state][: self.maxlist]
        return f"{path_of(value)}({', '.join(self.repr1(entry, level - 1) for entry in held)})"


def plain(value: Any) -> Any:
    """Return the bytes that a pickle of torch's protocol writes as a call, and anything else as it is.

    >>> from headway.storage.formats.safe_pickle import Call, Global, dumps, loads
    >>> plain(loads(dumps(Call(Global("_codecs", "encode"), ("ab", "latin1"))), "a.pkl"))
    b'ab'
    """
    if not (isinstance(value, StandIn) and path_of(value) == "_codecs.encode" and value.args[1:] == ("latin1",)):
        return value
    try:
        return value.args[0].encode("latin1")
    except (AttributeError, UnicodeEncodeError):
        return value


SHORT = _Teller(56, 6, 3)
