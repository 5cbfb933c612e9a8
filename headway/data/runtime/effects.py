"""What one function stores, and where: its bytecode is run over kinds of values in place of values.

Every value on the stack and in a variable is fresh (the function made it),
handed (a parameter, or part of one) or outside (its object's, a global's, an
enclosing function's). Branches meet in the greater kind, so that the answer
covers every path, also the one that one example of 100 takes.

    row = self.rows[i]      LOAD_FAST self  -> outside "self"
                            LOAD_ATTR rows  -> outside "self.rows"
                            BINARY_SUBSCR   -> outside "self.rows"       STORE_FAST row
    row["met"] = True       STORE_SUBSCR into outside "self.rows"        -> that is stored
    row = dict(row)         CALL            -> fresh                     STORE_FAST row
    row["met"] = True       STORE_SUBSCR into fresh                      -> nothing that others see

What a function stores in its parameters is told apart: `headway.data.runtime.stores`
asks the callers what they hand to it. Names of opcodes are those of Python 3.10 to 3.13.

>>> def met(seen, index): seen[index] = True
>>> effect_of(met, Unknown()).handed
{'seen'}
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from io import IOBase
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from headway.data.runtime.origins import (
    FRESH,
    GATHERING,
    HANDED,
    HANDING,
    MUTATING,
    NEW,
    NULL,
    OF_LISTS,
    ON_FIRST,
    OUTSIDE,
    SHARING,
    Effect,
    Unknown,
    Value,
    around,
    changes,
    found_by_name,
    has_plain_items,
    is_plain,
    is_scripts,
    meet,
    popped,
)

CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
"""Functions whose object is not yet anyone else's."""


def effect_of(function: FunctionType, script: Unknown, *, is_method: bool = False) -> Effect:
    """Return what a function does."""
    free = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found = cell.cell_contents
        except ValueError:
            found = None
        free[name] = found_by_name(found, name, f"the enclosing variable {name}")
    frame = _Frame(function.__code__, function.__globals__, free, script, is_method=is_method)
    return frame.effect()


State = tuple[list[Value], dict[str, Value]]
"""The stack, and the variables by name."""

_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_IDLE = ("NOP", "RESUME", "CACHE", "PRECALL", "KW_NAMES", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL")
_MAKING = (
    "BINARY_", "INPLACE_", "COMPARE_", "UNARY_", "FORMAT_", "IS_OP", "CONTAINS_OP", "CONVERT_VALUE", "TO_BOOL",
    "CALL_INTRINSIC_", "LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR", "PUSH_EXC_INFO", "CHECK_EXC_MATCH", "LIST_TO_TUPLE",
    "YIELD_VALUE", "GET_LEN",
)  # fmt: skip
"""Beginnings of opcodes that leave one fresh value."""


class _Frame:
    """One function in the making of its effect."""

    def __init__(
        self, code: CodeType, scope: dict[str, Any], free: dict[str, Value], script: Unknown, *,
        is_method: bool = False, own: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._code, self._scope, self._free, self._script, self._own = code, scope, free, script, own
        self._nested: dict[str, Effect] = {}
        self.cells: dict[str, Value] = {}
        """What variables that functions share may be."""
        num = code.co_argcount + code.co_kwonlyargcount
        flags = code.co_flags
        num += bool(flags & 4) + bool(flags & 8)
        parameters = code.co_varnames[:num]
        is_method = is_method or parameters[:1] in (("self",), ("cls",))
        self._effect = Effect(parameters=parameters, is_method=is_method)
        self._variables = {name: Value(HANDED, HANDED, name, parameters=frozenset({name})) for name in parameters}
        if is_method and parameters:
            level = FRESH if code.co_name in CONSTRUCTORS else OUTSIDE
            self._variables[parameters[0]] = Value(level, level, parameters[0])
        for name in {*code.co_cellvars} & self._variables.keys():
            self.cells[name] = self._variables[name]
        self._instructions = list(dis.get_instructions(code))
        parse: Callable[[CodeType], list[Any]] = getattr(dis, "_parse_exception_table", lambda _: [])  # from 3.11 on
        self._handlers = parse(code)

    def effect(self) -> Effect:
        """Return the effect of this function, with those inside of it."""
        for _ in range(4):
            before = (
                dict(self.cells),
                {name: (inner.returns, len(inner.handed)) for name, inner in self._nested.items()},
            )
            self._run()
            for code in (constant for constant in self._code.co_consts if isinstance(constant, CodeType)):
                self._look_inside(code)
            after = (self.cells, {name: (inner.returns, len(inner.handed)) for name, inner in self._nested.items()})
            if before == after:
                break
        return self._effect

    def _look_inside(self, code: CodeType) -> None:
        """Find the effect of a function inside of this one."""
        own = self._own | {*self._code.co_cellvars}
        inner = _Frame(code, self._scope, {**self._free, **self.cells}, self._script, own=own)
        found = inner.effect()
        for name in {*code.co_freevars} & {*inner.cells} & {*self._code.co_cellvars}:
            self.cells[name] = meet(self.cells.get(name), inner.cells[name])
        self._effect.stored = self._effect.stored or found.stored
        others = self._nested.get(code.co_name)
        if others is not None:
            found.handed |= others.handed
            found.returns = found.returns.joined(others.returns)
        self._nested[code.co_name] = found
        # Where a function inside stores in a parameter of this one, this one does.
        self._effect.handed |= found.handed & {*self._effect.parameters} - {*found.parameters}

    def _run(self) -> None:
        """Go over every path until nothing more is learnt."""
        index = {instruction.offset: i for i, instruction in enumerate(self._instructions)}
        states: dict[int, State] = {0: ([], dict(self._variables))}
        todo = {0}
        while todo:
            i = min(todo)
            todo.remove(i)
            instruction = self._instructions[i]
            stack, variables = states[i]
            for start, end, target, depth, lasti in self._handlers:
                if start <= instruction.offset < end:
                    handler = (stack[:depth] + [NEW] * (depth - len(stack)) + [NEW] * (1 + lasti), variables)
                    self._pass_on(states, todo, index[target], handler)
            name = instruction.opname
            if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
                effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=True)
                there = stack[: len(stack) + effect] if effect < 0 else stack + [NEW] * effect
                self._pass_on(states, todo, index[instruction.argval], (there, variables))
            if name in _JUMPS:
                continue
            stack, variables = list(stack), dict(variables)
            self._step(i, instruction, stack, variables)
            if name not in _ENDS and i + 1 < len(self._instructions):
                self._pass_on(states, todo, i + 1, (stack, variables))

    def _pass_on(self, states: dict[int, State], todo: set[int], i: int, state: State) -> None:
        """Let a state arrive at an instruction."""
        if i not in states:
            states[i] = state
            todo.add(i)
            return
        stack, variables = states[i]
        both = [a.joined(b) for a, b in zip(stack, state[0], strict=False)]
        names = {name: meet(variables.get(name), state[1].get(name)) for name in {**variables, **state[1]}}
        if (both, names) != (stack, variables):
            states[i] = both, names
            todo.add(i)

    def _step(self, i: int, instruction: dis.Instruction, stack: list[Value], variables: dict[str, Value]) -> None:
        """Do what one instruction does to the stack and the variables."""
        name, number = instruction.opname, instruction.arg or 0
        if name in _IDLE:
            return
        for step in (self._variable, self._lookup, self._store, self._shape, self._make):
            if step(instruction, stack, variables):
                return
        if name.startswith("CALL") and not name.startswith("CALL_INTRINSIC"):
            stack.append(self._call_from(i, name, number, stack))
        elif name in ("RETURN_VALUE", "RETURN_CONST"):
            value = NEW if name == "RETURN_CONST" else popped(stack)
            self._effect.returns = self._effect.returns.joined(replace(value, name="", of=None, known=None))
        else:  # an opcode that nobody told of
            effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
            for _ in range(-effect):
                popped(stack)
            stack += [Value(OUTSIDE, OUTSIDE, stack[-1].label if stack else "")] * effect

    def _variable(self, instruction: dis.Instruction, stack: list[Value], variables: dict[str, Value]) -> bool:
        """Load, store and delete variables of this function and of those around it."""
        name, arg = instruction.opname, instruction.argval
        if name.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE")):
            for each in arg if isinstance(arg, tuple) else (arg,):
                stack.append(self._value_of(each, variables))
        elif name == "STORE_FAST_LOAD_FAST":
            self._assign(arg[0], popped(stack), variables)
            stack.append(self._value_of(arg[1], variables))
        elif name.startswith("STORE_FAST"):
            for each in arg if isinstance(arg, tuple) else (arg,):
                self._assign(each, popped(stack), variables)
        elif name in ("STORE_DEREF", "DELETE_DEREF"):
            self._assign(arg, popped(stack) if name == "STORE_DEREF" else NEW, variables)
            if arg in self._code.co_freevars and arg not in self._own:
                self._report(Value(OUTSIDE, label=f"the enclosing variable {arg}"))
        elif name == "DELETE_FAST":
            variables.pop(arg, None)
        else:
            return False
        return True

    def _value_of(self, name: str, variables: dict[str, Value]) -> Value:
        if name in self._code.co_freevars:
            return self._free.get(name, Value(OUTSIDE, OUTSIDE, f"the enclosing variable {name}", name))
        value = variables.get(name, NEW)
        return meet(self.cells.get(name), value) if name in self._code.co_cellvars else value

    def _assign(self, name: str, value: Value, variables: dict[str, Value]) -> None:
        variables[name] = value
        if name in self._code.co_cellvars or name in self._code.co_freevars:
            self.cells[name] = meet(self.cells.get(name), value)

    def _lookup(self, instruction: dis.Instruction, stack: list[Value], variables: dict[str, Value]) -> bool:
        """Load globals, attributes, items and constants."""
        name, arg, number = instruction.opname, instruction.argval, instruction.arg or 0
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            builtins = self._scope.get("__builtins__", {})
            builtins = builtins if isinstance(builtins, dict) else vars(builtins)
            value = found_by_name(self._scope.get(arg, builtins.get(arg)), arg, f"the global {arg}")
            pair = [NULL, value] if sys.version_info < (3, 13) else [value, NULL]
            stack += [value] if effect == 1 else pair
        elif name in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"):
            owner = stack[-1] if name == "IMPORT_FROM" else popped(stack)
            if name == "LOAD_SUPER_ATTR":
                popped(stack), popped(stack)
            value = self._attribute(owner, arg)
            is_method = name == "LOAD_METHOD" or (name in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and _has_flag(number))
            stack += [value, NULL] if is_method else [value]
        elif name == "LOAD_CONST":
            is_code = isinstance(arg, CodeType)
            stack.append(Value(name=arg.co_name, label="a function") if is_code else NEW)
        elif name == "IMPORT_NAME":
            popped(stack), popped(stack)
            stack.append(found_by_name(sys.modules.get(arg), arg.rpartition(".")[2], arg))
        elif name in ("BINARY_SUBSCR", "BINARY_SLICE") or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            keys = [popped(stack) for _ in range(-effect)]
            stack.append(self._item(popped(stack), is_slice=name == "BINARY_SLICE" or keys[0].name == "slice"))
        else:
            return False
        return True

    def _attribute(self, owner: Value, name: str) -> Value:
        label = f"{owner.label}.{name}"
        if isinstance(owner.known, ModuleType):
            found = vars(owner.known).get(name)
            return replace(found_by_name(found, name, label), of=replace(owner, of=None))
        values = self._script.values_named(name)
        found = (
            self._script.effects(Value(name=name)) if values and all(isinstance(v, property) for v in values) else []
        )
        if found:
            made = [self._result(effect, [], (), bound=True) for effect in found]
            return replace(max(made, key=lambda value: value.level), name=name, of=replace(owner, of=None))
        plain = bool(values) and all(map(is_plain, values))
        value = NEW if plain else owner.part(label)
        return replace(value, name=name, of=replace(owner, of=None))

    def _item(self, owner: Value, *, is_slice: bool) -> Value:
        """Return an item: of an object of the script's, what its `__getitem__` returns."""
        values = self._script.values_named(owner.name) if owner.of is not None else []
        if values and all(is_scripts(value, "__getitem__") for value in values):
            of = replace(owner, of=None)
            return self._called(Value(OUTSIDE, OUTSIDE, owner.label, "__getitem__", of), [NEW], ())
        if not is_slice and values and all(map(has_plain_items, values)):
            return NEW
        if is_slice:
            is_copy = bool(values) and all(type(value) in (list, tuple, str, bytes) for value in values)
            return Value(
                FRESH if is_copy else owner.level, owner.inner, owner.label, parameters=owner.parameters, is_slice=True
            )
        return owner.part()

    def _store(self, instruction: dis.Instruction, stack: list[Value], variables: dict[str, Value]) -> bool:
        """Report stores in objects, and all in globals."""
        name, arg = instruction.opname, instruction.argval
        if name in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME"):
            if name.startswith("STORE"):
                popped(stack)
            if name.endswith("GLOBAL"):
                self._report(Value(OUTSIDE, label=f"the global {arg}"))
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            owner = popped(stack)
            self._report(replace(owner, label=f"{owner.label}.{arg}"))
            if name == "STORE_ATTR":
                popped(stack)
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            for _ in range(2 if name == "STORE_SLICE" else 1):
                popped(stack)
            self._report(popped(stack))
            if name.startswith("STORE"):
                popped(stack)
        else:
            return False
        return True

    def _report(self, owner: Value) -> None:
        """Remember that something is stored in an object."""
        if owner.level == OUTSIDE:
            self._effect.stored = self._effect.stored or owner.label or "an object of others"
        self._effect.handed |= owner.parameters

    def _shape(self, instruction: dis.Instruction, stack: list[Value], variables: dict[str, Value]) -> bool:
        """Move values on the stack, take containers apart, add to those that are being built."""
        name, number = instruction.opname, instruction.arg or 0
        if name in ("SWAP", "ROT_TWO"):
            at = -number if name == "SWAP" else -2
            stack[-1], stack[at] = stack[at], stack[-1]
        elif name in ("COPY", "DUP_TOP"):
            stack.append(stack[-number if name == "COPY" else -1])
        elif name == "DUP_TOP_TWO":
            stack += stack[-2:]
        elif name.startswith("ROT_"):
            at = {"ROT_THREE": 3, "ROT_FOUR": 4}.get(name, number)
            stack.insert(len(stack) - at + 1, stack.pop())
        elif name == "PUSH_NULL":
            stack.append(NULL)
        elif name == "GET_ITER":
            if any(hasattr(type(value), "__next__") for value in self._script.values_named(stack[-1].name)):
                self._report(stack[-1])
            stack[-1] = replace(stack[-1], name="", of=None)
        elif name == "FOR_ITER":
            stack.append(stack[-1].part())
        elif name in ("UNPACK_SEQUENCE", "UNPACK_EX"):
            effect = dis.stack_effect(instruction.opcode, instruction.arg)
            stack += [popped(stack).part()] * (effect + 1)
        elif name in ("LIST_APPEND", "SET_ADD", "MAP_ADD", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"):
            added = [popped(stack) for _ in range(2 if name == "MAP_ADD" else 1)]
            stack[-number] = around([stack[-number], *added])
        elif name in ("BEFORE_WITH", "BEFORE_ASYNC_WITH", "SETUP_WITH"):
            stack += [NEW, popped(stack).part()]
        elif name in ("GET_YIELD_FROM_ITER", "RETURN_GENERATOR"):
            stack += [popped(stack)] if name == "GET_YIELD_FROM_ITER" else [NEW]
            self._effect.returns = self._effect.returns.joined(around(stack[-1:]))
        elif name == "POP_TOP":
            popped(stack)
        else:
            return False
        return True

    def _make(self, instruction: dis.Instruction, stack: list[Value], variables: dict[str, Value]) -> bool:
        """Make a fresh value of the uppermost ones; one that is changed in place stays what it is."""
        name = instruction.opname
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if name in ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"):
            taken = [popped(stack) for _ in range(1 - effect)]
            stack.append(next((value for value in taken if value.label == "a function"), NEW))
        elif name.startswith("BUILD_"):
            taken = [popped(stack) for _ in range(1 - effect)]
            made = NEW if name in ("BUILD_STRING",) else around(taken)
            stack.append(replace(made, name="slice" if name == "BUILD_SLICE" else ""))
        elif name == "LIST_TO_TUPLE":
            pass
        elif name.startswith("INPLACE_") or (name == "BINARY_OP" and instruction.argrepr.endswith("=")):
            popped(stack)
            self._report(stack[-1])
        elif name == "YIELD_VALUE":
            self._effect.returns = self._effect.returns.joined(around([popped(stack)]))
            stack.append(NEW)
        elif name.startswith(_MAKING):
            for _ in range(1 - effect):
                popped(stack)
            stack.append(NEW)
        else:
            return False
        return True

    def _call_from(self, i: int, name: str, number: int, stack: list[Value]) -> Value:
        """Take a call's function and arguments from the stack, and return what is known of its result."""
        words: Sequence[str] | None = ()
        if name == "CALL_FUNCTION_EX":
            args = [popped(stack) for _ in range(1 + (number & 1))]
            args, words = [value.part() for value in args], None
        else:
            if name in ("CALL_KW", "CALL_FUNCTION_KW"):
                popped(stack)
            args = [popped(stack) for _ in range(number)][::-1]
            words = self._words(i, name)
        first = popped(stack)
        if name in ("CALL_FUNCTION", "CALL_FUNCTION_KW") or (name == "CALL_FUNCTION_EX" and sys.version_info < (3, 11)):
            return self._called(first, args, words)
        below = popped(stack)
        callee = first if below == NULL else below
        return self._called(callee, [first, *args] if NULL not in (first, below) else args, words)

    def _words(self, i: int, name: str) -> tuple[str, ...]:
        """Return the keywords of the call at an instruction."""
        for before in reversed(self._instructions[max(0, i - 3) : i]):
            if before.opname == "KW_NAMES" or (name.endswith("_KW") and before.opname == "LOAD_CONST"):
                found = self._code.co_consts[before.arg or 0]
                return found if isinstance(found, tuple) else ()
            if before.opname not in ("PRECALL", "CACHE", "EXTENDED_ARG"):
                break
        return ()

    def _called(self, callee: Value, args: list[Value], words: Sequence[str] | None) -> Value:
        """Report what a call stores in, and return what is known of its result."""
        name, of = callee.name, callee.of
        is_function = of is None or isinstance(of.known, (ModuleType, type))
        if isinstance(getattr(of, "known", None), type) and name in MUTATING and args:
            self._report(args[0])
        if args and name in ON_FIRST and (is_function or name == "shuffle"):
            self._report(args[0])
        for word, value in zip(words or (), args[len(args) - len(words or ()) :], strict=True):
            if word in ("out", "file"):
                self._report(value)
        effects = self._effects(callee)
        if of is not None and not is_function and self._is_changed(of, name, args, effects):
            self._report(of)
        for value in args:  # a function that is handed over is called with the others
            if value.of is not None and value.of.known is None and changes(value.name):
                self._report(value.of)
            for effect in self._effects(value) if value.name in self._nested else ():
                if effect.handed:
                    for other in args:
                        self._report(other.part())
        results = []
        for effect in effects:  # a class's function may be called with its object, or be a classmethod
            for bound in (True, False) if isinstance(getattr(of, "known", None), type) else (True,):
                for parameter, value in effect.arguments(args, words, bound=bound):
                    if parameter in effect.handed:
                        self._report(value)
                results.append(self._result(effect, args, words, bound=bound))
        if results:
            return reduce(Value.joined, results)
        if of is not None and not is_function:
            held = self._script.values_named(of.name) if name in ("get", "items", "keys", "values") else []
            is_new = name not in HANDING or (bool(held) and all(map(has_plain_items, held)))
            return NEW if is_new else of.part(f"{of.label}.{name}()")
        if name in ("globals", "locals") and isinstance(callee.known, BuiltinFunctionType):
            return Value(OUTSIDE, OUTSIDE, f"{name}()")
        if name in SHARING:
            shared = around(args).part(f"{name}({args[0].label})" if args else "")
            known = isinstance(callee.known, type) and name in ("super", "type") and not args
            return replace(self._itself(), label="super()") if known else shared
        return around(args) if name in GATHERING else NEW

    def _is_changed(self, of: Value, name: str, args: list[Value], effects: list[Effect]) -> bool:
        """Tell whether a method may change its object: `get` without a key is that of a queue."""
        if (effects and of.label in ("self", "cls")) or (of.is_slice and name in OF_LISTS):
            return False
        is_file = any(isinstance(value, IOBase) for value in self._script.values_named(of.name))
        return changes(name) or (name == "get" and not args) or (name == "read" and is_file)

    def _itself(self) -> Value:
        """Return what is known of this function's object."""
        return self._variables[self._effect.parameters[0]] if self._effect.is_method else NEW

    def _effects(self, callee: Value) -> list[Effect]:
        """Return the effects of the functions that a call may run."""
        inside = self._nested.get(callee.name)
        return [inside] if inside is not None and callee.label == "a function" else self._script.effects(callee)

    def _result(self, effect: Effect, args: list[Value], words: Sequence[str] | None, *, bound: bool) -> Value:
        """Return what is known of a result: parameters in it are what was passed for them."""
        value = replace(effect.returns, parameters=frozenset(), name="", of=None)
        if value.level == HANDED or value.inner == HANDED:
            passed = [v for p, v in effect.arguments(args, words, bound=bound) if p in effect.returns.parameters]
            level = max((v.part().level for v in passed), default=FRESH)
            value = replace(
                value,
                level=level if value.level == HANDED else value.level,
                inner=max(level, value.inner) if value.inner != HANDED else level,
                label=passed[0].label if passed else value.label,
                parameters=frozenset().union(*(v.parameters for v in passed)),
            )
        return value


def _has_flag(number: int) -> bool:
    """Tell whether LOAD_ATTR loads a method, in Pythons that have no opcode of its own for that."""
    return sys.version_info >= (3, 12) and bool(number & 1)
