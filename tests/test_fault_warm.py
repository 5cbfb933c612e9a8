"""Attempts that are forked from a warm process do what cold ones do, or start cold and say why."""

import json

import pytest

from headway.fault.zygote import difference
from headway.runtime.host.warm_note import changes, surroundings
from headway.trace.recording.incident import read_incidents
from tests.launching import run, script
from tests.test_fault_incidents import SUPERVISOR
from tests.warm_jobs import job

pytestmark = pytest.mark.usefixtures("whole_start")

FACES = """
import json, multiprocessing, numpy, pickle, random, threading
drawn = json.dumps([random.random(), float(numpy.random.rand()), torch.rand(1).item()])
pathlib.Path(f"{sys.argv[1]}.random.{attempt}").write_text(drawn)
torch.manual_seed(7)
stdout_kind, stderr_kind = (os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in (1, 2))
with multiprocessing.get_context("spawn").Pool(1) as pool:
    squares = pool.map(square, [3])
del pool  # its semaphores have names, which nobody would remove after a kill
face = {
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "spec": repr(__spec__),
    "main": sys.modules["__main__"].__dict__ is globals(), "pickled": pickle.dumps(square).hex(),
    "drawn": torch.rand(4).tolist(), "squares": squares, "session": os.getsid(0) == os.getpid(),
    "handlers": [str(signal.getsignal(one)) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD)],
    "threads": threading.active_count(), "kinds": [stdout_kind, stderr_kind], "cwd": os.getcwd(),
    "flags": str(sys.flags), "nice": os.nice(0), "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "cmdline": pathlib.Path("/proc/self/cmdline").read_text(), "omp": torch.get_num_threads(),
    "env": sorted(f"{k}={v}" for k, v in os.environ.items() if not k.startswith(("HEADWAY", "MASTER_PORT"))
                  # The second is set by an import: a warm attempt has it from the start, a cold one from there on.
                  and k not in ("TORCHELASTIC_RESTART_COUNT", "TORCHINDUCTOR_CACHE_DIR")),
    "parent": os.getppid() == int(pathlib.Path(sys.argv[1]).read_text()) if attempt else True,
}
if not attempt:
    pathlib.Path(sys.argv[1]).write_text(str(os.getppid()))
pathlib.Path(f"{sys.argv[1]}.{attempt}").write_text(json.dumps(face))
"""

SQUARE = """
def square(x):
    return x * x
"""


def start(tmp_path, text, *arguments, restarts=1, **options):
    """Run a job that is killed in all attempts but the last; returns how it ended and the last incident."""
    done = run(
        tmp_path / "run", [script(tmp_path, text), *map(str, arguments)], {"HEADWAY": ""}, max_restarts=restarts,
        supervisor=SUPERVISOR, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, read_incidents(tmp_path / "run")[-1]


@pytest.mark.slow
def test_a_warm_attempt_shows_the_script_the_same_face_as_a_cold_one(tmp_path):
    note = tmp_path / "note"
    _, incident = start(tmp_path, job(FACES, after=SQUARE, last=2), note, restarts=2)
    cold, warm = (json.loads((tmp_path / f"note.{attempt}").read_text()) for attempt in (0, 1))

    assert (incident.warm, incident.cold_reason) == (True, None)
    assert warm == cold
    drawn = [json.loads((tmp_path / f"note.random.{attempt}").read_text()) for attempt in range(3)]
    assert all(len({*draws}) == 3 for draws in zip(*drawn, strict=True))  # the last two are forks of one process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("import os; os.environ['OMP_NUM_THREADS'] = '2'", "OMP_NUM_THREADS was set"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 more"),
    ],
)
def test_what_an_import_of_torch_could_have_seen_starts_the_next_attempt_cold(tmp_path, before, reason):
    _, incident = start(tmp_path, job("pass", before=before, wait_s=1.0))

    assert not incident.warm
    assert reason in (incident.cold_reason or "")


def test_a_change_of_each_surrounding_is_named():
    now = surroundings()

    assert changes(now, surroundings()) == []
    assert changes(now, {**now, "env": {**now["env"], "HEADWAY_X": "1", "X": "1"}}) == ["X was set"]
    for key in now.keys() - {"env"}:
        assert len(changes(now, {**now, key: "another"})) == 1


def test_a_module_from_another_file_is_named():
    assert difference({"a": "/x/a.py"}, {"a": "/x/a.py", "b": "/x/b.py"}) == ""
    assert difference({"a": "/x/a.py"}, {}) == "a comes from nowhere, in the ranks from /x/a.py"
