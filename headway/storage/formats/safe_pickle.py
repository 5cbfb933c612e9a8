"""Pickles of checkpoints, read and written without torch and without running anything.

A pickle may name any function and have it called. Here a name never becomes
the thing it names: every allowed global turns into a fresh, inert class
(`headway.core.files.inert.StandIn`), whose call keeps its arguments and whose state
is kept as data; a few plain containers of the standard library are
themselves. A global that is not allowed is an error that names it. The other way round, `dumps` writes
plain values, and calls and instances of named classes, as protocol 4; so
DCP's `.metadata` can be written where there is no torch.

>>> data = dumps(Call(Global("torch", "Size"), ((2, 3),)))
>>> loads(data, "a.pkl").path, loads(data, "a.pkl").args
('torch.Size', ((2, 3),))
>>> loads(dumps(Call(Global("os", "system"), ("true",))), "a.pkl")
Traceback (most recent call last):
headway.core.errors.FormatError: a.pkl calls os.system, which no checkpoint needs: it may be an attack. Load it only \
with torch, and only if you trust its writer.

What torch's own `weights_only` loading lets a pickle name: whatever else a file names runs when it is trusted.

Reading a file here runs nothing; loading it elsewhere may. So whoever checks
a file is told what its pickle would have called: a list of names out of
torch 2.13, held to torch's own by a test. Classes that torch adds to its
list when `torch.distributed.tensor` is imported count as allowed.

>>> refused({"torch.Size", "posix.system", "__builtin__.set", "__builtin__.eval"})
['builtins.eval', 'posix.system']
>>> what_runs({"posix.system"}, "loading x.pt with weights_only=False")
'loading x.pt with weights_only=False runs posix.system'
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.core.errors import FormatError, InputError
from headway.core.files.inert import Room, StandIn
from headway.core.files.safe_files import RoomError
from headway.core.files.unpickler import UNREADABLE, unpickle

if TYPE_CHECKING:
    from typing_extensions import Buffer

REAL: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    **{(module, name): kind for module in ("builtins", "__builtin__") for name, kind in {
        "set": set, "frozenset": frozenset, "complex": complex, "slice": slice, "range": range, "list": list,
        "dict": dict, "tuple": tuple, "object": object, "int": int, "float": float, "bool": bool,
    }.items()},
}  # fmt: skip
"""Globals that are what they say: containers and numbers, whose making can do no harm."""

ALLOWED: dict[str, frozenset[str]] = {
    "torch": frozenset({
        "Size", "device", "dtype", "Tensor", "BoolStorage", "ByteStorage", "CharStorage", "ShortStorage", "IntStorage",
        "LongStorage", "HalfStorage", "BFloat16Storage", "FloatStorage", "DoubleStorage", "ComplexFloatStorage",
        "ComplexDoubleStorage", "QInt8Storage", "QUInt8Storage", "QInt32Storage", "float64", "float32", "float16",
        "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
        "complex32", "complex64", "complex128", "qint8", "quint8", "qint32", "strided", "per_tensor_affine",
        "per_channel_affine", "sparse_coo", "sparse_csr", "contiguous_format", "preserve_format", "channels_last",
    }),
    "torch.storage": frozenset({"UntypedStorage", "TypedStorage", "_load_from_bytes"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.nn.parameter": frozenset({"Parameter", "Buffer", "UninitializedParameter"}),
    "torch.utils._device": frozenset(),
    "torch._C": frozenset({"DisableTorchFunctionSubclass"}),
    "torch._tensor": frozenset({"_rebuild_from_type_v2"}),
    "torch._utils": frozenset({
        "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
        "_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor",
        "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor", "_rebuild_device_tensor_from_numpy",
        "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_wrapper_subclass",
    }),
    "torch.distributed.checkpoint.metadata": frozenset({
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    }),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint._fsspec_filesystem": frozenset({"_StorageInfo"}),
    "torch.distributed.checkpoint.planner_helpers": frozenset(),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset({"MEM_FORMAT_ENCODING", "TensorProperties"}),
    "torch.distributed.tensor": frozenset({"DTensor"}),
    "torch.distributed.tensor._dtensor_spec": frozenset({"DTensorSpec", "TensorMeta"}),
    "torch.distributed.tensor.placement_types": frozenset({"Shard", "Replicate", "Partial", "_StridedShard"}),
    "torch.distributed.device_mesh": frozenset({"DeviceMesh"}),
    "pathlib": frozenset({"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}),
    "numpy": frozenset({"dtype", "ndarray"}),
    "numpy.core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy._core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy._core.numeric": frozenset({"_frombuffer"}),
    "_codecs": frozenset({"encode"}),
    "datetime": frozenset({"datetime", "date", "time", "timedelta", "timezone"}),
    "argparse": frozenset({"Namespace"}),
    "copyreg": frozenset({"_reconstructor"}),
}  # fmt: skip
"""Module -> names that a checkpoint may use; each becomes a `StandIn` of its own, nothing is imported."""


MEMORY_FORMATS = {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}
ENUMS: dict[str, dict[str, int]] = {
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": MEMORY_FORMATS,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": MEMORY_FORMATS,
}
"""Enumeration -> its members and their values. Python 3.11.0 to 3.11.3 pickle a member as `getattr(enumeration, name)`,
the others as `enumeration(value)`."""


class _RefusedError(FormatError):
    """A pickle asks for what it may not have: the message is whole but for the file's name before it."""


def _refused(path: str) -> _RefusedError:
    """Return the error for a global that no checkpoint needs."""
    return _RefusedError(
        f"calls {path}, which no checkpoint needs: it may be an attack. Load it only with torch, and only if you trust "
        "its writer."
    )


class _EnumMember(StandIn):
    """Stands for `getattr`: its only legal call names a member of an enumeration, and makes that member's stand-in."""

    __slots__ = ()
    path = "builtins.getattr"

    def __new__(cls, *args: Any) -> Any:
        """Return the stand-in that `enumeration(value)` makes; raise `_RefusedError` for any other attribute."""
        if len(args) == 2 and isinstance(args[0], type) and isinstance(args[1], str):
            enumeration, name = args
            value = ENUMS.get(path_of(enumeration), {}).get(name)
            if value is not None:
                return enumeration(value)
        raise _refused(cls.path)


class _Finder:
    """Says what stands for each global that a pickle names."""

    def __init__(self, lenient: bool, named: set[str]) -> None:
        self._lenient, self._named = lenient, named

    def __call__(self, module: str, name: str) -> Any:
        """Return the inert class that stands for a global."""
        self._named.add(f"{module}.{name}")
        if (module, name) in REAL:
            return REAL[module, name]
        if not self._lenient:
            if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
                return _EnumMember
            if name not in ALLOWED.get(module, ()):
                raise _refused(f"{module}.{name}")
        return type("StandIn", (StandIn,), {"path": f"{module}.{name}", "__slots__": ()})

    def refuse(self, key: Any) -> Any:
        """Refuse a reference to a storage."""
        raise _RefusedError("refers to storages outside of it. Name a torch.save file to read those.")


def _reference(key: Any) -> Any:
    """Return the reference to a storage (a tuple), or to a module's class (before torch 1.6), as it stands."""
    return key[1] if isinstance(key, tuple) and key[:1] == ("module",) else key


def load_from(
    data: Buffer,
    start: int,
    name: str,
    *,
    lenient: bool = False,
    persistent: bool = False,
    named: set[str] | None = None,
    room: Room | None = None,
) -> tuple[Any, int]:
    """Read the pickle that begins at byte `start`, and return its value and where it ends; see `loads`."""
    find = _Finder(lenient, set() if named is None else named)
    try:
        return unpickle(data, start, find=find, refer=_reference if persistent else find.refuse, room=room)
    except _RefusedError as cause:
        raise FormatError(f"{name} {cause}") from None
    except RoomError as cause:
        raise RoomError(f"{name} holds more values than headway reads: {cause}. Load it with torch.") from None
    except FormatError as cause:
        raise FormatError(f"{name} is no whole pickle: {cause}. Check it: headway ckpt verify") from None
    except UNREADABLE as cause:
        why = f"{type(cause).__name__}: {cause}"
        raise FormatError(f"{name} is no whole pickle ({why:.200}). Check it: headway ckpt verify") from cause


def loads(
    data: Buffer,
    name: str,
    *,
    lenient: bool = False,
    persistent: bool = False,
    named: set[str] | None = None,
    room: Room | None = None,
) -> Any:
    """Return the value that a pickle holds, with a `StandIn` for every class and function that it names.

    `name` is the file's, for messages. With `lenient` unknown globals become stand-ins too, as inert as the others
    (a user's own classes in a torch.save file); `persistent` allows references to storages, which stay tuples.
    Every global that the pickle names is added to `named`, as `module.name`. `room` is how much memory and time
    its value may take, by default what its bytes allow.
    Raises `FormatError` for a global that is not allowed, for bytes that are no whole pickle, and for a value that
    would take more memory or time than such a file can be worth (`headway.core.files.safe_files`).
    """
    return load_from(data, 0, name, lenient=lenient, persistent=persistent, named=named, room=room)[0]


def path_of(value: Any) -> str:
    """Return which global a stand-in is, is an instance of, or was called from; "" for anything else.

    >>> path_of(loads(dumps(Global("torch", "float32")), "a.pkl"))
    'torch.float32'
    """
    kind = value if isinstance(value, type) else type(value)
    return kind.path if issubclass(kind, StandIn) else ""


class Global(NamedTuple):
    """A class, function or constant, by its module and name."""

    module: str
    name: str


class Call(NamedTuple):
    """What a function returns when it is called."""

    function: Global
    args: tuple[Any, ...]


class Instance(NamedTuple):
    """An object of a class: made by `__new__` without arguments, then given a state."""

    kind: Global
    state: Any = None


class Pairs(NamedTuple):
    """A dict of which the keys are objects: written as a dict."""

    entries: tuple[tuple[Any, Any], ...]


def dumps(value: Any) -> bytes:
    """Return a pickle (protocol 4) of plain values, `Global`s, `Call`s, `Instance`s and `Pairs`.

    Plain: None, bool, int, float, str, bytes, tuple, list, dict. Raises `InputError` for anything else.
    """
    writer = _Writer()
    writer.write(value)
    return b"\x80\x04" + b"".join(writer.parts) + b"."


class _Writer:
    """Emits opcodes; strings, globals and calls are written once and recalled afterwards."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[Any, bytes] = {}

    def write(self, value: Any) -> None:
        emit = EMITTERS.get(type(value))
        if emit is None:
            raise InputError(f"a {type(value).__name__} cannot be pickled here: {value!r:.80}. Use plain values only.")
        emit(self, value)

    def recalled(self, key: Any) -> bool:
        """Emit a recall of `key` where it has been written before."""
        if key in self._memo:
            self.parts.append(self._memo[key])
            return True
        return False

    def remember(self, key: Any) -> None:
        """Let the next `key` be a recall of what now stands on the stack."""
        index = len(self._memo)
        short = index < 256
        # its number is implied: a flipped bit in one that is written could ask for gigabytes
        self.parts.append(b"\x94")
        self._memo[key] = b"h" + bytes([index]) if short else b"j" + struct.pack("<I", index)


def _int(writer: _Writer, value: int) -> None:
    if -(2**31) <= value < 2**31:
        writer.parts.append(b"J" + struct.pack("<i", value))
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        writer.parts.append(b"\x8a" + bytes([len(data)]) + data)


def _str(writer: _Writer, value: str) -> None:
    if not writer.recalled(value):
        data = value.encode("utf-8", "surrogatepass")
        writer.parts.append(b"X" + struct.pack("<I", len(data)) + data)
        writer.remember(value)


def _bytes(writer: _Writer, value: bytes) -> None:
    writer.parts.append(b"B" + struct.pack("<I", len(value)) + value)


def _tuple(writer: _Writer, value: tuple[Any, ...]) -> None:
    if len(value) > 3:
        writer.parts.append(b"(")
    for entry in value:
        writer.write(entry)
    writer.parts.append({0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))


def _list(writer: _Writer, value: list[Any]) -> None:
    writer.parts.append(b"](")
    for entry in value:
        writer.write(entry)
    writer.parts.append(b"e")


def _pairs(writer: _Writer, entries: Iterable[tuple[Any, Any]]) -> None:
    writer.parts.append(b"}(")
    for key, entry in entries:
        writer.write(key)
        writer.write(entry)
    writer.parts.append(b"u")


def _global(writer: _Writer, value: Global) -> None:
    if not writer.recalled(value):
        writer.parts.append(f"c{value.module}\n{value.name}\n".encode())
        writer.remember(value)


def _call(writer: _Writer, value: Call) -> None:
    _global(writer, value.function)
    _tuple(writer, value.args)
    writer.parts.append(b"R")


def _instance(writer: _Writer, value: Instance) -> None:
    _global(writer, value.kind)
    writer.parts.append(b")\x81")
    if value.state is not None:
        writer.write(value.state)
        writer.parts.append(b"b")


EMITTERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): lambda writer, value: writer.parts.append(b"N"),
    bool: lambda writer, value: writer.parts.append(b"\x88" if value else b"\x89"),
    int: _int,
    float: lambda writer, value: writer.parts.append(b"G" + struct.pack(">d", value)),
    str: _str,
    bytes: _bytes,
    tuple: _tuple,
    list: _list,
    dict: lambda writer, value: _pairs(writer, value.items()),
    Pairs: lambda writer, value: _pairs(writer, value.entries),
    Global: _global,
    Call: _call,
    Instance: _instance,
}
"""Type -> how it is written."""


# What torch's own `weights_only` loading lets a pickle name: whatever else a file names runs when it is trusted.

KINDS = ("Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double", "BFloat16")
"""How torch's classes of storages and tensors begin."""

LOADABLE: dict[str, frozenset[str]] = {
    "torch": frozenset({
        "Size", "Tensor", "device", "bool", "bfloat16", "float16", "float32", "float64", "float4_e2m1fn_x2",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32",
        "complex64", "complex128", "bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "qint32", "qint8", "quint2x4",
        "quint4x2", "quint8", "per_channel_affine", "per_channel_affine_float_qparams", "per_channel_symmetric",
        "per_tensor_affine", "per_tensor_symmetric", "ComplexDoubleStorage", "ComplexFloatStorage", "QInt32Storage",
        "QInt8Storage", "QUInt2x4Storage", "QUInt4x2Storage", "QUInt8Storage",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
        *(kind + what for kind in KINDS for what in ("Storage", "Tensor")),
    }),
    "torch.cuda": frozenset({
        "ComplexDoubleStorage", "ComplexFloatStorage",
        *(kind + what for kind in KINDS for what in ("Storage", "Tensor")),
    }),
    "torch.sparse": frozenset(f"{kind}Tensor" for kind in KINDS if kind != "Bool"),
    "torch.cuda.sparse": frozenset(f"{kind}Tensor" for kind in KINDS if kind != "Bool"),
    "torch.storage": frozenset({"TypedStorage", "UntypedStorage"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch.nn.parameter": frozenset({"Parameter"}),
    "torch._tensor": frozenset({"_rebuild_from_type_v2"}),
    "torch._utils": frozenset(f"_rebuild_{what}" for what in (
        "device_tensor_from_cpu_tensor", "device_tensor_from_numpy", "meta_tensor_no_storage", "nested_tensor",
        "parameter", "parameter_with_state", "qtensor", "sparse_tensor", "tensor", "tensor_v2", "tensor_v3",
        "wrapper_subclass",
    )),
    "torch.distributed.device_mesh": frozenset({"DeviceMesh"}),
    "torch.distributed._mesh_layout": frozenset({"_MeshLayout", "_FlatLayout"}),
    "torch.distributed.tensor": frozenset({"DTensor"}),
    "torch.distributed.tensor._dtensor_spec": frozenset({"DTensorSpec", "TensorMeta", "ShardOrderEntry"}),
    "torch.distributed.tensor.placement_types": frozenset({"Shard", "_StridedShard", "Partial", "Replicate"}),
    "torch.nested._internal.nested_tensor": frozenset({"NestedTensor", "_rebuild_njt"}),
    "collections": frozenset({"OrderedDict", "Counter"}),
    "builtins": frozenset({"bytearray", "complex", "set"}),
    "_codecs": frozenset({"encode"}),
}  # fmt: skip
"""Module -> names that `torch.load(weights_only=True)` takes."""

FORMER = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""What modules were called in the protocol that torch writes -> what they are called now."""


def refused(named: Iterable[str]) -> list[str]:
    """Return which of the globals `module.name` torch's `weights_only` loading refuses, in order."""
    found = set()
    for path in named:
        module, _, name = path.rpartition(".")
        module = FORMER.get(module, module)
        if name not in LOADABLE.get(module, ()):
            found.add(f"{module}.{name}")
    return sorted(found)


def what_runs(named: Iterable[str], act: str) -> str | None:
    """Return a sentence that says what `act` runs of the globals that a pickle names; None where it is nothing."""
    found = refused(named)
    if not found:
        return None
    *most, last = found  # all of them: whoever means harm could hide one behind others
    return f"{act} runs {', '.join(most)} and {last}" if most else f"{act} runs {last}"
