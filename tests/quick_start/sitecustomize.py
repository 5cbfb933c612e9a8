"""Spares the processes of tests what nearly none of them uses of their start and end: two thirds of both.

The compiler: an optimizer imports `torch._dynamo` (1 CPU-second) only to keep the compiler out of two kinds of
functions: those under `torch._compile._disable_dynamo`, and `step`. As long as nothing else has imported it there is
no compiler to keep out, so both are called without it; from then on as torch calls them.

What stands for real tensors where there are none (0.2 CPU-seconds): the modules of `LAZY` are executed when something
asks for what is in them. `torch._meta_registrations` is there for what it registers, so it is executed as well before
the first tensor on the meta device is made, the first `FakeTensorMode`, and before the modules of `BEHIND`.

Garbage collection (0.3 CPU-seconds): none while torch is imported, which leaves nothing to collect, and none when the
interpreter ends, where the memory goes back to the system anyway.
"""

import atexit
import functools
import gc
import importlib
import sys
import threading
import types
from typing import ClassVar


def compiler():
    """Whether the process has imported torch's compiler."""
    return "torch._dynamo" in sys.modules


def disable(original, fn=None, recursive=True):
    """Stand for `torch._compile._disable_dynamo`."""
    if fn is None:
        return functools.partial(disable, original, recursive=recursive)
    disabled = original(fn, recursive)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        return (disabled if compiler() else fn)(*args, **kwargs)

    return call


def use_grad(original, func):
    """Stand for `torch.optim.optimizer._use_grad_for_differentiable`."""
    broken = original(func)

    @functools.wraps(broken)
    def step(self, *args, **kwargs):
        if compiler():
            return broken(self, *args, **kwargs)
        torch = sys.modules["torch"]
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return func(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return step


class Lazy(types.ModuleType):
    """A module that is executed when something asks for an attribute that the import system has not set."""

    def __getattr__(self, name):
        """Execute the module and return what was asked for; whoever looks through all modules asks for `__...__`."""
        if not name.startswith("__") or name == "__all__":
            execute(self)
        return types.ModuleType.__getattribute__(self, name)

    def __dir__(self):
        """Return the names in the executed module."""
        execute(self)
        return super().__dir__()


LAZY = ("torch.export", "torch._meta_registrations")
"""Modules that `import torch` imports, and that are executed later."""

WAITING = {}
"""Module that has not been executed -> what executes it."""

LOCK = threading.RLock()
"""Held by the thread that executes one of them."""


def execute(module):
    """Execute a module if it waits for it."""
    with LOCK:
        load = WAITING.pop(module.__name__, None)
        if load is not None:
            module.__class__ = types.ModuleType
            load(module)


def meta_registrations():
    """Have what torch registers for tensors without data."""
    with LOCK:
        if "torch._meta_registrations" in WAITING:
            for library in MAKERS:
                library._destroy()  # what stands in the place of the registrations that follow
            MAKERS.clear()
            execute(sys.modules["torch._meta_registrations"])


MAKERS = []
"""Libraries of operators that stand for those that make tensors on the meta device."""


def watch_makers(torch):
    """Have the registrations as soon as a tensor is made on the meta device."""
    if "torch._meta_registrations" not in WAITING:
        return
    library = torch.library.Library("aten", "IMPL", "Meta")
    MAKERS.append(library)
    for maker in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):

        def make(*args, maker=maker, **kwargs):
            meta_registrations()
            return maker(*args, **kwargs)

        library.impl(maker.name(), make)


def stand_for(attribute, replacement):
    """Return what executes a module and replaces one of its functions."""

    def run(module, load):
        load(module)
        setattr(module, attribute, functools.partial(replacement, getattr(module, attribute)))

    return run


def run_torch(module, load):
    """Execute torch without a collection; what it made is old, as if there had been some."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        load(module)
        watch_makers(module)
        module._lazy_modules |= {"_decomp", "_prims", "_refs"}  # reached as attributes without an import
        if hasattr(module._C, "_set_generator_metaclass"):  # what a process without them needs of them
            module._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
    finally:
        gc.freeze()
        gc.unfreeze()
        if enabled:
            gc.enable()


def run_fake_tensor(module, load):
    """Execute `torch._subclasses.fake_tensor`, whose modes need the registrations."""
    load(module)
    begin = module.FakeTensorMode.__init__

    @functools.wraps(begin)
    def init(self, *args, **kwargs):
        meta_registrations()
        begin(self, *args, **kwargs)

    module.FakeTensorMode.__init__ = init


def wait(module, load):
    """Leave the module to be executed later."""
    WAITING[module.__name__] = load


RUN = {
    "torch": run_torch,
    "torch._compile": stand_for("_disable_dynamo", disable),
    "torch.optim.optimizer": stand_for("_use_grad_for_differentiable", use_grad),
    "torch._subclasses.fake_tensor": run_fake_tensor,
    **dict.fromkeys(LAZY, wait),
}
"""Module -> what executes it, given the module and how its own loader would."""

BEHIND = ("_decomp", "_prims", "_refs", "_dynamo", "_inductor", "utils._content_store")
"""Modules of torch that expect to be imported behind the registrations: their imports of each other go in circles."""


def imported(name):
    """Return the spec of a module that was imported while its import was about to begin: it is not executed again."""
    module = sys.modules[name]
    module.__spec__.loader.create_module = lambda spec: module
    module.__spec__.loader.exec_module = lambda module: None
    return module.__spec__


class Finder:
    """Finds the modules of `RUN` as all other finders would, and executes them as it says."""

    asked: ClassVar = set()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Return the spec of such a module, once; None for every other name."""
        if name.startswith("torch.export."):
            execute(sys.modules["torch.export"])
        if name.removeprefix("torch.") in BEHIND and "torch._meta_registrations" in WAITING:
            meta_registrations()
            if name in sys.modules:  # they import it
                return imported(name)
        if name not in RUN or name in cls.asked:
            return None
        cls.asked.add(name)  # others ask around as well, this one too
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None:
            return None
        if name in LAZY:
            spec.loader.create_module = lambda spec: Lazy(spec.name)
        load, run = spec.loader.exec_module, RUN[name]
        spec.loader.exec_module = lambda module: run(module, load)
        return spec


if not any(getattr(each, "asked", None) is not None for each in sys.meta_path):  # a worker of pytest has begun with it
    sys.meta_path.insert(0, Finder)
    atexit.register(gc.freeze)  # the first to register is called last
