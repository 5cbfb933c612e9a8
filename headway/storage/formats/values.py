"""One value of a checkpoint that is no tensor: what it is, and how it is told in short and in full.

Values come out of `safe_pickle`, so they are plain, or a stand-in for an
object of which only the class, the arguments and the state are known.

>>> Value("epoch", 7).kind, Value("epoch", 7).text
('int', '7')
>>> Value("ids", list(range(1000))).text
'[0, 1, 2, 3, 4, 5, ...]'
"""

from __future__ import annotations

import reprlib
import sys
from dataclasses import dataclass
from typing import Any

from headway.storage.formats.safe_pickle import StandIn, path_of

ATOMS = (type(None), bool, int, float, complex, str, bytes)
"""Types of values that hold no others."""

MAKERS = ("._reconstruct", "._reconstructor")
"""Functions that make an object of the class that is their first argument: numpy's, copyreg's."""


@dataclass(frozen=True, slots=True)
class Value:
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
    def whole(self) -> str:
        """All of it as text: equal for values that are equal."""
        return repr(self.value) if isinstance(self.value, (list, tuple, *ATOMS)) else WHOLE.repr(self.value)

    def to_json(self) -> dict[str, Any]:
        """Return name, type and value: numbers, text and truth as they are, anything else in short."""
        plain = self.value is None or isinstance(self.value, (bool, int, float, str))
        return {"name": self.name, "type": self.kind, "value": self.value if plain else self.text}


class _Teller(reprlib.Repr):
    """The standard library's bounded repr, which also knows bytes and stand-ins."""

    def __init__(self, most: int, entries: int, depth: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = most
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = entries
        self.maxlevel = depth

    def repr_bytes(self, value: bytes, level: int) -> str:
        most = self.maxstring // 3
        return repr(value[:most]) + (f"... {len(value)} bytes" if len(value) > most else "")

    def repr_type(self, value: type, level: int) -> str:
        return path_of(value) or repr(value)

    def repr_StandIn(self, value: StandIn, level: int) -> str:  # noqa: N802 - reprlib looks for the type's own name
        if level <= 0:
            return f"{path_of(value)}(...)"
        state = [value.state] if value.state is not None else []
        held = [*value.args, *vars(value).get("entries", []), *state][: self.maxlist]
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
WHOLE = _Teller(sys.maxsize, sys.maxsize, 100)
