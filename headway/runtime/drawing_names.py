"""The names of functions that draw random numbers, as the installed libraries have them.

No list is kept by hand: torch marks its operators that draw, the generators of `random` and numpy have methods, and a
function in Python draws where its code names another one that does.

>>> {"rsample", "betavariate", "integers", "dropout", "gumbel_softmax", "exponential_", "token_hex"} <= drawing_names()
True
>>> {"matmul", "getstate", "bytes", "power"} & drawing_names()
set()
"""

from __future__ import annotations

import builtins
import inspect
import math
import os
import random
import secrets
import sys
import uuid
from collections.abc import Iterable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

LOOKING = frozenset({
    "SystemRandom", "bit_generator", "compare_digest", "default_rng", "get_state", "getstate", "spawn",
})  # fmt: skip
"""What generators and their modules have that neither draws nor sets anything shared, or makes one of its own."""

SETTING = frozenset({"manual_seed", "manual_seed_all", "fork_rng", "set_rng_state", "set_state", "setstate"})
"""Functions that set a generator."""


@cache
def drawing_names() -> frozenset[str]:
    """Return the names that say by themselves that something is drawn; found once, in 25 ms."""
    return frozenset((_of_torch() | _of_generators() | _of_the_system()) - _common() - SETTING)


@cache
def names_of_methods() -> frozenset[str]:
    """Return all names of methods by which generators draw: some, such as `bytes`, are also those of other things."""
    return frozenset(_of_generators() - SETTING)


def _of_torch() -> set[str]:
    """Return the operators of torch that are marked so, and what in its modules is made of them."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "distributions"):
        return set()
    found = set()
    for full in torch._C._dispatch_get_all_op_names():  # type: ignore[union-attr]  # torch is there
        name, _, overload = full.removeprefix("aten::").partition(".")
        is_called = not (name.startswith("_") or "backward" in name or "out" in overload)  # a third of 3600
        if full.startswith("aten::") and is_called:
            operator = torch._C._get_operation_overload(f"aten::{name}", overload)  # type: ignore[union-attr]  # the same
            if operator is not None and torch.Tag.nondeterministic_seeded in operator[2]:  # type: ignore[union-attr]  # the same
                found.add(name)
    for module in (torch.nn.functional, torch.nn.init, torch.random):  # type: ignore[union-attr]  # the same
        found |= _made_of(module, found)
    kinds = [kind for kind in vars(torch.distributions).values() if isinstance(kind, type)]  # type: ignore[union-attr]  # the same
    methods = {name for kind in kinds for name in dir(kind) if "sample" in name and callable(getattr(kind, name))}
    return {name for name in found | methods if not name.startswith("_")}


def _made_of(module: ModuleType, drawing: set[str]) -> set[str]:
    """Return the public functions of a module whose code names one that draws, or names one that does so."""
    codes = {name: _names(value) for name, value in vars(module).items() if isinstance(value, FunctionType)}
    found: set[str] = set()
    while more := {name for name, names in codes.items() if names & (drawing | found)} - found:
        found |= more
    return found


def _names(function: FunctionType) -> set[str]:
    """Return the names in the code of a function, and in that of the functions that it chooses from by a flag."""
    chosen = [cell.cell_contents for cell in function.__closure__ or ()]
    codes = [value.__code__ for value in (function, *chosen) if isinstance(value, FunctionType)]
    return {name for code in codes for name in code.co_names}


def _of_generators() -> set[str]:
    """Return the methods of generators, and the functions of the modules that have them."""
    holders: list[Any] = [random, random.Random]
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is not None:
        holders += [numpy, numpy.Generator, numpy.RandomState]
    return {name for holder in holders for name in _callables(holder)} - LOOKING


def _callables(holder: Any) -> Iterable[str]:
    """Return the public functions or methods of a module or a class; no classes."""
    for name in getattr(holder, "__all__", dir(holder)):
        value = getattr(holder, name)
        if not name.startswith("_") and callable(value) and not isinstance(value, type):
            yield name


def _of_the_system() -> set[str]:
    """Return what asks the operating system for random bytes."""
    keyed = {name for name in dir(uuid) if name.startswith("uuid") and callable(getattr(uuid, name))}
    made = {name for name in keyed if "name" not in inspect.signature(getattr(uuid, name)).parameters}
    asked = {name for name in ("urandom", "getrandom") if hasattr(os, name)}
    return (made | asked | {*secrets.__all__}) - LOOKING


def _common() -> set[str]:
    """Return names that other things have as well, and those of one letter."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    modules = {name for name, value in vars(torch).items() if isinstance(value, ModuleType)} if torch else set()
    others = {*dir(builtins), *dir(math), *getattr(numpy, "__all__", ()), *modules} - {"random"}
    return others | {name for name in names_of_methods() if len(name) == 1}
