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
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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
