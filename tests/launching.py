"""Launchers as tests start them: in a process of their own, with options as JSON, so that signals can be sent."""

import contextlib
import io
import json
import os
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from headway.cli import main
from tests.paths import ROOT

LAUNCHER = """
import json, sys
from pathlib import Path
from headway.runtime.launching.options import LaunchOptions
from headway.runtime.launching.launch import launch
options = json.loads(sys.argv[1])
report = launch(LaunchOptions(**{**options, "out": Path(options["out"])}), sys.argv[2:])
if report.run is not None:
    with open(options["out"] + "/report.json", "w") as file:
        json.dump([report.code, report.cls, report.first_rank, report.traceback, report.seconds], file)
sys.exit(report.code)
"""


def script(tmp_path: Path, text: str, name: str = "job.py") -> str:
    """Write a script and return its path."""
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def start(out: Path, argv: list[str], env: dict[str, str] | None = None, **options) -> subprocess.Popen:
    """Start a launcher in a process of its own."""
    given = json.dumps({"out": str(out), "quiet": True, **options})
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, given, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env={**os.environ, "HEADWAY": "off", **(env or {})},
    )  # fmt: skip


def run(out: Path, argv: list[str], env: dict[str, str] | None = None, **options) -> subprocess.CompletedProcess:
    """Run a launcher to its end."""
    process = start(out, argv, env, **options)
    stdout, stderr = process.communicate(timeout=90)
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def headway(*arguments: object) -> subprocess.CompletedProcess:
    """Run a command of headway's, its output kept."""
    command = [sys.executable, "-m", "headway.cli", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)


def under_plan(folder: Path, job: str, remedy: dict[str, Any], *arguments: str) -> tuple[int, str]:
    """Run a script on two ranks under a plan of one remedy; return the exit code, and what headway said."""
    (folder / "plan.json").write_text(json.dumps({"schema": "headway.plan-file/1", "remedies": [remedy]}))
    places = ["--apply", folder / "plan.json", "--out", folder / "run", "--", script(folder, job)]
    done = headway("run", "--nproc-per-node", 2, "--windows", 0, *places, *arguments)
    return done.returncode, done.stderr


def headway_here(*arguments: object, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a command of headway's that starts no script in this process, in `folder`, its output kept."""
    with contextlib.chdir(folder), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
        try:
            main([*map(str, arguments)])
        except SystemExit as left:
            return subprocess.CompletedProcess(arguments, left.code, out.getvalue(), error.getvalue())
    raise AssertionError("a command ends with its code")


def json_of(*arguments: object, code: int = 0) -> Any:
    """Return the JSON that a command prints in this process and folder, and check the code it ends with."""
    done = headway_here(*arguments, folder=Path.cwd())
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def code_and_json(*arguments: object) -> tuple[int, Any]:
    """Return the code that a command ends with, and the JSON that it prints or else its standard error."""
    done = headway_here(*arguments, folder=Path.cwd())
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def refusal(*arguments: object) -> str:
    """Return what a command that is refused writes to standard error, its words one space apart."""
    done = headway_here(*arguments, folder=Path.cwd())
    assert done.returncode == 2, done.stdout
    return " ".join(done.stderr.split())


def wait_for(condition, timeout_s: float = 60.0):
    """Return the first true value of `condition()`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def alive(pid: int) -> bool:
    """Say whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


DDP = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if "fail" in sys.argv and step == 3 and dist.get_rank() == 1:
        with open(sys.argv[2], "w") as file:
            file.write(str(time.perf_counter_ns()))
        raise RuntimeError("rank 1 gives up")
dist.barrier()
print("done", dist.get_rank())
dist.destroy_process_group()
"""
