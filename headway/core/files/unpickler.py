"""A pickle machine that runs nothing and cannot be made to run away.

The standard unpickler calls what a pickle names, and trusts its numbers: 282
bytes make it build 4 GB, nested tuples as keys of a dict end the process.
Here every global is either an inert `StandIn`, one of the few containers and
numbers of `MAKERS`, or refused by the caller; every object that is made is
counted against the size of the pickle (`headway.core.files.safe_files`), and a key that
would be dear to hash is refused. All opcodes of the protocols 0 to 5 are
read, but for those that name something outside of the pickle. (In a child
under limits the standard unpickler were safe, but each record of a checkpoint
is a pickle: a round trip each is dearer, and ranks would have to fork.)

>>> import pickle
>>> unpickle(pickle.dumps({"a": [1, (2, "x")]}), 0, find=refuse_all, refer=refuse_all)[0]
{'a': [1, (2, 'x')]}
>>> unpickle(pickle.dumps(print), 0, find=refuse_all, refer=refuse_all)
Traceback (most recent call last):
headway.core.errors.FormatError: it wants builtins.print
"""

from __future__ import annotations

import codecs
import pickletools
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from headway.core.errors import FormatError
from headway.core.files.inert import (
    DICT_BYTES,
    KIND_BYTES,
    LIST_BYTES,
    MAKERS,
    NUMBER_BYTES,
    PAIR_BYTES,
    SET_BYTES,
    SLOT_BYTES,
    TUPLE_BYTES,
    Room,
    StandIn,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_NAME_BYTES = 1_000
"""Length of a global's module or name."""

Find = Callable[[str, str], Any]
"""Module and name of a global -> what stands for it: a subclass of `StandIn`, a key of `MAKERS`, or an error."""


UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)
"""What bytes that are no pickle raise, beside `FormatError`."""


def refuse_all(*wanted: Any) -> Any:
    """Refuse every global and every reference: for pickles that hold nothing but plain values."""
    raise FormatError(f"it wants {'.'.join(map(str, wanted))}")


def unpickle(
    data: Buffer, start: int, *, find: Find, refer: Callable[[Any], Any], room: Room | None = None
) -> tuple[Any, int]:
    """Return the value of the pickle that begins at byte `start`, and where the pickle ends.

    `find` is asked for every global, `refer` for every persistent reference; `room` is what the value may take, by
    default what the size of `data` allows. Raises `FormatError` on what is refused, and one of `UNREADABLE` on bytes
    that are no pickle.
    """
    return _Machine(bytes(data), start, find, refer, room or Room(memoryview(data).nbytes)).run()


_UINT16, _INT32, _UINT32, _UINT64, _DOUBLE = (struct.Struct(code) for code in ("<H", "<i", "<I", "<Q", ">d"))


class _Machine:
    """The stack, the memo, and what may still be spent."""

    def __init__(self, data: bytes, at: int, find: Find, refer: Callable[[Any], Any], room: Room) -> None:
        self.data, self.at, self.find, self.refer = data, at, find, refer
        self.room = room
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        """What was kept under the numbers 0, 1, 2, ... in that order."""
        self.scattered: dict[int, Any] = {}
        """What was kept under any other number."""
        self.names: dict[tuple[str, str], Any] = {}

    def run(self) -> tuple[Any, int]:
        """Execute until the pickle stops."""
        data, table, room = self.data, _TABLE, self.room
        while True:
            code = data[self.at]  # an IndexError where the pickle has no end
            self.at += 1
            if code == _STOP:
                return self.stack.pop(), self.at
            act = table[code]
            if act is None:
                raise ValueError(f"no opcode {bytes([code])!r} may stand at byte {self.at - 1}")
            act(self)
            if room.left < 0:
                room.spend(0)

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        stop = self.at + size
        if stop > len(self.data):
            raise FormatError(f"it asks for room for {size}")
        part = self.data[self.at : stop]
        self.at = stop
        return part

    def number(self, form: struct.Struct) -> Any:
        """Return the next number."""
        return form.unpack(self.take(form.size))[0]

    def line(self) -> bytes:
        """Return the bytes up to the end of the line."""
        stop = self.data.find(b"\n", self.at)
        if stop < 0:
            raise ValueError("a line has no end")
        part = self.data[self.at : stop]
        self.at = stop + 1
        return part

    def push(self, value: Any, cost: int) -> None:
        """Put a new value on the stack."""
        self.room.left -= cost + SLOT_BYTES  # the slot is given back when the value leaves the stack
        self.stack.append(value)

    def marked(self) -> list[Any]:
        """Return what was put on the stack since the last mark."""
        found = self.stack
        self.stack = self.marks.pop()
        self.room.left += LIST_BYTES + SLOT_BYTES * len(found)
        return found

    def pop(self) -> Any:
        """Return what is on top of the stack, without it."""
        self.room.left += SLOT_BYTES
        return self.stack.pop()

    def named(self, module: str, name: str) -> Any:
        """Return what stands for a global."""
        if len(module) > MOST_NAME_BYTES or len(name) > MOST_NAME_BYTES:
            raise FormatError("it names a global that no program has")
        if (module, name) not in self.names:
            self.room.spend(KIND_BYTES)
            self.names[module, name] = self.find(module, name)
        return self.names[module, name]

    def call(self, kind: Any, args: Any) -> Any:
        """Return what a call of a global, or a new object of it, is kept as."""
        if not isinstance(args, tuple) or not isinstance(kind, type):
            raise TypeError(f"a {type(kind).__name__} is called")
        if issubclass(kind, StandIn):
            self.room.left -= TUPLE_BYTES + (TUPLE_BYTES if args else 0)
            return kind(*args)
        return MAKERS[kind](self.room, args)

    def remember(self, number: int) -> None:
        """Keep what is on top of the stack under a number."""
        if number == len(self.memo):
            self.room.left -= SLOT_BYTES
            self.memo.append(self.stack[-1])
        elif number < len(self.memo):
            self.memo[number] = self.stack[-1]
        elif number > len(self.data):
            raise FormatError(f"it asks for room for {number}")
        else:
            self.room.left -= PAIR_BYTES
            self.scattered[number] = self.stack[-1]

    def recall(self, number: int) -> None:
        """Put what was kept under a number on the stack."""
        self.push(self.scattered[number] if number in self.scattered else self.memo[number], 0)


def _text(machine: _Machine, data: bytes) -> None:
    value = data.decode("utf-8", "surrogatepass")
    machine.push(value, value.__sizeof__() + 8)


def _old_text(machine: _Machine, data: bytes) -> None:
    """Push a str of Python 2, which pickles write as bytes without a code."""
    value = data.decode("utf-8")
    machine.push(value, value.__sizeof__() + 8)


def _bytes(machine: _Machine, data: bytes) -> None:
    machine.push(data, len(data) + 40)


def _long(machine: _Machine, data: bytes) -> None:
    machine.push(int.from_bytes(data, "little", signed=True), len(data) + NUMBER_BYTES)


def _signed_size(machine: _Machine) -> int:
    size = cast(int, machine.number(_INT32))
    if size < 0:
        raise ValueError("a length is negative")
    return size


def _int_line(machine: _Machine) -> None:
    line = machine.line()
    truth = {b"00": False, b"01": True}.get(line)
    machine.push(int(line, 0) if truth is None else truth, len(line) + NUMBER_BYTES)


def _float_line(machine: _Machine) -> None:
    line = machine.line()
    if len(line) > MOST_NAME_BYTES:  # or the error would write all of it out, in four bytes for each
        raise ValueError("a number is longer than any that a program writes")
    machine.push(float(line), NUMBER_BYTES)


def _string_line(machine: _Machine) -> None:
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b'"', b"'"):
        raise ValueError("a text has no quotes around it")
    _old_text(machine, codecs.escape_decode(line[1:-1])[0])


def _mark(machine: _Machine) -> None:
    machine.room.left -= LIST_BYTES
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.pop()
    else:
        machine.marked()


def _tuple(machine: _Machine, entries: list[Any]) -> None:
    machine.push(tuple(entries), TUPLE_BYTES + SLOT_BYTES * len(entries))


def _last(count: int) -> Callable[[_Machine], None]:
    def make(machine: _Machine) -> None:
        entries = machine.stack[-count:]
        if len(entries) < count:
            raise ValueError("a tuple has too few entries")
        machine.room.left += count * SLOT_BYTES
        del machine.stack[-count:]
        _tuple(machine, entries)

    return make


def _list(machine: _Machine, entries: list[Any]) -> None:
    machine.push(entries, LIST_BYTES + SLOT_BYTES * len(entries))


def _set_items(machine: _Machine, entries: list[Any]) -> None:
    if len(entries) % 2:
        raise ValueError("a dict has a key without a value")
    target = machine.stack[-1]
    if isinstance(target, StandIn):
        machine.room.spend(len(entries) // 2 * (TUPLE_BYTES + 3 * SLOT_BYTES))
        target.entries = [*target.entries] if isinstance(target.entries, tuple) else target.entries
        target.entries += zip(entries[::2], entries[1::2], strict=True)
    elif isinstance(target, dict):
        for key, value in zip(entries[::2], entries[1::2], strict=True):
            machine.room.put(target, key, value)
    else:
        raise TypeError(f"a {type(target).__name__} has no keys")


def _extend(machine: _Machine, entries: list[Any]) -> None:
    target = machine.stack[-1]
    machine.room.spend(SLOT_BYTES * len(entries))
    if isinstance(target, StandIn):
        machine.room.spend(len(entries) * (TUPLE_BYTES + 2 * SLOT_BYTES))
        target.entries = [*target.entries] if isinstance(target.entries, tuple) else target.entries
        target.entries += enumerate(entries, len(target.entries))
    elif isinstance(target, list):
        target += entries
    else:
        raise TypeError(f"a {type(target).__name__} takes no entries")


def _empty_dict(machine: _Machine, entries: list[Any]) -> None:
    machine.push({}, DICT_BYTES)
    _set_items(machine, entries)


def _add_items(machine: _Machine, entries: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, set):
        raise TypeError(f"a {type(target).__name__} is no set")
    machine.room.spend(PAIR_BYTES * len(entries))
    for entry in entries:
        machine.room.check_key(entry)
        target.add(entry)


def _frozen(machine: _Machine) -> None:
    machine.push(MAKERS[frozenset](machine.room, (machine.marked(),)), 0)


def _global(machine: _Machine) -> None:
    module, name = machine.line().decode("utf-8"), machine.line().decode("utf-8")
    machine.push(machine.named(module, name), 0)


def _stack_global(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise TypeError("the name of a global is no text")
    machine.push(machine.named(module, name), 0)


def _reduce(machine: _Machine) -> None:
    args, kind = machine.pop(), machine.pop()
    machine.push(machine.call(kind, args), 0)


def _new_with_keywords(machine: _Machine) -> None:
    keywords, args, kind = machine.pop(), machine.pop(), machine.pop()
    if not isinstance(keywords, dict):
        raise TypeError("the keywords of an object are no dict")
    machine.push(machine.call(kind, args), 0)


def _instance(machine: _Machine) -> None:
    module, name = machine.line().decode("utf-8"), machine.line().decode("utf-8")
    args = tuple(machine.marked())
    machine.push(machine.call(machine.named(module, name), args), SLOT_BYTES * len(args))


def _object(machine: _Machine) -> None:
    kind, *args = machine.marked()
    machine.push(machine.call(kind, tuple(args)), SLOT_BYTES * len(args))


def _build(machine: _Machine) -> None:
    state, target = machine.pop(), machine.stack[-1]
    if isinstance(target, StandIn):
        target.state = state
    elif not isinstance(target, (OrderedDict, defaultdict)):  # of these the attributes say nothing about the entries
        raise TypeError(f"a {type(target).__name__} is given a state")


def _refer(machine: _Machine, key: Any) -> None:
    machine.push(machine.refer(key), 0)


def _protocol(machine: _Machine) -> None:
    if machine.take(1)[0] > 5:
        raise ValueError("its protocol is newer than any")


def _frame(machine: _Machine) -> None:
    size = machine.number(_UINT64)
    if machine.at + size > len(machine.data):
        raise FormatError(f"it asks for room for {size}")


_ACTS: dict[str, Callable[[_Machine], None]] = {
    "PROTO": _protocol, "FRAME": _frame,
    "NONE": lambda m: m.push(None, 0), "NEWTRUE": lambda m: m.push(True, 0), "NEWFALSE": lambda m: m.push(False, 0),
    "INT": _int_line, "LONG": lambda m: m.push(int(line := m.line().removesuffix(b"L"), 0), len(line) + NUMBER_BYTES),
    "BININT": lambda m: m.push(m.number(_INT32), NUMBER_BYTES), "BININT1": lambda m: m.push(m.take(1)[0], 0),
    "BININT2": lambda m: m.push(m.number(_UINT16), NUMBER_BYTES),
    "LONG1": lambda m: _long(m, m.take(m.take(1)[0])), "LONG4": lambda m: _long(m, m.take(_signed_size(m))),
    "FLOAT": _float_line, "BINFLOAT": lambda m: m.push(m.number(_DOUBLE), 24),
    "STRING": _string_line, "BINSTRING": lambda m: _old_text(m, m.take(_signed_size(m))),
    "SHORT_BINSTRING": lambda m: _old_text(m, m.take(m.take(1)[0])),
    "UNICODE": lambda m: _text(m, m.line().decode("raw-unicode-escape").encode("utf-8", "surrogatepass")),
    "BINUNICODE": lambda m: _text(m, m.take(m.number(_UINT32))),
    "SHORT_BINUNICODE": lambda m: _text(m, m.take(m.take(1)[0])),
    "BINUNICODE8": lambda m: _text(m, m.take(m.number(_UINT64))),
    "BINBYTES": lambda m: _bytes(m, m.take(m.number(_UINT32))),
    "SHORT_BINBYTES": lambda m: _bytes(m, m.take(m.take(1)[0])),
    "BINBYTES8": lambda m: _bytes(m, m.take(m.number(_UINT64))),
    "BYTEARRAY8": lambda m: m.push(bytearray(part := m.take(m.number(_UINT64))), len(part) + 64),
    "MARK": _mark, "POP": _pop, "POP_MARK": lambda m: (m.marked(), None)[1],
    "DUP": lambda m: m.push(m.stack[-1], 0),
    "EMPTY_TUPLE": lambda m: m.push((), 0), "TUPLE": lambda m: _tuple(m, m.marked()),
    "TUPLE1": _last(1), "TUPLE2": _last(2), "TUPLE3": _last(3),
    "EMPTY_LIST": lambda m: m.push([], LIST_BYTES), "LIST": lambda m: _list(m, m.marked()),
    "APPEND": lambda m: _extend(m, [m.pop()]), "APPENDS": lambda m: _extend(m, m.marked()),
    "EMPTY_DICT": lambda m: m.push({}, DICT_BYTES), "DICT": lambda m: _empty_dict(m, m.marked()),
    "SETITEM": lambda m: _set_items(m, [m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m: _set_items(m, m.marked()),
    "EMPTY_SET": lambda m: m.push(set(), SET_BYTES), "ADDITEMS": lambda m: _add_items(m, m.marked()),
    "FROZENSET": _frozen, "GLOBAL": _global, "STACK_GLOBAL": _stack_global, "REDUCE": _reduce, "NEWOBJ": _reduce,
    "NEWOBJ_EX": _new_with_keywords, "INST": _instance, "OBJ": _object, "BUILD": _build,
    "PERSID": lambda m: _refer(m, m.line().decode("ascii")), "BINPERSID": lambda m: _refer(m, m.pop()),
    "PUT": lambda m: m.remember(_place(m)), "GET": lambda m: m.recall(_place(m)),
    "BINPUT": lambda m: m.remember(m.take(1)[0]), "BINGET": lambda m: m.recall(m.take(1)[0]),
    "LONG_BINPUT": lambda m: m.remember(m.number(_UINT32)), "LONG_BINGET": lambda m: m.recall(m.number(_UINT32)),
    "MEMOIZE": lambda m: m.remember(len(m.memo) + len(m.scattered)),
}  # fmt: skip
"""Name of an opcode in the standard library's table -> what it does; one that is not listed is refused."""


def _place(machine: _Machine) -> int:
    """Return the number of a place in the memo that is written as text."""
    digits = machine.line()
    if not digits.isdigit() or len(digits) > 20:
        raise FormatError(f"it asks for room for {digits[:20].decode('latin-1')}")
    return int(digits)


_CODES = {op.name: ord(op.code) for op in pickletools.opcodes}
_STOP = _CODES["STOP"]
_TABLE: list[Callable[[_Machine], None] | None] = [None] * 256
for _name, _act in _ACTS.items():
    _TABLE[_CODES[_name]] = _act
