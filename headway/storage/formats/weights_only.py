"""What torch's own `weights_only` loading lets a pickle name: whatever else a file names runs when it is trusted.

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

from collections.abc import Iterable

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
