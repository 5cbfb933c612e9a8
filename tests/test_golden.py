"""Answers of the verbs on recorded runs are the frozen ones: what a change of structure must leave as it is.

`make golden` writes tests/golden/answers.json anew; read the difference before it is committed.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from headway.cli import VERBS
from tests.launching import headway_here
from tests.paths import GOLDEN, ROOT

FROZEN = GOLDEN / "answers.json"
RUNS = "golden/runs"
SHOWN_BYTES = 4_000
"""Longer answers are kept as a digest."""

OF_FILES = ("age_s", "created_unix_s")
"""What depends on when a file was copied."""

COMMANDS = [
    f"why {RUNS}/before --json", f"why {RUNS}/after --json", f"why {RUNS}/ddp-conv --json", f"why {RUNS}/before",
    f"plan {RUNS}/before --json", f"plan {RUNS}/ddp-conv --json", f"whatif {RUNS}/before --set workers=4 --json",
    f"whatif {RUNS}/ddp-conv --set bucket_mb=5 --json", f"compare {RUNS}/before {RUNS}/after --json",
    f"trace info {RUNS}/before --json", f"trace info {RUNS}/ddp-conv --json",
    "trace info golden/flight_rank_0.json --json", f"trace align {RUNS}/ddp-conv aligned.json", f"hang {RUNS}/ddp-conv",
    "comm options --json", f"comm plan {RUNS}/ddp-conv --json", f"fault incidents {RUNS}/before --json",
    "fault plan --mtbf-s 86400 --restart-s 60 --save-s 5 --json", "fault sim --help", "storage table --json",
    "parallel schedule show --schedule 1f1b --stages 4 --microbatches 8", "ckpt ls golden/dcp_python_3_11_2 --json",
    "ckpt show golden/dcp_python_3_11_2 --json", "ckpt verify golden/dcp_python_3_11_2 --json",
    f"data audit {RUNS}/before --json", f"data stalls {RUNS}/before --json", f"parallel bubbles {RUNS}/ddp-conv",
    f"cluster batch {RUNS}/ddp-conv --batch-size 8", f"cost predict {RUNS}/before --json", f"power check {RUNS}/before",
]  # fmt: skip


def rounded(value: object) -> object:
    """Return JSON with floats to six digits, without times of files: sums may differ in their last bits elsewhere."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items() if key not in OF_FILES}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def answered(command: str, folder: Path) -> dict[str, object]:
    """Return what a command answers: exit code, its JSON or text, the last line of what it says beside that."""
    arguments = command.split()
    done = headway_here(*arguments, folder=folder)
    text = done.stdout.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")
    if "--json" in arguments and text:
        text = json.dumps(rounded(json.loads(text)))
    kept = text if len(text) <= SHOWN_BYTES else hashlib.sha256(text.encode()).hexdigest()
    said = done.stderr.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT").strip().splitlines()
    said = [line for line in said if "has worked for" not in line]  # on a busy host
    return {"code": done.returncode, "stdout": kept, "stderr": said[-1] if said else ""}


def help_of(verb: str) -> str:
    """Return a digest of a verb's help, without its layout: that is the terminal's and the library's."""
    words = re.sub(r"[^\w.,:`'()/<>=%-]+", " ", headway_here(*verb.split(), "--help").stdout)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


@pytest.fixture
def folder(tmp_path):
    """The recorded runs in a folder of their own: verbs may write beside them."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return tmp_path


def test_answers_on_recorded_runs_and_all_helps_are_the_frozen_ones(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    current = {command: answered(command, folder) for command in COMMANDS}
    current["--help"] = {verb: help_of(verb) for verb in sorted(VERBS)}
    if os.environ.get("HEADWAY_WRITE_GOLDEN"):
        FROZEN.write_text(json.dumps(current, indent=1) + "\n")
    frozen = json.loads(FROZEN.read_text())

    assert {name for name in current if current[name] != frozen.get(name)} == set()
