"""A stand-in for the context that a rank hands to its remedies: patches for real, keeps outcomes in a list."""

from contextlib import contextmanager
from types import SimpleNamespace

from headway.catalog import RECORDS
from headway.data import remedies as data
from headway.data.guard.decisions import Budget
from headway.fault import remedies as fault
from headway.runtime.calls.patches import replace_attribute
from headway.runtime.in_rank.remedy import RefusedRemedy

BY_FUNCTION = {record.apply: record for record in [*RECORDS.values(), *data.MEASUREMENTS, *data.CHECKS, *fault.DRILL]}
"""'module:function' -> the record of the remedy that it applies."""


class TestContext:
    """Patches and undoes like the real one; nothing is written to disk."""

    __test__ = False

    def __init__(self, allow="", verify=False):
        self.allow, self.undos, self.outcomes = allow, [], []
        self.verify, self.failures, self.step_s = "all" if verify is True else verify or "", [], None
        # A clock that stands still, and a minute for each child: what is tried, and what comes of it, do not depend on
        # how busy the host of the tests is.
        self.shared = {"data.trials": Budget(clock=lambda: 0.0, longest_s=60.0)}
        self.probes = SimpleNamespace(
            constructed={},
            failed=lambda name, cause: self.failures.append((name, cause)),
            emit=lambda *record: None,
            steps=[0],
        )
        self.listeners = []
        self.undoes = False
        """Whether a remedy that fails is taken back, as it is in a rank."""

    def around_forward(self, wrapper):
        inside = [False]

        def around(original):
            inner = wrapper(lambda module, args, kwargs: original(module, *args, **kwargs))

            def __call__(module, *args, **kwargs):  # noqa: N807 - the name it has in torch
                if inside[0]:
                    return original(module, *args, **kwargs)
                inside[0] = True
                try:
                    return inner(module, args, kwargs)
                finally:
                    inside[0] = False

            return __call__

        return self.patch("torch.nn.modules.module:Module.__call__", around)

    def listen(self, listener):
        self.listeners.append(listener)

    def after(self, steps):
        """Call what listens to steps."""
        self.probes.steps[0] = steps
        for listener in self.listeners:
            listener(0)

    def patch(self, target, wrapper, **_):
        undo = replace_attribute(target, wrapper)
        self.undos.append(undo)
        return undo

    def guarded(self, wrapper, **_):
        return wrapper

    def hook(self, function):
        return function

    def fail(self, name, reason):
        self.outcomes.append(RefusedRemedy(name, reason))
        while self.undoes and self.undos:
            self.undos.pop()()

    def note(self, outcome):
        self.outcomes.append(outcome)


def apply(remedy, parameters, context):
    """Call the function of a remedy as a rank does, with its parameters read and its grant asked for; raises freely."""
    record = BY_FUNCTION[f"{remedy.__module__}:{remedy.__qualname__}"]
    read = record.read(parameters)
    if record.allow not in (None, context.allow):
        return RefusedRemedy(record.name, record.asks)
    return remedy(read, context)


@contextmanager
def applied(remedy, parameters, allow="", verify=False):
    """Apply `remedy` for the length of a block; yields the context."""
    own_grant = "data.threads" if remedy.__name__ == "threads" else ""
    context = TestContext(allow or own_grant, verify)
    try:
        apply(remedy, parameters, context)
        yield context
    finally:
        for undo in reversed(context.undos):
            undo()
