"""From a recorded queue to the policy that serves it, by the commands that are printed."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import script, wait_for
from tests.made.service_jobs import SCRIPT
from tests.paths import ROOT, python_path

START_S, ROUND_S, STEP_S = 1.2, 8, 0.1
"""What starting an attempt takes about, a round of the service, a step of the script."""

QUEUE = [  # arrival, seconds of steps, devices, start: as first-come, first-served ran them on two devices
    (0, 20, 1, 0.0), (2, 6, 2, 21.2), (4, 2, 1, 28.4), (6, 2, 1, 28.4), (8, 2, 1, 31.6), (10, 2, 1, 31.6),
]  # fmt: skip


def words_of(command: str) -> list[str]:
    return [sys.executable, "-m", *shlex.split(command)]


def typed(folder: Path, command: str) -> str:
    """Return what a command of headway prints in `folder`, without line breaks."""
    done = subprocess.run(
        words_of(command), cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def next_commands(text: str) -> list[str]:
    """Return the commands behind 'Next' on a screen."""
    return [line.split("Next", 1)[1].strip() for line in text.splitlines() if line.strip().startswith("Next ")]


@pytest.mark.slow  # six jobs on two slots: 40 s of sleeping
def test_the_commands_that_are_printed_lead_from_a_recorded_queue_to_jobs_served_as_it_was_predicted(tmp_path: Path):
    script(tmp_path, SCRIPT.replace("Path(sys.argv[1])", "Path(f'{sys.argv[1]}-{os.environ.get(\"RANK\", 0)}')"))
    rows = [f"{n},{at},{run + START_S},{scale},{start}" for n, (at, run, scale, start) in enumerate(QUEUE)]
    (tmp_path / "queue.csv").write_text("\n".join(["id,arrival_s,run_s,num_devices,start_s", *rows]))
    compare = f"headway cluster compare --jobs queue.csv --devices cpu=2 --restart-s {START_S} --round-s {ROUND_S}"
    screen, predicted = typed(tmp_path, compare), json.loads(typed(tmp_path, f"{compare} --json"))
    figures = {row["policy"]: row["mean_jct_s"] for row in predicted["policies"]}
    (serve,) = next_commands(screen)
    policy = shlex.split(serve)[shlex.split(serve).index("--policy") + 1]
    with (tmp_path / "served.txt").open("w") as out:
        server = subprocess.Popen(words_of(serve), cwd=tmp_path, stdout=out, stderr=out)
    try:
        served = tmp_path / "served.txt"
        said = wait_for(lambda: [s for s in served.read_text().splitlines() if "hand a script in" in s], 150.0)
        submit, began_s = said[0].partition("in: ")[2], time.monotonic()
        for number, (at, run, scale, _) in enumerate(QUEUE):
            time.sleep(max(began_s + at - time.monotonic(), 0))
            job = f"job.py {tmp_path / str(number)} {round(run / STEP_S)} {STEP_S}"
            screen = typed(tmp_path, submit.replace("train.py", job).replace("--scale 1", f"--scale {scale}"))
        (queue,) = next_commands(screen)
        (again,) = wait_for(lambda: next_commands(typed(tmp_path, queue)), 150.0)
        measured = json.loads(typed(tmp_path, f"{again} --json"))
    finally:
        server.terminate()
        server.wait(30)
    came_true_s, observed_s = measured["observed"]["mean_jct_s"], predicted["observed"]["mean_jct_s"]
    promised_s = measured["replayed"]["mean_jct_s"]
    print({"observed": observed_s, "predicted": figures, "promised": promised_s, "measured": came_true_s})

    assert predicted["best"] == "backfill"  # which needs time limits: a service goes by the best of the others
    assert figures[policy] == min(figures[name] for name in ("fifo", "las"))
    assert (len(measured["jobs"]), measured["skipped"]) == (len(QUEUE), 0)
    # On a busy host starts take longer than was predicted; what the service promised knows how long jobs took.
    assert came_true_s == pytest.approx(promised_s, rel=0.4)
