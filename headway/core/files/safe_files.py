"""Files of strangers, opened, measured and decoded within bounds; and files that appear whole or not at all.

How much memory a file of strangers may cost to read: `FREE_BYTES`, and `PER_BYTE` bytes per byte of the file.

A few bytes can ask for gigabytes: a count, a compressed run, a container that
is named again and again. A reader of foreign bytes therefore adds up what it
is about to make, and stops with an error where honest files never come near.
The promise to the user is 64 MB + 8 n for a file of n bytes; what is counted
here stays below it, because estimates are not exact and text is kept as well.

>>> check_room(10**9, 300, "a.pkl", "containers")
Traceback (most recent call last):
headway.core.files.safe_files.RoomError: a.pkl asks for room for 1000000000 bytes of containers, and has 300 bytes: \
no program writes such a file. Use another copy.

Opens files that strangers left: regular ones only, so that no read waits for a writer that never comes.

A FIFO, a socket or a device in the place of a file would block a plain
`open` for good, or never end. `open_regular` refuses them before a byte is
read.

>>> import tempfile
>>> from pathlib import Path
>>> pipe = Path(tempfile.mkdtemp()) / "a.json"
>>> os.mkfifo(pipe)
>>> read_regular(pipe)
Traceback (most recent call last):
headway.core.errors.InputError: ...a.json is a FIFO, not a regular file. Name a file, or copy its content into one.

A file that appears whole or not at all.

Use it wherever a reader may meet the file while it is written, or where the
writer may be killed: the bytes go into a temporary file beside the target,
which a rename then puts in its place.

>>> import tempfile
>>> target = Path(tempfile.mkdtemp()) / "a.txt"
>>> with whole_file(target) as draft:
...     _ = draft.write_text("done")
...     target.exists()
False
>>> target.read_text()
'done'

JSON of strangers: decoded within bounds of depth and memory, and every fault is one `FormatError`.

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

YAML and TOML files that people write, read within bounds.

Such files are short; a long or deep one, or one that names a part of itself
again and again, is refused before it takes minutes or all memory.

>>> parse_yaml("a: [1, 2]", "a.yaml"), parse_toml("a = 1", "a.toml")
({'a': [1, 2]}, {'a': 1})
>>> parse_yaml("a: &x [1]\\nb: [*x, *x]", "a.yaml")
Traceback (most recent call last):
headway.core.errors.FormatError: a.yaml is no YAML that headway reads: it refers to a part of itself. Write it out.
"""

from __future__ import annotations

import csv
import errno
import functools
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from headway.core.errors import FormatError, InputError

FREE_BYTES = 48_000_000
"""Memory that a file of any size may cost."""

PER_BYTE = 7
"""Bytes of memory that each byte of a file may cost."""

MOST_UNPACKED_PER_BYTE = 100
"""Bytes that a packed byte may unpack to: traces reach 10 to 40, a run of one value 1,000."""

FREE_UNPACKED_BYTES = 16_000_000
"""Unpacked bytes that a packed file of any size may have."""


MOST = 1e15
"""Largest number that a file of a user's may hold: some 30 million years in seconds, or a petabyte."""


class RoomError(FormatError):
    """Reading a file would take more memory than its bytes are worth: nothing is said about whether it is whole."""


def room_for(num_bytes: int) -> int:
    """Return the bytes of memory that reading a file of `num_bytes` may cost."""
    return FREE_BYTES + PER_BYTE * num_bytes


def check_room(needed_bytes: int, num_bytes: int, where: str, what: str) -> None:
    """Raise `RoomError` where a file `where` of `num_bytes` asks for more memory than `room_for` it; `what` for."""
    if needed_bytes > room_for(num_bytes):
        raise RoomError(
            f"{where} asks for room for {needed_bytes} bytes of {what}, and has {num_bytes} bytes: no program writes "
            "such a file. Use another copy."
        )


def unpacked_room(packed_bytes: int) -> int:
    """Return how many bytes a packed file of `packed_bytes` may unpack to."""
    return FREE_UNPACKED_BYTES + MOST_UNPACKED_PER_BYTE * packed_bytes


def number_of(value: Any, where: str, *, least: float = 0.0, most: float = MOST) -> float:
    """Return the number that a cell of a table holds, or is; raises `FormatError` where it is none or out of range.

    >>> number_of("7.5", "queue.csv:2")
    7.5
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise FormatError(
            f"{where} has {str(value)[:60]!r} where a number from {least:g} to {most:g} belongs. Correct or remove the "
            "row."
        )
    return number


KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
"""Type of a file that is not regular -> what a person calls it."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises `InputError` where `path` is a FIFO, a socket or a device; `OSError` as `open` does, for a folder too.
    """
    # O_NONBLOCK: a FIFO without a writer opens at once and can be refused; it changes nothing for regular files.
    with _refused(path):
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_others(os.fstat(number).st_mode, path)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise as `open_regular` does, for readers that open the path themselves."""
    with _refused(path):
        mode = os.stat(path).st_mode
    _refuse_others(mode, path)


@contextmanager
def _refused(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says of a link to itself, or of a socket, into `InputError`."""
    try:
        yield
    except OSError as cause:
        if cause.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        what = "a link that leads to itself" if cause.errno == errno.ELOOP else "a socket"
        raise InputError(f"{path} is {what}, not a regular file. Name a file.") from cause


def _refuse_others(mode: int, path: str | os.PathLike[str]) -> None:
    kind = KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise InputError(f"{path} is {kind}, not a regular file. Name a file, or copy its content into one.")


def check_replaceable(path: str | os.PathLike[str], begin: bytes, what: str) -> None:
    """Raise `InputError` where writing `what`, which begins with `begin`, would replace a file of another content."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        head = file.read(256).lstrip().lower()
    if head and not head.startswith(begin):
        raise InputError(f"{path} exists and is no {what}: it is not overwritten. Name another file.")


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a table that another program wrote, whose names may be of people: UTF-8, else Latin-1.

    Raises as `open_regular` does.
    """
    data = read_regular(path).removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:  # any bytes are text in Latin-1
        return data.decode("latin-1").splitlines(keepends=True)


def read_table(
    path: str | os.PathLike[str], columns: Sequence[str] = (), delimiter: str = ",", *, fix: str = ""
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line, column -> text) of each row of a table with a header line; it has `columns` and maybe others.

    Raises `InputError` where it cannot be read, `FormatError` where a column is missing, which `fix` mends, or a row
    has too few.
    """
    try:
        table = csv.DictReader(read_lines(path), delimiter=delimiter, restval=None)
        names = list(table.fieldnames or ())
        if missing := [name for name in columns if name not in names]:
            mended = fix or f"Write a header with {', '.join(columns)}."
            raise FormatError(f"{path} has no column {missing[0]}. {mended}")
        for row in table:
            if None in row.values():
                raise FormatError(
                    f"{path}:{table.line_num} has fewer columns than the header. Complete the line or remove it."
                )
            yield table.line_num, row
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of a table.") from cause
    except csv.Error as cause:
        raise FormatError(f"{path}:{table.line_num}: {cause}. Correct that line.") from None


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Return the text of a regular file, `what` it should be in words; raises `InputError` where it cannot be read."""
    try:
        return read_regular(path).decode("utf-8")
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of {what}.") from cause
    except UnicodeDecodeError as cause:
        raise InputError(f"{path} is not text in UTF-8. Give the path of {what}.") from cause


@contextmanager
def parquet_faults(path: str | os.PathLike[str], *, fix: str = "Fetch or write the file again.") -> Iterator[None]:
    """Have whatever pyarrow raises while it reads `path` end as one `FormatError`, whose last sentence is `fix`.

    What is broken only shows where it is read: in the footer when the file is opened, in a page with its column.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError) as cause:
        reason = " ".join(str(cause).split()).rstrip(".")
        raise FormatError(f"{path} cannot be read as Parquet: {reason}. {fix}") from cause


# A file that appears whole or not at all.


def file_in_folder(path: str | Path) -> Path:
    """Return the path of a file that is to be written; raises `InputError` for a folder, and where its folder lacks."""
    target = Path(path)
    if not target.name or target.is_dir():
        raise InputError(f"{str(path)!r} is no name of a file that could be written. Name one.")
    if not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: the folder {target.parent} does not exist. Create it first.")
    return target


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield the path of a draft; rename it to `path` when the block ends, remove it when the block raises.

    Raises `InputError` as `file_in_folder` does.
    """
    target = file_in_folder(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # of a dead process of our number; or a link that somebody laid there to be followed
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


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
    except ValueError:  # msgspec's, and of half a surrogate, which no text may hold
        bad = {}
        for key, value in row.items():
            try:
                msgspec.convert({key: value}, kind, str_keys=True)
            except ValueError as cause:
                bad[str(key)] = str(cause)
        return msgspec.convert({key: row[key] for key in row if str(key) not in bad}, kind, str_keys=True), bad


MOST_TEXT_BYTES = 200_000
"""Characters of a file: the parsers take 10 to 20 microseconds for each."""


@functools.cache
def _loader() -> Any:
    """Return the safe loader without aliases, which can make a short text mean any amount of values."""
    import yaml  # commands that read none start without it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def compose_node(self, parent: Any, index: Any) -> Any:
            """Refuse an alias; compose anything else."""
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it refers to a part of itself. Write it out")
            return super().compose_node(parent, index)

    return Loader


def parse_yaml(text: str, where: str) -> Any:
    """Return what YAML says; `where` names the file in messages. Raises `FormatError`."""
    import yaml

    _check_size(text, where)
    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as cause:
        reason = " ".join(str(cause).split())
        raise FormatError(f"{where} is no YAML that headway reads: {reason}.") from cause


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return what TOML says; `where` names the file in messages. Raises `FormatError`."""
    import tomllib  # ranks start without it

    _check_size(text, where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as cause:
        raise FormatError(f"{where} is no TOML that headway reads: {cause}. Correct the file.") from cause


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a regular file of TOML says. Raises `InputError` where it cannot be read, else `FormatError`."""
    try:
        return parse_toml(read_regular(path).decode("utf-8"), str(path))
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of a TOML file.") from cause
    except UnicodeDecodeError as cause:
        raise FormatError(f"{path} is not TOML: {cause}. Correct that place.") from cause


def _check_size(text: str, where: str) -> None:
    if len(text) > MOST_TEXT_BYTES:
        raise FormatError(f"{where} has {len(text)} characters; at most {MOST_TEXT_BYTES} are read. Write a short one.")
