"""Run a script as `python SCRIPT ARGUMENTS` does, with the functions of its own that WORLD_SPANS names timed.

The script's syntax tree gets one decorator per named function ("__main__:evaluate", "__main__:Data.__getitem__"); its
lines and its names stay as they are.
"""

import ast
import json
import os
import sys
import types


class Decorated(ast.NodeTransformer):
    """Put a timing decorator on functions by their qualified name."""

    def __init__(self, kinds):
        self.kinds, self.path = kinds, []

    def visit_ClassDef(self, statement):
        """Remember the class around its methods."""
        self.path.append(statement.name)
        self.generic_visit(statement)
        self.path.pop()
        return statement

    def visit_FunctionDef(self, statement):
        """Decorate the function where it is named."""
        kind = self.kinds.get(".".join([*self.path, statement.name]))
        if kind:
            timed = f"lambda function: __import__('sys').world_clock.timed({kind!r}, function)"
            statement.decorator_list.append(ast.copy_location(ast.parse(timed, mode="eval").body, statement))
        self.generic_visit(statement)
        return statement


def main():
    """Compile the script with its decorators and run it as __main__."""
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    spans = json.loads(os.environ.get("WORLD_SPANS", "{}"))
    kinds = {
        name.partition(":")[2]: kind for kind, names in spans.items() for name in names if name.startswith("__main__:")
    }
    with open(script, encoding="utf8") as file:
        tree = Decorated(kinds).visit(ast.parse(file.read(), script))
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(ast.fix_missing_locations(tree), script, "exec"), module.__dict__)


main()
