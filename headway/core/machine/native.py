"""Functions in LLVM's language as machine code of this host, with all that its processor can do.

For inner loops whose instructions matter, where numba does not let one
choose them. LLVM comes with numba; compiling takes some 30 ms, so callers keep
what they get. Calls hold no lock: other Python threads run meanwhile.

>>> import ctypes
>>> assembly = "define void @put(ptr %p, i8 %v) { store i8 %v, ptr %p ret void }"
>>> put = native(assembly, "put", ctypes.c_void_p, ctypes.c_int8)
>>> cell = ctypes.create_string_buffer(1)
>>> put(ctypes.addressof(cell), 65)
>>> cell.raw
b'A'

A copy of memory past the caches: what is copied will not be read here soon.

A plain store first reads the line that it is about to fill, and leaves it in
the cache. Non-temporal stores do neither: a third less traffic between
processor and memory, which is what a large copy takes its time for, and the
caches keep what the program works on (Intel 64 optimization manual, on
streaming stores).

>>> import numpy as np
>>> source, target = np.arange(1000), np.zeros(1000, int)
>>> copy(target.ctypes.data, source.ctypes.data, source.nbytes)
>>> bool((target == source).all())
True
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, cast


def native(assembly: str, name: str, *argument_types: Any) -> Callable[..., None]:
    """Return function `name` of a module, which returns nothing; `argument_types` are those of `ctypes`.

    Raises `RuntimeError` when LLVM does not understand the module.
    """
    import llvmlite.binding as llvm  # 50 ms, and most processes never come here

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(assembly), machine)
    engine.finalize_object()
    function: Any = ctypes.CFUNCTYPE(None, *argument_types)(engine.get_function_address(name))
    function.owner = engine  # the code goes with its engine
    return cast(Callable[..., None], function)


# A copy of memory past the caches: what is copied will not be read here soon.

VECTOR_BYTES = 64
"""Bytes of one load and store: a cache line; LLVM splits it where registers are shorter."""

STREAMS, STRIDE_BYTES = 4, 1 << 14
"""Copied side by side: so many pieces of a block, each so long. Pages are looked up, and rows of memory opened, several
at a time: an eighth less time than one piece after the other."""

TURN_BYTES = 2 * VECTOR_BYTES
"""Bytes of each stream in one turn of the loop."""

BLOCK_BYTES = STREAMS * STRIDE_BYTES
"""The copy is made of whole blocks; what is left over, and what is shorter, gains little and is copied plainly."""


def copy(target: int, source: int, num_bytes: int) -> None:
    """Copy between two addresses of host memory that do not overlap; other threads of this process run meanwhile.

    On return every processor sees the copy.
    """
    head = min(-target % VECTOR_BYTES, num_bytes)
    body = (num_bytes - head) // BLOCK_BYTES * BLOCK_BYTES
    if not body:
        ctypes.memmove(target, source, num_bytes)
        return
    ctypes.memmove(target, source, head)
    _loop()(target + head, source + head, body)
    done = head + body
    ctypes.memmove(target + done, source + done, num_bytes - done)


@cache
def _loop() -> Callable[..., None]:
    return native(assembly(), "stream", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def assembly() -> str:
    """Return the loop in LLVM's language: `stream(target, source, num_bytes)`, at least one block, whole blocks."""
    vector = f"<{VECTOR_BYTES} x i8>"
    places = [
        stream * STRIDE_BYTES + line for stream in range(STREAMS) for line in range(0, TURN_BYTES, VECTOR_BYTES)
    ]  # fmt: skip
    lines = [
        "define void @stream(ptr noalias %target, ptr noalias %source, i64 %bytes) {", "entry:", "  br label %block",
        "block:", "  %b = phi i64 [0, %entry], [%b.next, %block.end]", "  br label %turn",
        "turn:", "  %o = phi i64 [0, %block], [%o.next, %turn]", "  %i = add i64 %b, %o",
        "  %s = getelementptr i8, ptr %source, i64 %i", "  %t = getelementptr i8, ptr %target, i64 %i",
    ]  # fmt: skip
    for at in places:
        lines.append(f"  %s{at} = getelementptr i8, ptr %s, i64 {at}")
        lines.append(f"  %v{at} = load {vector}, ptr %s{at}, align 1")
    for at in places:
        lines.append(f"  %t{at} = getelementptr i8, ptr %t, i64 {at}")
        lines.append(f"  store {vector} %v{at}, ptr %t{at}, align {VECTOR_BYTES}, !nontemporal !0")
    lines += [
        f"  %o.next = add i64 %o, {TURN_BYTES}", f"  %more = icmp ult i64 %o.next, {STRIDE_BYTES}",
        "  br i1 %more, label %turn, label %block.end",
        "block.end:", f"  %b.next = add i64 %b, {BLOCK_BYTES}", "  %again = icmp ult i64 %b.next, %bytes",
        "  br i1 %again, label %block, label %done",
        # Such stores are ordered by a fence only: without it whoever hears of the copy might not see it yet.
        "done:", "  fence seq_cst", "  ret void", "}", "!0 = !{i32 1}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
