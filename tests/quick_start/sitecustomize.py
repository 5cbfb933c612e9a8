"""Spares the processes of tests the import of torch's compiler, which nearly none of them uses: half of their start.

An optimizer imports `torch._dynamo` (1 CPU-second) only to keep the compiler out of two kinds of functions: those
under `torch._compile._disable_dynamo`, and `step`. As long as nothing else has imported it there is no compiler to
keep out, so both are called without it; from then on as torch calls them.
"""

import functools
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


REPLACED = {
    "torch._compile": ("_disable_dynamo", disable),
    "torch.optim.optimizer": ("_use_grad_for_differentiable", use_grad),
}
"""Module -> its attribute, and what stands for it."""


class Finder:
    """Finds the modules of `REPLACED` as all other finders would, and loads them with the replacement."""

    asked: ClassVar = set()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Return the spec of such a module, once; None for every other name."""
        if name not in REPLACED or name in cls.asked:
            return None
        cls.asked.add(name)  # others ask around as well, this one too
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None:
            return None
        attribute, replacement = REPLACED[name]
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            setattr(module, attribute, functools.partial(replacement, getattr(module, attribute)))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
