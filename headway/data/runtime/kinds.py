"""Which types of objects a look can read whole: of any other, a change may go unseen.

An object of a Python class keeps its state in attributes and slots, and in what it has from a base in C. What such a
base adds shows in the sizes of both classes: memory that is neither a slot nor a dictionary of attributes is state
that only C sees. A type in C counts as readable if it is listed: because its objects never change, or because a look
reads what is in them. A class not listed, of whatever package, does not.

    class Rows:            attributes                                       readable
    class Scales(dict):    attributes, and the entries of a dict: listed    readable
    csv.writer             a file and a dialect, in C: not listed           not readable

>>> import csv, io
>>> is_readable(dict), is_readable(type(csv.writer(io.StringIO())))
(True, False)
"""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.runtime.reach import slots_of

IMMUTABLE = frozenset({
    "builtins.NoneType", "builtins.bool", "builtins.bytes", "builtins.code", "builtins.complex", "builtins.float",
    "builtins.int", "builtins.range", "builtins.slice", "builtins.str", "types.GenericAlias", "types.UnionType",
    "typing.TypeVar", "typing.ParamSpec", "typing.TypeVarTuple", "typing.TypeAliasType", "typing.Union",
    "builtins.getset_descriptor", "builtins.member_descriptor", "builtins.method_descriptor",
    "builtins.classmethod_descriptor", "builtins.wrapper_descriptor", "_abc._abc_data",
    "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta", "datetime.timezone",
    "datetime.tzinfo", "zoneinfo.ZoneInfo", "decimal.Decimal", "re.Pattern", "re.Match", "_regex.Pattern",
    "_struct.Struct", "enum.nonmember", "tiktoken._tiktoken.CoreBPE", "tokenizers.AddedToken", "pathlib.PurePath",
    "torch.dtype", "torch.device", "torch.layout", "torch.memory_format", "torch.qscheme", "torch.Size", "torch.finfo",
    "torch.iinfo", "numpy._ArrayFunctionDispatcher", "nanobind.nb_func", "nanobind.nb_method",
    "pyarrow.lib.DataType", "pyarrow.lib.Field", "pyarrow.lib.Schema", "pyarrow.lib.Scalar", "pyarrow.lib._Weakrefable",
})  # fmt: skip
"""Types in C whose objects do not change, or change nothing that reading gives."""

FOLLOWED = frozenset({
    "builtins.builtin_function_or_method", "builtins.classmethod", "builtins.function", "builtins.mappingproxy",
    "builtins.method", "builtins.method-wrapper", "builtins.module", "builtins.property", "builtins.staticmethod",
    "builtins.type", "builtins.dict_items", "builtins.dict_keys", "builtins.dict_values", "builtins.tuple",
    "functools.partial", "operator.attrgetter", "operator.itemgetter", "operator.methodcaller", "types.SimpleNamespace",
    "weakref.ReferenceType", "_thread._local",
})  # fmt: skip
"""Types in C of which `headway.runtime.reach` yields all that is in them."""

CONTAINERS = frozenset({
    "builtins.dict", "builtins.frozenset", "builtins.list", "builtins.set", "collections.OrderedDict",
    "collections.defaultdict", "collections.deque",
})  # fmt: skip
"""Types in C whose entries a look compares."""

PICTURED = frozenset({
    "_ctypes._CData", "_io.BytesIO", "_io.StringIO", "_thread.RLock", "_thread.lock", "array.array",
    "builtins.ImagingCore", "builtins.bytearray", "builtins.memoryview", "functools._lru_cache_wrapper",
    "numpy.ndarray", "torch._C.StorageBase", "torch._C.TensorBase", "pyarrow.lib.Array", "pyarrow.lib.Buffer",
    "pyarrow.lib.ChunkedArray", "pyarrow.lib.RecordBatch", "pyarrow.lib.Table", "pyarrow.lib._PandasConvertible",
    "pyarrow.lib._Tabular", "tokenizers.Tokenizer",
})  # fmt: skip
"""Types in C whose content `headway.data.runtime.contents` reads."""

WATCHED = frozenset({
    "_contextvars.ContextVar", "_io.BufferedRandom", "_io.BufferedReader", "_io.BufferedWriter", "_io.FileIO",
    "_io.TextIOWrapper", "_random.Random", "builtins.BaseException", "sqlite3.Connection", "torch._C.Generator",
    "numpy.random._generator.Generator", "numpy.random.bit_generator.BitGenerator", "numpy.random.mtrand.RandomState",
})  # fmt: skip
"""Types in C that others look at: generators (`draws`), files (`trial`, `aligned`), variables of a context."""

READABLE = IMMUTABLE | FOLLOWED | CONTAINERS | PICTURED | WATCHED

NUMBERED = (np.generic, np.dtype, np.random.BitGenerator)
"""Bases in C of many types that are all alike."""

TABLES = "pandas._libs."
"""Beginning of the modules in C whose objects are parts of tables, of which `reach` yields the columns."""

COMPILED = ("cython_function_or_method", "fused_cython_function")
"""What a function of a module in Cython is called; each module has a type of its own."""

ELSEWHERE = frozenset({
    "concurrent.futures._base.Executor", "ctypes.CDLL", "multiprocessing.connection._ConnectionBase",
    "multiprocessing.managers.BaseManager", "multiprocessing.managers.BaseProxy", "multiprocessing.process.BaseProcess",
    "subprocess.Popen",
})  # fmt: skip
"""Classes in Python whose state is in another process, or in a library in C."""

_INLINE_DICT, _INLINE_WEAKREFS = 1 << 4, 1 << 3
"""Flags of classes whose dictionary, or list of weak references, lies in front of the object: it takes none of its
size."""


@lru_cache(maxsize=4096)
def is_readable(kind: type) -> bool:
    """Tell whether a look reads all the state that objects of a class have."""
    if any(name_of(base) in ELSEWHERE for base in kind.__mro__):
        return False
    return all(_is_listed(base) for base in kind.__mro__ if has_own_memory(base))


def unreadable(value: Any) -> bool:
    """Tell whether a look misses state of this object, by its type or by what it points to."""
    kind: type = type(value)
    if not is_readable(kind):
        return not _is_of_numpy(value)
    return isinstance(value, _CData) and (bool(value._objects) or isinstance(value, POINTERS))


def _is_of_numpy(value: Any) -> bool:
    """Tell whether a universal function is one of numpy's own: `numpy.frompyfunc` makes others of code in Python."""
    return isinstance(value, np.ufunc) and getattr(np, value.__name__, None) is value


_CData: Any = ctypes.c_int.__mro__[-2]
_Function: Any = ctypes.CFUNCTYPE(None).__mro__[1]

POINTERS: tuple[Any, ...] = (
    ctypes._Pointer, _Function, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.py_object
)  # fmt: skip
"""Values of C that lead to memory elsewhere."""


def is_shared(value: Any) -> bool:
    """Tell whether an array or tensor lies in memory that processes share: a write of one is there for all at once.

    Files that are mapped have names, and are looked at by them.
    """
    if isinstance(value, torch.Tensor):
        has_storage = value.device.type == "cpu" and value.layout is torch.strided
        return has_storage and not is_traceable_wrapper_subclass(value) and value.untyped_storage().is_shared()
    owner = value
    while isinstance(owner, (np.ndarray, memoryview)):
        if isinstance(owner, np.memmap):
            return False
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    return isinstance(owner, mmap.mmap) or (isinstance(owner, _CData) and unreadable(owner))


def name_of(kind: type) -> str:
    """Return the name that lists have a class by."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_listed(kind: type) -> bool:
    if issubclass(kind, (type, BaseException, *NUMBERED)):
        return True
    if issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields"):  # such as the results of `os.stat`
        return True
    if kind.__module__.startswith(TABLES) or kind.__name__ in COMPILED:
        return True
    return name_of(kind) in READABLE


def has_own_memory(kind: type) -> bool:
    """Tell whether objects of a class have memory that its base, slots, and a dictionary do not account for."""
    base = kind.__base__
    if base is None:
        return False
    own = kind.__basicsize__ - base.__basicsize__ - 8 * (len(slots_of(kind)) - len(slots_of(base)))
    if kind.__dictoffset__ and not base.__dictoffset__ and not kind.__flags__ & _INLINE_DICT:
        own -= 8
    if kind.__weakrefoffset__ and not base.__weakrefoffset__ and not kind.__flags__ & _INLINE_WEAKREFS:
        own -= 8
    return own > 0 or kind.__itemsize__ != base.__itemsize__
