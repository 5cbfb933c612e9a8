"""What a signal's handler raises while headway's code runs reaches the script, and leaves nothing half done."""

import ctypes
import functools
import gc
import io
import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from headway.core.machine.interruptions import is_scripts, pass_on, suppress_own
from tests.paths import ROOT
from tests.recorded import recording, rows


class LateError(Exception):
    """A time-out of the script's."""


def late(*_: object) -> None:
    raise LateError


class Handler:
    def method(self, number, frame):
        raise LateError

    def __call__(self, number, frame):
        raise TimeoutError


def replaced(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise TimeoutError


def raised_by(handler):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except Exception as error:
        return error
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "handler", [late, Handler().method, Handler(), functools.partial(late), lambda number, frame: late(), replaced]
)
def test_what_any_kind_of_handler_raises_is_the_scripts(handler):
    assert is_scripts(raised_by(handler))
    with pytest.raises((LateError, TimeoutError)), suppress_own():
        raise raised_by(handler)


def test_an_error_of_headways_own_is_not():
    with suppress_own():
        raise TimeoutError
    for error in (OSError("full"), LateError()):
        pass_on(error)


def test_an_exception_of_the_scripts_class_that_another_thread_raises_here_is_the_scripts():
    spoiled = compile("while True: pass", str(ROOT / "headway" / "core" / "units.py"), "exec")
    me = ctypes.c_ulong(threading.get_ident())
    threading.Timer(0.01, lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(me, ctypes.py_object(LateError))).start()
    with pytest.raises(LateError), suppress_own():
        exec(spoiled)


def collect_until_late():
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        gc.collect()


@pytest.fixture
def no_other_callbacks():
    """Set the collector's callbacks of others aside: hypothesis has one in Python, which loses what handlers raise."""
    others = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(others)


@pytest.mark.slow
@pytest.mark.usefixtures("no_other_callbacks")
def test_a_handlers_exception_is_not_lost_in_a_collection(tmp_path):
    """The handler runs as soon as Python code does: in the collector's callbacks nobody would get what it raises."""
    with recording(tmp_path):
        junk = [[one] for one in range(200_000)]
        before = signal.signal(signal.SIGALRM, late)
        try:
            for _ in range(10):
                with pytest.raises(LateError):
                    collect_until_late()
        finally:
            signal.signal(signal.SIGALRM, before)
    assert len(junk) == 200_000
    assert len(rows(tmp_path)["host.gc"]) >= 10


class At:
    """Raises a signal at the `at`-th moment in headway's functions at which Python looks for one: behind each call."""

    def __init__(self, at: int) -> None:
        self.at, self.moments = at, 0

    def __call__(self, frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(str(ROOT / "headway")):
            self.moments += 1
            if self.moments == self.at:
                os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.slow
def test_a_handlers_exception_at_any_moment_of_a_recorded_step_reaches_the_script(tmp_path):
    with recording(tmp_path) as session:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader = DataLoader(torch.ones(4, 2), 2)

        def step():
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.save(model.state_dict(), io.BytesIO())
            gc.collect(0)

        def profiled(at: int) -> int:
            profile = At(at)
            sys.setprofile(profile)
            try:
                step()
            finally:
                sys.setprofile(None)
            return profile.moments

        for _ in range(3):
            step()
        num_moments = profiled(0)
        before = signal.signal(signal.SIGUSR1, late)
        lost = []
        try:
            for at in range(1, num_moments, 2):
                try:
                    if profiled(at) >= at:
                        lost.append(at)
                except LateError:
                    pass
        finally:
            signal.signal(signal.SIGUSR1, before)
        failed = {name: said for name, said in session.probes.tables["patches"].items() if said != "ok"}
        start = session.probes.steps[0]
        step()
        counted, probes = session.probes.steps[0] - start, session.probes
        open_state = (
            probes.forwarding[0], probes.stepping[0], probes.fetching[0], probes.garbage.called, probes.inside,
        )  # fmt: skip
    assert num_moments > 100
    assert (lost, failed, counted) == ([], {}, 2)
    assert open_state == (False, False, False, 0, set())
