"""Exit classes: the guilty rank is named, never the one that only lost its peer."""

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import HEADER
from headway.runtime.run_folder.exit_class import (
    CLASSES,
    OomWatch,
    RankEnd,
    advice,
    classify,
    exit_status,
    failed_at_exit,
    first_failure,
    is_secondary,
    traceback_of,
)

GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:21983"
TEARDOWN = "terminate called without an active exception\n"


def raised(*lines: str) -> str:
    """Return stderr that ends with a traceback whose exception is `lines`."""
    return "\n".join(["some progress", HEADER, '  File "train.py", line 3, in <module>', "    main()", *lines]) + "\n"


OUTCOMES = st.builds(
    RankEnd, rank=st.integers(0, 7), code=st.sampled_from([0, 1, 2, -6, -9, -11, -15]), end_ns=st.integers(0, 100),
    stderr=st.sampled_from(["", raised("ValueError: x"), raised(GLOO), TEARDOWN, raised("MemoryError")]),
    traceback_ns=st.none() | st.integers(0, 100), told=st.booleans(),
)  # fmt: skip


@given(st.lists(OUTCOMES, max_size=6))
def test_a_fault_of_its_own_always_goes_before_a_lost_connection(ends):
    first = first_failure(ends)

    assert (first is None) == all(end.code == 0 for end in ends)
    assert classify(first) in CLASSES
    if first is not None and is_secondary(first):
        assert all(is_secondary(end) for end in ends if end.code)


@given(st.integers(-64, 255))
def test_an_exit_status_is_what_a_shell_reports(code):
    assert exit_status(code) == (code if code >= 0 else 128 + abs(code))


@pytest.mark.parametrize(
    ("code", "stderr", "cls"),
    [
        (1, raised("ValueError: bad"), "user"),
        (3, "", "user"),
        (1, raised("SystemExit: 1"), "user"),
        (1, raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"), "oom"),
        (1, raised("MemoryError"), "oom"),
        (1, raised("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9"), "oom"),
        (1, raised("RuntimeError: Timed out waiting 1800000ms for recv operation to complete"), "hang"),
        (-6, "[rank3]:[E1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n", "hang"),
        (1, raised(GLOO), "infra"),
        (1, raised("torch.distributed.DistBackendError: NCCL error: remote process exited"), "infra"),
        (1, raised("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error."), "infra"),
        (1, raised("OSError: [Errno 28] No space left on device"), "infra"),
        (1, raised("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), "infra"),
        (1, raised("RuntimeError: basic_ios::clear: iostream error"), "infra"),  # torch.save of little, on a full disk
        (-signal.SIGABRT, TEARDOWN, "infra"),
        (-signal.SIGSEGV, "", "infra"),
        (-signal.SIGKILL, "", "infra"),
        (-signal.SIGTERM, "", "preempted"),
        (-signal.SIGINT, raised("KeyboardInterrupt"), "user"),
        (-signal.SIGALRM, "", "user"),
    ],
)
def test_classes(code, stderr, cls):
    assert classify(RankEnd(0, code, stderr=stderr)) == cls


def test_an_exception_whose_teardown_aborts_is_still_the_users():
    raising = RankEnd(1, -signal.SIGABRT, end_ns=9, stderr=raised("ValueError: x") + TEARDOWN)
    losing = RankEnd(0, -signal.SIGABRT, end_ns=5, stderr=raised(GLOO) + TEARDOWN)

    assert first_failure([losing, raising]) is raising
    assert (classify(raising), classify(losing)) == ("user", "infra")


def test_a_traceback_that_was_handled_long_before_an_abort_is_not_its_reason():
    handled = raised("ValueError: handled") + "".join(f"step {n}\n" for n in range(20))

    assert classify(RankEnd(0, -signal.SIGABRT, stderr=handled + TEARDOWN)) == "infra"
    assert classify(RankEnd(0, -signal.SIGKILL, stderr=handled)) == "infra"


def test_a_kill_with_evidence_of_lost_memory_is_oom():
    assert classify(RankEnd(0, -9, oom_killed=True)) == "oom"
    assert classify(RankEnd(0, 0), preempted=True) == "preempted"
    assert classify(None) == "ok"


def test_the_rank_that_raised_is_blamed_though_its_peers_died_of_it_earlier():
    ends = [
        RankEnd(0, 1, end_ns=10, stderr=raised(GLOO), traceback_ns=5),
        RankEnd(1, -signal.SIGABRT, end_ns=9, stderr=TEARDOWN),
        RankEnd(2, 1, end_ns=90, stderr=raised("KeyError: 'x'"), traceback_ns=6),
        RankEnd(3, -signal.SIGTERM, end_ns=95, told=True),
    ]
    assert first_failure(ends).rank == 2


def test_of_two_faults_the_earlier_traceback_is_first():
    ends = [
        RankEnd(0, 1, end_ns=10, stderr=raised("ValueError: late"), traceback_ns=8),
        RankEnd(1, 1, end_ns=20, stderr=raised("ValueError: early"), traceback_ns=3),
    ]
    assert first_failure(ends).rank == 1


def test_a_user_exception_that_mentions_connections_further_up_is_still_the_users():
    chained = raised("ConnectionResetError: Connection reset by peer") + (
        "\nDuring handling of the above exception, another exception occurred:\n\n" + raised("KeyError: 'shard'")
    )
    assert classify(RankEnd(0, 1, stderr=chained)) == "user"


def test_the_last_traceback_is_taken_with_what_it_was_chained_from():
    handled = raised("ValueError: handled and logged")
    chained = (
        raised("OSError: first")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + raised("RuntimeError: second", "with a second line")
    )
    found = traceback_of(handled + "more progress\n" + chained + "[W1120 10:00:00.1 ProcessGroup.cpp:1] Warning: x\n")

    assert found.startswith(HEADER)
    assert found.endswith("RuntimeError: second\nwith a second line")
    assert "OSError: first" in found
    assert "handled" not in found
    assert "Warning" not in found


def test_the_rank_prefix_that_torch_writes_is_taken_off():
    text = "".join(f"[rank2]: {line}\n" for line in raised("ValueError: x").splitlines()[1:])

    assert traceback_of(text).splitlines()[-1] == "ValueError: x"
    assert traceback_of("no traceback here") is None


def test_a_known_cause_has_its_own_fix():
    words = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. insufficient shared memory (shm)"

    assert "--shm-size" in advice(RankEnd(0, 1, stderr=words), "infra")


def test_memory_counters_that_rise_are_evidence(tmp_path):
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 1\n")
    watch = OomWatch(tmp_path, tmp_path / "no-log")
    before = watch.killed(1)
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 2\n")

    assert (before, watch.killed(1)) == (False, True)


def test_the_kernels_log_names_the_process(tmp_path):
    log = tmp_path / "kmsg"
    watch = OomWatch(tmp_path, log)
    log.write_text(f"6,1,{10**15},-;Out of memory: Killed process 4242 (python) total-vm:1kB\n")

    assert watch.killed(4242)
    assert not watch.killed(424)
    log.write_text("6,1,0,-;Out of memory: Killed process 4242 (python) total-vm:1kB\n")
    assert not watch.killed(4242)  # it was another process of that number, before the start
    assert not OomWatch(Path("/nonexistent"), Path("/nonexistent")).killed(1)


def test_the_rank_that_a_run_was_ended_for_is_named_whatever_its_code():
    ends = [RankEnd(0, -15, end_ns=1, told=True), RankEnd(1, 0, end_ns=9, told=True, hung=True)]

    assert first_failure(ends).rank == 1
    assert classify(first_failure(ends)) == "hang"
    assert classify(first_failure(ends), preempted=True) == "preempted"


@pytest.mark.parametrize(
    ("content", "failed"),
    [
        (None, False),
        ("{", False),
        ('{"rank": 1, "remedies": [{"name": "a", "facts": {}}]}', False),
        (
            '{"rank": 1, "remedies": [{"name": "a", "facts": {}}, {"name": "b", "facts": {"failed_at_exit": "x"}}]}',
            True,
        ),
    ],
)
def test_a_remedy_can_tell_of_a_failure_after_the_scripts_last_line(tmp_path, content, failed):
    (tmp_path / "applied").mkdir()
    if content is not None:
        (tmp_path / "applied" / "r1.json").write_text(content)

    assert failed_at_exit(tmp_path, 1) is failed
