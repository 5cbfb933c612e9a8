"""Whether code names what draws from, or sets, a random number generator that a whole process shares.

Threads share the global generators. A draw in one of them, in an example that
comes once in a thousand, or one that is put back afterwards, moves the numbers
of the training loop: no look before or after tells. So code that names such a
function is not run by threads at all, at times also where it is called on a
generator of its own: names are all that is read.

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

from headway.runtime.reach import reached

SETTING = frozenset({"manual_seed", "manual_seed_all", "fork_rng", "set_rng_state", "set_state", "setstate"})
"""Functions that set a generator."""

DRAWING = frozenset({
    "bernoulli", "bernoulli_", "choice", "choices", "dropout", "exponential_", "gauss", "multinomial", "normal",
    "normal_", "normalvariate", "permutation", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "random", "random_", "randperm", "randrange", "sample", "seed", "shuffle", "standard_normal",
    "triangular", "uniform", "uniform_",
})  # fmt: skip
"""Functions that draw, of torch, numpy and `random`; generators have methods of the same names."""

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
    for value, by_code in reached(holder):
        name = getattr(value, "__name__", "")
        if (
            by_code
            and callable(value)
            and name in SETTING | DRAWING
            and isinstance(value, (BuiltinFunctionType, MethodType))
        ):
            return _reason(name)
        if isinstance(value, FunctionType) and not value.__module__.startswith(("headway.", "torch.")):
            for names in _scopes(value.__code__):
                found = names & SETTING or (set() if names & MAKING else names & DRAWING)
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
