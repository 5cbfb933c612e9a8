"""Protobuf messages of formats that others define, made from a literal table of their fields.

Use it for a format whose schema is known: the table says each field's number
and type, the protobuf library does the rest; no code is generated and nothing
compiles. A message of the table that the file's version extends is read all
the same: unknown fields are skipped.

>>> made = message_classes("example", {"Point": {"x": (1, "int64"), "tags": (2, "*string")}})
>>> made["Point"].FromString(made["Point"](x=7, tags=["a"]).SerializeToString()).x
7
>>> list(delimited(b"\\x02\\x08\\x07", "a.bin"))
[(1, b'\\x08\\x07')]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from headway.core.errors import FormatError

Fields = Mapping[str, tuple[int, str]]
"""Field -> (number, type): a scalar type of protobuf or a message of the same table; '*' before it = repeated."""

REPEATED, OPTIONAL = 3, 1
MESSAGE_TYPE = 11

SCALARS: dict[str, int] = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "fixed64": 6, "fixed32": 7, "bool": 8, "string": 9,
    "bytes": 12, "uint32": 13, "sfixed32": 15, "sfixed64": 16, "sint32": 17, "sint64": 18,
}  # fmt: skip
"""Scalar type -> its number in protobuf's own descriptors. An enumeration is an int32."""

MOST_VARINT_BYTES = 10


def message_classes(package: str, messages: Mapping[str, Fields]) -> dict[str, Any]:
    """Return message name -> class. Fields are proto2's: what was not set is not written, and `HasField` tells."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            entry = message.field.add(name=field, number=number, label=REPEATED if kind[0] == "*" else OPTIONAL)
            plain = kind.removeprefix("*")
            entry.type = SCALARS.get(plain, MESSAGE_TYPE)
            if plain not in SCALARS:
                entry.type_name = f".{package}.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def delimited(data: bytes, where: str) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of each message in `data`, where every message stands behind its length.

    Raises `FormatError` with the byte offset when the data ends inside a message.
    """
    at = 0
    while at < len(data):
        size, begin = _varint(data, at, where)
        if begin + size > len(data):
            raise FormatError(
                f"{where} is truncated: the message at byte {begin} needs {size} bytes and {len(data) - begin} are "
                "left. Copy or write the file again."
            )
        yield begin, data[begin : begin + size]
        at = begin + size


def prefixed(message: bytes) -> bytes:
    """Return a serialised message with its length before it.

    >>> prefixed(b"a" * 300)[:2]
    b'\\xac\\x02'
    """
    size, prefix = len(message), bytearray()
    while size > 127:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + message


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    """Return the number at `at`, seven bits a byte, the lowest first, and the byte behind it."""
    value = 0
    for place, byte in enumerate(data[at : at + MOST_VARINT_BYTES]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise FormatError(f"{where} is damaged or truncated at byte {at}: no length stands there. Write the file again.")
