"""JSON of strangers: decoded within bounds of depth and memory, and every fault is one `FormatError`.

Use it for any JSON that did not come from this process: a deeply nested
text, a number of a million digits or a text of a million empty objects is
refused, never a `RecursionError` or gigabytes. `kind` is a type that msgspec
checks while it decodes; without one the standard library decodes, which also
takes the NaN that Python's own encoder writes. `converted` makes a Struct of
what was decoded, key by key, where a single bad value must not cost the rest.

>>> decode_json(b'{"a": [1, 2.5, null]}', "a.json")
{'a': [1, 2.5, None]}
>>> decode_json(b"[" * 200_000, "a.json")
Traceback (most recent call last):
headway.core.errors.FormatError: a.json is nested too deep for JSON that a program writes. Use another copy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from headway.core.errors import FormatError
from headway.core.files.bounds import check_room
from headway.core.files.regular_file import read_regular

if TYPE_CHECKING:
    import msgspec

    StructT = TypeVar("StructT", bound=msgspec.Struct)

OBJECT_BYTES, ARRAY_BYTES, ENTRY_BYTES, TEXT_BYTES = 200, 72, 40, 56
"""What a value costs in memory: an object with its table, an array, one entry of either, a text."""


def cost_of(text: bytes, object_bytes: int = OBJECT_BYTES) -> int:
    """Return an upper bound of the memory that JSON takes once it is decoded, in bytes.

    Brackets inside of texts are counted too: they are few in honest files.
    `object_bytes` is what an object becomes, where that is no dict.

    >>> cost_of(b'[{}, {}]') - len(b'[{}, {}]')
    512
    """
    parts = (b"{", object_bytes), (b"[", ARRAY_BYTES), (b",", ENTRY_BYTES), (b'"', TEXT_BYTES // 2)
    return len(text) + sum(text.count(mark) * cost for mark, cost in parts)


def decode_json(
    text: bytes | str, where: str, kind: Any = None, *, fix: str = "Use another copy.", file_bytes: int = 0
) -> Any:
    """Return what JSON text says; `where` names it in messages, `fix` is their last sentence.

    `file_bytes` is the size of the file that the text is a part of, in bytes, where it is larger than the text.
    Raises `FormatError` on text that is no JSON, is not of `kind`, is nested too deep or would take too much memory.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    check_room(cost_of(data), max(len(data), file_bytes), where, "JSON values")
    try:
        return json.loads(data) if kind is None else _typed(data, kind)
    except RecursionError:
        raise FormatError(f"{where} is nested too deep for JSON that a program writes. {fix}") from None
    except ValueError as cause:  # msgspec's errors are of this kind too
        end = f" (byte {len(data)})" if "truncated" in str(cause) else ""
        raise FormatError(f"{where} is not JSON that headway reads: {cause}{end}. {fix}") from cause


def _typed(data: bytes, kind: Any) -> Any:
    """Return JSON as msgspec decodes it: no copy of the text, and the types of `kind` are checked."""
    import msgspec  # ranks read their plan before the script starts, with the standard library only

    return msgspec.json.decode(data, type=kind)


def read_json(path: str | os.PathLike[str], kind: Any = None, *, fix: str = "Use another copy.") -> Any:
    """Return what a JSON file says. Raises `OSError` where it cannot be opened, else as `decode_json`."""
    return decode_json(read_regular(path), str(path), kind, fix=fix)


def converted(row: Mapping[Any, Any], kind: type[StructT]) -> tuple[StructT, dict[str, str]]:
    """Return a Struct made of the keys of `row` that have their type, and key -> what is wrong, for the others.

    Keys that `kind` does not know (those of a newer version) are ignored; a field that may be left out has a default.
    """
    import msgspec

    try:
        return msgspec.convert(row, kind, str_keys=True), {}
    except msgspec.ValidationError:
        bad = {}
        for key, value in row.items():
            try:
                msgspec.convert({key: value}, kind, str_keys=True)
            except msgspec.ValidationError as cause:
                bad[str(key)] = str(cause)
        return msgspec.convert({key: row[key] for key in row if str(key) not in bad}, kind, str_keys=True), bad
