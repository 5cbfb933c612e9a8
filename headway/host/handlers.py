"""Which log handlers may be called later, on another thread, without anybody being able to tell.

A handler is code of the script's own: it may count, steer the training, raise,
draw random numbers. What the standard library writes to files and sockets is
known. Any other class is read: its methods may use what they were given, call
the standard library, and write to files of their own; a handler that stores
anything, raises, or reaches an object of the script is called where the
script logs, as ever. So is one that writes to stdout, stderr or into memory,
beside which the script prints and reads.

>>> import sys
>>> later(logging.NullHandler()), later(logging.StreamHandler(sys.stdout))
(None, 'StreamHandler writes to a stream that it shares with the script')
"""

from __future__ import annotations

import dis
import inspect
import io
import logging
import logging.handlers
import os
import socket
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

KNOWN = (
    logging.NullHandler, logging.FileHandler, logging.handlers.RotatingFileHandler,
    logging.handlers.TimedRotatingFileHandler, logging.handlers.WatchedFileHandler, logging.handlers.SocketHandler,
    logging.handlers.DatagramHandler, logging.handlers.SysLogHandler, logging.handlers.HTTPHandler,
    logging.handlers.SMTPHandler,
)  # fmt: skip
"""Handlers of the standard library whose effects are files and messages to other hosts."""

STREAMS = (logging.StreamHandler, logging.FileHandler)

MODULES = frozenset(
    {"time", "json", "datetime", "math", "re", "logging", "traceback", "socket", "urllib", "http", "ssl"}
)
"""Modules that a handler's code may use: none of them holds state that a training loop reads."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), PurePath, socket.socket)
"""Values that a handler may keep: nobody sees through them that it was called, or when."""

BUILTINS = frozenset({
    "str", "repr", "len", "int", "float", "min", "max", "round", "format", "isinstance", "getattr", "hasattr", "super",
    "dict", "list", "tuple", "bytes", "sorted", "enumerate", "zip", "range", "Exception", "OSError", "ValueError",
})  # fmt: skip
"""Builtins that a handler's code may use."""

STORES = frozenset({"STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_GLOBAL", "DELETE_ATTR", "DELETE_SUBSCR"})
"""Instructions that change what outlives the call."""

_BASE = {"lock", "level", "formatter", "filters", "_name", "_closed", "stream"}


def later(handler: logging.Handler) -> str | None:
    """Say why `handler` must be called where the script logs; None when a thread may call it later."""
    kind = type(handler)
    name = kind.__name__
    if isinstance(handler, STREAMS) and not isinstance(handler, KNOWN):
        return f"{name} writes to a stream that it shares with the script"
    base = next(kind for kind in type(handler).__mro__ if _is_of_logging(kind))
    if base is not logging.Handler and not issubclass(base, KNOWN):
        return f"{name} hands records to code or memory of the script"
    parts = [handler, *handler.filters, *([handler.formatter] if handler.formatter else [])]
    for part in parts:
        reason = _tells(part)
        if reason is not None:
            return f"{type(part).__name__} {reason}"
    return None


def files(handler: logging.Handler) -> Iterator[str]:
    """Yield the paths of the files that a handler writes to."""
    for value in vars(handler).values():
        named = getattr(value, "name", None)
        if isinstance(value, io.IOBase) and isinstance(named, str):
            yield os.path.abspath(named)
    if isinstance(handler, logging.FileHandler):
        yield handler.baseFilename


HARMLESS = frozenset({"__init__", "__repr__", "close", "__static_attributes__", "__firstlineno__"})
"""Members of a class that show nothing while records are handled; the last two are Python 3.13's own."""


def _tells(part: Any) -> str | None:
    """Say how somebody could tell when this handler, formatter or filter is called; None when it shows nowhere."""
    kinds = [kind for kind in type(part).__mro__ if not _is_of_logging(kind) and kind is not object]
    if not kinds:
        return None
    for name, value in vars(part).items():
        own = isinstance(value, io.IOBase) and not isinstance(value, (io.StringIO, io.BytesIO)) and _is_own(value)
        if name not in _BASE and not own and not isinstance(value, PLAIN) and not _from_logging(part, name):
            return f"keeps {name}, a {type(value).__name__}, which the script may read"
    for kind in kinds:
        for name, member in vars(kind).items():
            reason = None if name in HARMLESS else _acts(member, kinds)
            if reason is not None:
                return f"{reason} in {name}"
    return None


def _is_of_logging(kind: type) -> bool:
    """Whether the standard library's logging defines this class."""
    return kind.__module__.split(".")[0] == "logging"


def _from_logging(part: Any, name: str) -> bool:
    """Whether the attribute is one that a class of the standard library above this one keeps."""
    return isinstance(part, KNOWN) and name in ("mode", "encoding", "errors", "_builtin_open", "delay", "baseFilename")


def _is_own(file: Any) -> bool:
    """Whether a file is neither the script's input nor its output."""
    try:
        return int(file.fileno()) > 2
    except (OSError, ValueError):
        return False


def _acts(member: object, kinds: list[type]) -> str | None:
    """Say what a member of a class does that may show elsewhere; None for plain values and harmless methods."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        return "computes an attribute"
    if not isinstance(member, FunctionType):
        return None if isinstance(member, PLAIN) or inspect.isdatadescriptor(member) else "keeps an object"
    return _code_acts(member.__code__, member, kinds)


def _code_acts(code: CodeType, function: FunctionType, kinds: list[type]) -> str | None:
    """Look through the instructions of a function, and of those defined inside it."""
    for step in dis.get_instructions(code):
        if step.opname in STORES or step.opname.startswith("IMPORT_"):
            return f"changes {step.argval}"
        if step.opname == "RAISE_VARARGS":
            return "raises"
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and not _is_harmless(step.argval, function.__globals__, kinds):
            return f"uses {step.argval}"
        if step.opname in ("LOAD_DEREF", "STORE_DEREF") and step.argval not in ("__class__", *code.co_cellvars):
            return f"uses {step.argval} of the function around it"
        if isinstance(step.argval, CodeType):
            reason = _code_acts(step.argval, function, kinds)
            if reason is not None:
                return reason
    return None


def _is_harmless(name: str, names: dict[str, Any], kinds: list[type]) -> bool:
    """Whether a global that a handler uses says nothing to the script: a module of `MODULES`, a constant, itself."""
    if name not in names:
        return name in BUILTINS
    value = names[name]
    if isinstance(value, ModuleType):
        return value.__name__.split(".")[0] in MODULES
    if isinstance(value, type) or callable(value):
        return value in kinds or getattr(value, "__module__", "").split(".")[0] in MODULES
    return isinstance(value, PLAIN) and not isinstance(value, socket.socket)
