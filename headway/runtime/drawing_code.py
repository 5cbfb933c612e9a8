"""Whether code names what draws from, or sets, a random number generator that a whole process shares.

Threads share the global generators. A draw in one of them, in an example that
comes once in a thousand, or one that is put back afterwards, moves the numbers
of the training loop: no look before or after tells. So code that names such a
function is not run by threads at all, at times also where it is called on a
generator of its own: names are all that is read (`drawing_names` has them). One such as `bytes`, which other things
have too, counts where there is a generator in sight.

>>> script = {"__name__": "__main__"}
>>> exec("import random\\ndef rarely(i): return random.random() if i == 77 else 0.0", script)
>>> names_draws(script["rarely"])
"its code names 'random', which draws from, or sets, generators that threads share"
>>> exec("def doubled(i): return 2 * i", script)
>>> names_draws(script["doubled"]) is None
True
"""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from headway.runtime.drawing_names import SETTING, drawing_names, names_of_methods
from headway.runtime.draws import own_generators
from headway.runtime.reach import reached

DROPOUT = "torch.nn.modules.dropout"
"""Module of the layers that draw when they are called, by whatever name."""

MAKING = frozenset({
    "Generator", "Random", "RandomState", "SystemRandom", "default_rng", "generator", "torch_generator",
})  # fmt: skip
"""Names in code that has a generator of its own."""


OF_THREAD = frozenset({"current_thread", "get_ident", "get_native_id", "main_thread"})
"""Functions that say which thread calls them."""


def names_threads(holder: Any) -> str | None:
    """Say which function that tells threads apart the code has that `holder` gets at, or None."""
    for value, by_code in reached(holder):
        if by_code and isinstance(value, FunctionType) and not value.__module__.startswith(("headway.", "torch.")):
            found = [name for names in _scopes(value.__code__) for name in names & OF_THREAD]
            if found:
                return f"its code names {min(found)!r}, and threads would tell others of themselves"
    return None


def names_draws(holder: Any) -> str | None:
    """Say which such name the code that `holder` gets at has, or None."""
    drawing, methods = drawing_names(), names_of_methods()
    if own_generators(holder):
        drawing |= methods
    for value, by_code in reached(holder):
        if type(value).__module__ == DROPOUT and value.training:
            return _reason(type(value).__name__)
        if by_code and isinstance(value, (BuiltinFunctionType, MethodType)):
            name, owner = value.__name__, type(getattr(value, "__self__", None)).__module__ or ""
            of_generator = owner.partition(".")[0] in ("random", "numpy") and name in methods
            if of_generator or name in SETTING | drawing:
                return _reason(name)
        if isinstance(value, FunctionType) and not value.__module__.startswith(("headway.", "torch.")):
            for names in _scopes(value.__code__):
                found = names & SETTING or (set() if names & MAKING else names & drawing)
                if found:
                    return _reason(min(found))
    return None


def _reason(name: str) -> str:
    return f"its code names {name!r}, which draws from, or sets, generators that threads share"


def _scopes(code: CodeType) -> Iterator[set[str]]:
    """Yield the names that code uses, keywords of its calls included, and those of the functions inside it."""
    words = {word for constant in code.co_consts if isinstance(constant, tuple) for word in constant}
    yield {*code.co_names, *(word for word in words if isinstance(word, str))}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _scopes(inner)
