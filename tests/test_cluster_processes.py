"""Jobs of a service as processes of this host: killed by hand, stopped, or ended while no server runs."""

import os
import signal
import sqlite3
import time

import pytest

from headway.cluster.service.executors import LocalExecutor
from headway.cluster.service.server import ServiceServer, SharingOptions, SubmitJob, log_of
from headway.cluster.service.state import ENDED
from headway.cluster.service.store import EventLog, JobCancelled
from headway.core.errors import FormatError, HeadwayError
from tests.made.service_jobs import SCRIPT


@pytest.fixture
def local(tmp_path):
    """Makes servers of one folder whose jobs are processes of this host, on two slots; returns what makes one."""
    pools = {"slot": 2}
    options = SharingOptions(pools, "las", 3600.0)
    servers = []

    def make():
        servers.append(ServiceServer(tmp_path / "s", options, LocalExecutor(tmp_path / "s", pools), look_s=0.05))
        return servers[-1]

    yield make
    for server in servers:
        for job in server.state.live():
            LocalExecutor(tmp_path / "s", pools).end(job.as_attempt())
        server.close()


def turned(server, until, limit_s=60.0):
    began_s = time.monotonic()
    while not until():
        server.turn(0.05)
        assert time.monotonic() - began_s < limit_s, server.state.rows()


@pytest.mark.slow
@pytest.mark.parametrize("then", ["ends", "is cancelled", "is asked to leave"])
def test_a_job_whose_shell_is_killed_goes_on_is_not_started_twice_and_its_end_is_seen(tmp_path, local, then):
    (tmp_path / "job.py").write_text(SCRIPT)
    server, steps = local(), 40 if then == "ends" else 10_000
    server.submit(SubmitJob("", 1, [str(tmp_path / "job.py"), str(tmp_path / "j"), str(steps), "0.05"], str(tmp_path)))
    job = server.state.job("job1")
    folder, done = tmp_path / "s" / "jobs" / "job1" / "1", tmp_path / "j" / "done"
    turned(server, done.exists)
    os.kill(int((folder / "pid").read_text().split()[0]), signal.SIGKILL)
    seen = len(done.read_text().split())
    turned(server, lambda: len(done.read_text().split()) > seen + 10)  # more than a second look at it

    assert (job.state, job.attempt) == ("running", 1)
    if then == "is asked to leave":
        executor = LocalExecutor(tmp_path / "s", {"slot": 2})
        for _ in range(2):  # a server that was killed behind its question asks once more
            executor.ask_to_leave(job.as_attempt())
        turned(server, lambda: job.attempt == 2)
        count = len(done.read_text().split())
        turned(server, lambda: len(done.read_text().split()) > count)
    if then != "ends":
        server.cancel(job)
    turned(server, lambda: job.state in ENDED)
    numbers = done.read_text().split()
    assert job.state == ("finished" if then == "ends" else "cancelled")
    assert job.attempt == (2 if then == "is asked to leave" else 1)
    assert numbers == [f"{number + 1}" for number in range(len(numbers))]
    assert not (tmp_path / "j" / "twice").exists()


@pytest.mark.slow
def test_steps_of_a_job_that_ends_while_no_server_runs_are_counted(tmp_path, local):
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(23):\n"
        "    optimizer.zero_grad(), model(torch.ones(1, 2)).sum().backward(), optimizer.step()\n"
    )
    server = local()
    server.submit(SubmitJob("", 1, [str(tmp_path / "train.py")], str(tmp_path)))
    server.turn(0.0)
    server.close()
    noted = tmp_path / "s" / "jobs" / "job1" / "1" / "exit"
    began_s = time.monotonic()
    while not noted.exists():
        time.sleep(0.1)
        assert time.monotonic() - began_s < 90
    server = local()
    turned(server, lambda: server.state.job("job1").state in ENDED)
    (row,) = server.state.rows()

    assert (row["state"], row["steps_done"], row["restarts"]) == ("finished", 23, 0)


@pytest.mark.slow
def test_a_lock_that_is_deleted_holds_up_nobody_and_a_log_that_is_gone_ends_the_server(tmp_path, local):
    (tmp_path / "job.py").write_text(SCRIPT)
    server = local()
    for name, steps in (("a", 10_000), ("b", 5)):
        arguments = [str(tmp_path / "job.py"), str(tmp_path / name), str(steps), "0.05"]
        server.submit(SubmitJob(name, 1, arguments, str(tmp_path)))
    turned(server, (tmp_path / "a" / "done").exists)
    (tmp_path / "s" / "jobs" / "job1" / "1" / "lock").unlink()
    turned(server, lambda: server.state.job("b").state == "finished")

    assert (server.state.job("a").state, server.state.job("a").attempt) == ("running", 1)
    server.cancel(server.state.job("a"))
    turned(server, lambda: server.state.job("a").state in ENDED)
    log_of(tmp_path / "s").unlink()
    with pytest.raises(HeadwayError, match=r"log.sqlite was deleted or replaced. This server ends"):
        server.turn(0.0)


@pytest.mark.slow
def test_a_launcher_that_is_stopped_is_killed_in_the_end(tmp_path, local):
    (tmp_path / "job.py").write_text(SCRIPT)
    server = local()
    server.submit(SubmitJob("", 1, [str(tmp_path / "job.py"), str(tmp_path / "j"), "10000", "0.05"], str(tmp_path)))
    job = server.state.job("job1")
    turned(server, (tmp_path / "j" / "done").exists)
    folder, executor = tmp_path / "s" / "jobs" / "job1" / "1", LocalExecutor(tmp_path / "s", {"slot": 2})
    launcher = int((folder / "pid").read_text().split()[1])
    os.kill(launcher, signal.SIGSTOP)
    attempt = job.as_attempt()
    executor.end(attempt)
    os.utime(folder / "ending", (0, 0))  # its time to end is over
    alive = executor.alive([attempt])["job1"].alive
    executor.end(attempt)
    turned(server, lambda: not executor.alive([attempt])["job1"].alive)

    assert alive
    server.cancel(job)
    turned(server, lambda: job.state in ENDED)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("PRAGMA user_version = 99", "version 99, this release reads version 2"),
        ("PRAGMA user_version = 1", "version 1, this release reads version 2"),
        ("PRAGMA application_id = 7", "another program's"),
        ("UPDATE events SET body = '{}'", "event 1 is damaged"),
        ("DROP TABLE events", "cannot be read"),
    ],
)
def test_a_log_of_another_kind_or_version_is_one_error(tmp_path, change, error):
    with EventLog(log_of(tmp_path)) as log:
        log.append([JobCancelled(at_s=0.0, job="job1")])
    database = sqlite3.connect(log_of(tmp_path))
    database.execute(change)
    database.commit()
    database.close()

    with pytest.raises(FormatError, match=error), EventLog(log_of(tmp_path), write=False) as log:
        log.read()
