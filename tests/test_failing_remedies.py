"""Remedies that fail: a guard around what they replace, and a few steps of each remedy made to fail in a real job."""

import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback

import pytest
import torch
from torch.utils.data import DataLoader

from headway.core.files.planfile import Remedy
from headway.core.remedies import RemedyRecord
from headway.data.workers.apply import workers
from headway.runtime.in_rank.guard import guarded
from headway.runtime.in_rank.remedy import RefusedRemedy, apply_one
from tests.loaders_made import Squares
from tests.paths import ROOT, python_path
from tests.recorded import environment
from tests.remedy_context import applied
from tests.test_remedy import context  # noqa: F401  # a fixture


def fails_before(original):
    """A replacement that never comes to call the original."""

    def replacement(value):
        raise OSError("no room")

    return replacement


def fails_after(original):
    """A replacement that fails once the original has returned."""

    def replacement(value):
        original(value)
        raise OSError("no room")

    return replacement


@pytest.mark.parametrize("wrapper", [fails_before, fails_after])
def test_a_replacement_that_fails_costs_its_caller_nothing_and_the_original_is_called_once(wrapper):
    calls, causes = [], []
    function = guarded(wrapper, lambda cause, first: causes.append((str(cause), first)))(calls.append)

    assert function(3) is None
    assert (calls, causes) == ([3], [("no room", True)])


def test_what_a_handler_of_a_signal_raises_goes_on_to_the_script():
    """As where a script gives up a batch that takes too long."""
    script, calls, causes = {"__name__": "__main__"}, [], []
    exec("class LateError(Exception): pass\ndef late(*_): raise LateError", script)

    def waits(original):
        def replacement(value):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(5)

        return replacement

    before = signal.signal(signal.SIGUSR1, script["late"])
    try:
        with pytest.raises(script["LateError"]):
            guarded(waits, lambda cause, first: causes.append(cause))(calls.append)(3)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (calls, causes) == ([], [])


@pytest.mark.parametrize("error", [KeyError("its own"), StopIteration(), KeyboardInterrupt(), GeneratorExit()])
def test_what_the_original_raises_goes_on_without_a_context(error):
    def original():
        raise error

    causes = []
    function = guarded(lambda inner: lambda: inner(), lambda cause, first: causes.append(cause))(original)

    with pytest.raises(type(error)) as caught:
        function()
    assert caught.value is error
    assert caught.value.__context__ is None
    assert causes == []


def failing(parameters, made):
    """A remedy whose replacement fails."""
    from headway.runtime.in_rank.remedy import Applied

    made.patch("colorsys:rgb_to_yiq", fails_before)
    return Applied("test.failing")


RECORDS = (RemedyRecord("test.failing", apply=f"{__name__}:failing"),)


def test_a_remedy_that_fails_in_use_is_undone_and_says_why_whatever_it_notes_later(context):  # noqa: F811  # as above
    import colorsys

    before = colorsys.rgb_to_yiq
    context.outcomes.append(apply_one(Remedy("test.failing", {}), {"test.failing": f"{__name__}:RECORDS"}, context))
    with pytest.raises(TypeError):  # the original's own
        colorsys.rgb_to_yiq(1)
    context.note(RefusedRemedy("test.failing", "something else"))

    assert colorsys.rgb_to_yiq is before
    assert context.outcomes == [RefusedRemedy("test.failing", "failed while it was set up: OSError: no room")]


@pytest.mark.slow
def test_steps_of_each_remedy_that_fail_leave_the_script_its_results():
    """In a process of its own: each step fails in a fork, and what pytest makes of warnings would count as failures."""
    command = [sys.executable, str(ROOT / "benchmarks" / "failing_remedies.py"), "--sample", "1"]
    done = subprocess.run(
        command, env=environment(None, PYTHONPATH=python_path(ROOT)), capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stdout + done.stderr


IN_WORKERS = [
    "hand_over:account.loads_as", "hand_over:_drop_handlers", "hand_over:set_generators", "hand_over:BatchEntries",
    "hand_over:FilesRead", "hand_over:listen_here", "hand_over:GeneratorWatch", "hand_over:data_of",
    "hand_over:noting", "hand_over:written_since", "hand_over:packed", "hand_over:replace",
]  # fmt: skip
"""Functions that worker processes of a script without workers of its own call: module:name."""


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_WORKERS)
def test_a_step_that_fails_in_worker_processes_leaves_the_loop_its_batches(name, monkeypatch):
    failed = os.memfd_create("failed")
    module, _, path = name.partition(":")
    target = f"headway.data.workers.{module}.{path}"
    original = pkgutil.resolve_name(target)

    def fails_in_workers(*arguments, **named):
        if "_worker_loop" in [row.name for row in traceback.extract_stack()]:
            os.write(failed, b".")
            raise OSError("made to fail")
        return original(*arguments, **named)

    monkeypatch.setattr(target, fails_in_workers)
    torch.manual_seed(3)
    with applied(workers, {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}) as said:
        batches = [batch.tolist() for _ in range(2) for batch in DataLoader(Squares(24), 4, shuffle=True)]
    torch.manual_seed(3)
    expected = [batch.tolist() for _ in range(2) for batch in DataLoader(Squares(24), 4, shuffle=True)]

    assert os.fstat(failed).st_size, said.outcomes
    assert batches == expected
    os.close(failed)
