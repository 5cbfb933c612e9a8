"""The launcher: same environment as torchrun, arguments untouched, options checked, one folder per run."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headway.core.errors import InputError
from headway.runtime.host.rank_env import Port, check_host, num_processes, parse_hosts
from headway.runtime.launching.launch import launch
from headway.runtime.launching.options import LaunchOptions
from headway.trace.recording.runs import Run
from tests.launching import run, script
from tests.paths import ROOT

ARGUMENTS = ["--help", "", "-m", "pkg", "--nproc-per-node", "grüße", "a b", "--", "$HOME", "*"]


def test_arguments_reach_the_script_unchanged(tmp_path):
    job = script(tmp_path, "import json, sys; print(json.dumps(sys.argv[1:]))")
    done = run(tmp_path / "run", [job, *ARGUMENTS])

    assert json.loads(done.stdout) == ARGUMENTS
    assert done.returncode == 0


@pytest.mark.slow
def test_a_run_whose_usual_place_cannot_be_written_is_recorded_elsewhere(tmp_path):
    job = script(tmp_path, "print(7)")
    (tmp_path / "headway-runs").write_text("")
    asked = [sys.executable, "-m", "headway.cli", "run", "--", job]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    named = subprocess.run([*asked[:4], "--out", "headway-runs/a", "--", job], cwd=tmp_path, capture_output=True)
    elsewhere = Path(done.stderr.partition("this run is recorded in ")[2].partition("\n")[0])

    assert (done.returncode, done.stdout) == (0, "7\n")
    assert json.loads((elsewhere / "run.json").read_text())["exit"]["code"] == 0
    assert (named.returncode, b"--out headway-runs/a" in named.stderr) == (2, True)
    shutil.rmtree(elsewhere)


@pytest.mark.slow
def test_a_module_and_a_program_are_run_as_such(tmp_path):
    module = run(tmp_path / "a", ["json.tool", "--help"], module=True)
    program = run(tmp_path / "b", ["/bin/echo", "--of", ""], no_python=True)

    assert "json.tool" in module.stdout
    assert program.stdout == "--of \n"


@pytest.mark.slow
def test_ranks_get_the_environment_that_torchrun_gives(tmp_path):
    job = script(
        tmp_path,
        "import json, os, sys; json.dump(dict(os.environ), open(f'{sys.argv[1]}-{os.environ[\"RANK\"]}', 'w'))",
    )
    ours = run(tmp_path / "run", [job, str(tmp_path / "ours")], nproc_per_node=2)
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", job,
         str(tmp_path / "theirs")],
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, capture_output=True, timeout=90,
    )  # fmt: skip
    assert (ours.returncode, theirs.returncode) == (0, 0), theirs.stderr
    for rank in (0, 1):
        mine = json.loads((tmp_path / f"ours-{rank}").read_text())
        peer = json.loads((tmp_path / f"theirs-{rank}").read_text())
        # What must differ: the port, and that the store is rank 0's own; what we need: our variables.
        own = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
        missing = {key for key in peer if key not in mine and not key.startswith("TORCHELASTIC_SIGNALS")}

        assert missing == set()
        assert {key for key in peer if key in mine and mine[key] != peer[key]} <= own | {"PYTHONPATH", "HEADWAY"}


def test_a_held_port_is_given_to_nobody_else():
    with Port() as port:
        with pytest.raises(OSError, match="in use"):
            Port(port.number)
        others = [Port() for _ in range(50)]

        assert port.number not in {other.number for other in others}
        for other in others:
            other.__exit__()


@pytest.mark.slow
def test_a_taken_port_costs_a_line_and_another_port_is_used(tmp_path):
    job = script(tmp_path, "import os; print(os.environ['MASTER_PORT'])")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(tmp_path / "run", [job], master_port=port, quiet=False)

    assert done.stdout.strip() not in ("", str(port))
    assert f"port {port} is taken" in done.stderr


@pytest.mark.slow
def test_without_torchruns_flags_a_script_finds_the_environment_that_python_gives_it(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    code = "import json, os, sys, torch; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    job = script(tmp_path, code)
    run(tmp_path / "run", [job, str(tmp_path / "alone")], {"HEADWAY": ""})
    run(tmp_path / "other", [job, str(tmp_path / "one")], {"HEADWAY": ""}, nproc_per_node=1)
    alone, one = (json.loads((tmp_path / name).read_text()) for name in ("alone", "one"))

    ours = {name for name in alone.keys() - os.environ.keys() if name.startswith("HEADWAY")}
    told = {"TORCHELASTIC_ERROR_FILE", "PYTHONPATH", "KINETO_LOG_LEVEL", "TORCH_FR_BUFFER_SIZE"}
    assert alone.keys() - os.environ.keys() - ours <= told
    assert "HEADWAY_RANK" not in alone
    assert (one["RANK"], one["WORLD_SIZE"]) == ("0", "1")


@pytest.mark.slow
def test_a_process_alone_is_rank_0_whatever_the_shell_says(tmp_path):
    train = "import torch\no = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)\nfor _ in range(3): o.step()"
    run(tmp_path / "run", [script(tmp_path, train)], {"HEADWAY": "", "RANK": "3", "WORLD_SIZE": "8"})
    opened = Run.open(tmp_path / "run")

    assert list(opened.trace.ranks) == [0]
    assert int(opened.trace.named("optimizer.step").sum()) == 3


def test_with_json_the_ranks_stdout_goes_to_stderr_and_the_log(tmp_path):
    job = script(tmp_path, "print('from the rank')")
    done = run(tmp_path / "run", [job], json=True)

    assert done.stdout == ""
    assert "from the rank" in done.stderr
    assert (tmp_path / "run" / "logs" / "r0.out").read_text() == "from the rank\n"


@pytest.mark.slow
def test_stdout_in_a_file_is_the_script_s_and_stderr_names_the_rank(tmp_path):
    source = "import os, sys; r = os.environ['RANK']; print('hello\\n\\nfrom', r); print('err', r, file=sys.stderr)"
    job = script(tmp_path, source)
    done = run(tmp_path / "run", [job], nproc_per_node=2)

    assert sorted(done.stdout.splitlines()) == ["", "", "from 0", "from 1", "hello", "hello"]
    assert {"err 0", "[default1]:err 1"} <= {*done.stderr.splitlines()}


@pytest.mark.slow
def test_a_command_whose_output_is_redirected_writes_what_python_writes(tmp_path):
    job = script(tmp_path, "import sys; sys.stdout.buffer.write(b'a\\r\\xff\\n' * 20_000 + b'no end')")
    command = [sys.executable, "-m", "headway.cli", "run", "--out", str(tmp_path / "run"), "--", job]
    plain, recorded = (
        subprocess.run(argv, capture_output=True, cwd=ROOT, check=True) for argv in ([sys.executable, job], command)
    )

    assert recorded.stdout == plain.stdout
    assert b"headway why" in recorded.stderr or b"Nothing to account for" in recorded.stderr


def test_run_folders_are_numbered_and_a_used_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = script(tmp_path, "pass", "train it.py")
    first, second = (launch(LaunchOptions(quiet=True), [job]).run for _ in range(2))

    assert [path.relative_to(tmp_path).as_posix() for path in (first, second)] == [
        "headway-runs/train_it-1",
        "headway-runs/train_it-2",
    ]
    with pytest.raises(InputError, match="is not empty"):
        launch(LaunchOptions(out=first, quiet=True), [job])


@pytest.mark.parametrize(
    ("options", "argv", "words"),
    [
        ({}, [], "no script was given"),
        ({}, ["no/such/script.py"], "does not exist"),
        ({}, [""], "'' does not exist"),
        ({}, ["/"], "without a __main__.py"),
        ({"nproc_per_node": 0}, ["JOB"], "from 1 to 4,096"),
        ({"nproc_per_node": 10**11}, ["JOB"], "from 1 to 4,096"),
        ({"nproc_per_node": "-3"}, ["JOB"], "from 1 to 4,096"),
        ({"nproc_per_node": "many"}, ["JOB"], "number, auto, gpu, xpu or cpu"),
        ({"nnodes": "4:2"}, ["JOB"], "min <= max"),
        ({"nnodes": "two"}, ["JOB"], "number or min:max"),
        ({"max_restarts": -1}, ["JOB"], "at least 0"),
        ({"windows": 1.5}, ["JOB"], "fraction"),
        ({"module": True, "no_python": True}, ["JOB"], "exclude each other"),
        ({"no_python": True}, ["no-such-program"], "cannot be run"),
        ({"apply": Path("no-plan.json")}, ["JOB"], "is not a file"),
        (
            {"nnodes": 2, "rdzv_backend": "c10d", "rdzv_endpoint": "no-such-host.invalid:1"},
            ["JOB"],
            "cannot be resolved",
        ),
        ({"nnodes": 2, "master_addr": "no-such-host.invalid"}, ["JOB"], "cannot be resolved"),
        ({"nnodes": 2, "rdzv_backend": "c10d"}, ["JOB"], "no --rdzv-endpoint"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(tmp_path, options, argv, words):
    job = script(tmp_path, "pass")
    with pytest.raises(InputError, match=words):
        launch(LaunchOptions(out=tmp_path / "run", quiet=True, **options), [job if a == "JOB" else a for a in argv])

    assert not (tmp_path / "run").exists()


def test_numbers_of_ranks_and_hosts():
    assert num_processes("3") == 3
    assert num_processes("cpu") == len(os.sched_getaffinity(0))
    assert [parse_hosts(text) for text in ("1", 2, "1:4")] == [(1, 1), (2, 2), (1, 4)]
    check_host("localhost", "a host")


@pytest.mark.slow
def test_the_run_folder_keeps_its_bound_and_counts_what_it_gave_up(tmp_path):
    job = script(
        tmp_path,
        """
        import os, random, time
        from headway.trace.rings.ring import Recorder
        recorder = Recorder(os.environ["HEADWAY_RUN"] + "/rings")
        print("x" * 100_000)
        for index in range(100_000):
            recorder.emit(20, index * 1000, random.getrandbits(20), 0, index, 0, random.getrandbits(40))
            if index % 4000 == 0:
                time.sleep(0.25)  # the drain keeps up with 80,000 records a second
        """,
    )
    bound = 1_000_000
    done = run(tmp_path / "run", [job], max_run_bytes=bound)
    opened = Run.open(tmp_path / "run")
    size = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    kept = int(opened.trace.named("input.next").sum())

    assert done.returncode == 0, done.stderr
    assert size <= bound
    assert 0 < kept < 100_000
    assert kept + opened.meta["dropped"] == 100_000
