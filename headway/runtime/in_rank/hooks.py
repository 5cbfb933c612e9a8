"""Run a function right after a module was imported, whoever imports it.

One finder on `sys.meta_path` looks at names only; for the few that are
watched it lets the ordinary finders find the module and adds a call after
its execution. The loader stays the genuine object, so sources, resources and
tracebacks work as ever. Standard library only: this runs at the start of
every process of a job.

>>> seen = []
>>> finder = PostImport({"colorsys"}, before=lambda name: None, after=lambda module: seen.append(module.__name__))
>>> finder.install()
>>> import sys; _ = sys.modules.pop("colorsys", None); import colorsys
>>> finder.remove(); seen
['colorsys']
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class PostImport:
    """A finder that calls `before(name)` and `after(module)` around the first import of each watched module."""

    def __init__(self, names: set[str], *, before: Callable[[str], None], after: Callable[[ModuleType], None]) -> None:
        self.names = names
        """Modules still waited for; a caller may add to it."""
        self._before, self._after = before, after
        self.started: object = None
        """What the process was like when it began, where somebody asked for it."""

    @classmethod
    def first(cls, name: str, then: Callable[[PostImport], None]) -> PostImport:
        """Return a finder that calls `then(finder)` before the first import of `name`, to be given its real duties."""

        def before(_: str) -> None:
            then(finder)

        finder = cls({name}, before=before, after=lambda module: None)
        return finder

    def hand_over(self, *, before: Callable[[str], None], after: Callable[[ModuleType], None]) -> None:
        """Call these two from now on, for a module whose import has begun too."""
        self._before, self._after = before, after

    def install(self) -> None:
        """Stand in front of all other finders."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Step back; modules found so far stay as they are."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module through the other finders (PEP 451); None for every other name.

        Finding is not importing yet: many libraries only ask whether torch is there.
        """
        if name not in self.names:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                self._follow(spec, name)
                return spec
        return None

    def _follow(self, spec: ModuleSpec, name: str) -> None:
        """Make the loader call `before` and `after` around `exec_module`; one that takes no attribute is left alone."""
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None or isinstance(loader, type):
            return  # built-in and frozen modules share one loader, a class: watching one would watch them all

        def exec_module(module: ModuleType) -> None:
            """Execute the module, and tell the watcher the first time."""
            if loader.__dict__.get("exec_module") is exec_module:
                del loader.exec_module  # a reload is not followed twice
            if name not in self.names:
                execute(module)
                return
            self.names.discard(name)
            self._before(name)
            execute(module)
            self._after(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]  # on this one loader object
        except AttributeError:
            return
