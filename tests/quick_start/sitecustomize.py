"""Spares the processes of tests what nearly none of them uses of their start and end: half of both.

The compiler: an optimizer imports `torch._dynamo` (1 CPU-second) only to keep the compiler out of two kinds of
functions: those under `torch._compile._disable_dynamo`, and `step`. As long as nothing else has imported it there is
no compiler to keep out, so both are called without it; from then on as torch calls them.

Garbage collection (0.6 CPU-seconds): none while torch is imported, which leaves nothing to collect, and none when the
interpreter ends, where the memory goes back to the system anyway.
"""

import atexit
import functools
import gc
import sys
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


def stand_for(attribute, replacement):
    """Return what executes a module and replaces one of its functions."""

    def run(module, load):
        load(module)
        setattr(module, attribute, functools.partial(replacement, getattr(module, attribute)))

    return run


def without_collections(module, load):
    """Execute a module without a collection; what it made is old afterwards, as if there had been some."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        load(module)
    finally:
        gc.freeze()
        gc.unfreeze()
        if enabled:
            gc.enable()


RUN = {
    "torch": without_collections,
    "torch._compile": stand_for("_disable_dynamo", disable),
    "torch.optim.optimizer": stand_for("_use_grad_for_differentiable", use_grad),
}
"""Module -> what executes it, given the module and how its own loader would."""


class Finder:
    """Finds the modules of `RUN` as all other finders would, and executes them as it says."""

    asked: ClassVar = set()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Return the spec of such a module, once; None for every other name."""
        if name not in RUN or name in cls.asked:
            return None
        cls.asked.add(name)  # others ask around as well, this one too
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None:
            return None
        load, run = spec.loader.exec_module, RUN[name]
        spec.loader.exec_module = lambda module: run(module, load)
        return spec


if not any(getattr(each, "asked", None) is not None for each in sys.meta_path):  # a worker of pytest has begun with it
    sys.meta_path.insert(0, Finder)
    atexit.register(gc.freeze)  # the first to register is called last
