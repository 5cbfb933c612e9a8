"""A stand-in for the context that a rank hands to its remedies: patches for real, keeps outcomes in a list."""

from __future__ import annotations

from contextlib import contextmanager

from headway.runtime.patches import replace_attribute


class TestContext:
    """Patches and undoes like the real one; nothing is written to disk."""

    __test__ = False

    def __init__(self, allow=""):
        self.allow, self.undos, self.outcomes = allow, [], []

    def patch(self, target, wrapper):
        undo = replace_attribute(target, wrapper)
        self.undos.append(undo)
        return undo

    def note(self, outcome):
        self.outcomes.append(outcome)


@contextmanager
def applied(remedy, parameters, allow=""):
    """Apply `remedy` for the length of a block; yields the context."""
    context = TestContext(allow)
    try:
        remedy(parameters, context)
        yield context
    finally:
        for undo in reversed(context.undos):
            undo()
