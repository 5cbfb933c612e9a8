"""Several hosts: two launchers on loopback meet through torch's rendezvous, and their parts merge into one run."""

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from headway.core.errors import InputError
from headway.trace.recording.runs import Run, merge
from tests.launching import DDP, alive, run, script, start, wait_for


def free_port() -> int:
    """Return a port that was free a moment ago: two launchers must be told the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def both(
    tmp_path: Path, job: list[str], *, backend: str, shared: bool = False, **options
) -> list[tuple[int, str, Path]]:
    """Run two one-rank hosts and return (exit code, stderr, run folder) of each."""
    endpoint = f"127.0.0.1:{free_port()}"
    outs = [tmp_path / ("run" if shared else f"host{k}") for k in (0, 1)]
    hosts = [
        start(
            outs[k], job, {"HEADWAY": options.get("recording", "")}, nnodes=2, node_rank=k, rdzv_backend=backend,
            rdzv_endpoint=endpoint, rdzv_id="test", local_addr="127.0.0.1",
            **{key: value for key, value in options.items() if key != "recording"},
        )
        for k in (0, 1)
    ]  # fmt: skip
    ends = [host.communicate(timeout=110) for host in hosts]
    return [(host.returncode, stderr, out) for host, (_, stderr), out in zip(hosts, ends, outs, strict=True)]


@pytest.mark.slow
def test_two_hosts_meet_train_and_merge_into_one_run(tmp_path):
    ends = both(tmp_path, [script(tmp_path, DDP)], backend="c10d")
    assert [code for code, _, _ in ends] == [0, 0], ends
    run_ = merge([Run.open(out) for _, _, out in ends])

    assert sorted(run_.trace.ranks) == [0, 1]
    assert [int(run_.trace.select(ranks=[r]).named("optimizer.step").sum()) for r in (0, 1)] == [5, 5]
    assert run_.meta["world_size"] == 2
    # One host pretends to be two: its clocks are the same but for the noise of pairing them.
    assert all(abs(offset) < 50_000_000 for offset in run_.clock_offset_ns.values())


@pytest.mark.slow
def test_every_attempt_of_two_hosts_has_a_store_of_its_own(tmp_path):
    job = script(
        tmp_path,
        """
        import os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        with open(sys.argv[1] + f"/{attempt}-{os.environ['RANK']}", "w") as file:
            file.write(os.environ["MASTER_PORT"] + os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        sys.exit(1 if attempt == "0" else 0)
        """,
    )
    ends = both(tmp_path, [job, str(tmp_path)], backend="static", shared=True, max_restarts=1, recording="off")
    ports = [{(tmp_path / f"{attempt}-{rank}").read_text() for rank in (0, 1)} for attempt in (0, 1)]

    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [len(found) for found in ports] == [1, 1]
    assert ports[0] != ports[1]
    hosts = [json.loads((tmp_path / "run" / name).read_text()) for name in ("run.json", "run-host1.json")]
    assert [[row["exit_code"] for row in host["ranks"]] for host in hosts] == [[1, 0], [1, 0]]


def test_a_rendezvous_without_an_endpoint_is_refused():
    from headway.runtime.launching.elastic import backend_setup

    with pytest.raises(InputError, match="HOST:PORT"):
        backend_setup("c10d", "", "127.0.0.1", None, {})
    assert backend_setup("static", "", "10.0.0.1", None, {"timeout": 5}) == ("10.0.0.1:29500", {"timeout": 5})


@pytest.mark.slow
def test_hosts_that_nobody_joins_give_up_after_their_time(tmp_path):
    done = run(
        tmp_path / "run", [script(tmp_path, "pass")], nnodes=2, rdzv_backend="c10d", rdzv_id="lonely",
        rdzv_endpoint=f"127.0.0.1:{free_port()}", rdzv_conf={"join_timeout": 1},
    )  # fmt: skip

    assert done.returncode != 0
    assert "no rank was started" in done.stderr


@pytest.mark.slow
def test_sigterm_to_one_host_ends_its_ranks_and_is_a_preemption(tmp_path):
    job = script(
        tmp_path,
        """
        import os, sys, time
        open(sys.argv[1] + f"/pid-{os.environ['RANK']}-{os.getpid()}", "w").close()
        time.sleep(600)
        """,
    )
    endpoint = f"127.0.0.1:{free_port()}"
    hosts = [
        start(
            tmp_path / f"host{k}", [job, str(tmp_path)], nnodes=2, node_rank=k, rdzv_endpoint=endpoint,
            local_addr="127.0.0.1", grace_s=5.0,
        )
        for k in (0, 1)
    ]  # fmt: skip
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    for host in hosts:
        host.send_signal(signal.SIGTERM)
    for host in hosts:
        host.communicate(timeout=60)
    pids = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("pid-*")]

    assert [host.returncode for host in hosts] == [143, 143]
    assert not any(alive(pid) for pid in pids)
    assert json.loads((tmp_path / "host1" / "run-host1.json").read_text())["exit"]["class"] == "preempted"


@pytest.mark.slow
def test_the_host_of_the_store_that_is_lost_is_named_on_the_other(tmp_path):
    job = script(tmp_path, "import os, sys, time\nopen(sys.argv[1] + '/up-' + os.environ['RANK'], 'w').close()\n"
                           "time.sleep(600)\n")  # fmt: skip
    endpoint = f"127.0.0.1:{free_port()}"
    hosts = [
        start(
            tmp_path / f"host{k}", [job, str(tmp_path)], nnodes=2, rdzv_backend="c10d", rdzv_endpoint=endpoint,
            local_addr="127.0.0.1", grace_s=5.0, rdzv_conf={"is_host": str(k == 0).lower()}, quiet=False,
        )
        for k in (0, 1)
    ]  # fmt: skip
    wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 2)
    hosts[0].kill()
    for host in hosts:
        _, said = host.communicate(timeout=60)

    assert f"the rendezvous ended: the host of its store, {endpoint}, does not answer any more" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, {"node_rank": 0}),  # keeps the store, host 1 does not come
        (signal.SIGINT, {"node_rank": 1}),  # host 0 does not answer
        (signal.SIGTERM, {"rdzv_backend": "c10d"}),  # has joined, the second does not
        (signal.SIGINT, {"rdzv_backend": "c10d", "rdzv_conf": {"is_host": "false"}}),  # the store's host is not up
    ],
    ids=["static-host0", "static-host1", "c10d-joined", "c10d-no-store"],
)
def test_a_signal_ends_the_wait_for_hosts_that_do_not_come(tmp_path, number, options):
    process = start(
        tmp_path / "run", [script(tmp_path, "raise SystemExit('never started')")], nnodes=2, rdzv_id="lonely",
        rdzv_endpoint=f"127.0.0.1:{free_port()}", local_addr="127.0.0.1", grace_s=600.0, **options,
    )  # fmt: skip
    wait_for(lambda: catches(process.pid, number))
    asked = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == 128 + number
    assert time.monotonic() - asked < 30, "it waited for its rendezvous"
    assert f"stopped by {signal.Signals(number).name} while waiting for the other hosts" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "run").exists()


def catches(pid: int, number: int) -> bool:
    """Say whether a launcher has come to its wait: it has taken the signals over that Python leaves alone."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return all(caught >> (signum - 1) & 1 for signum in (signal.SIGTERM, number))
