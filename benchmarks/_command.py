"""The command as a benchmark calls it: arguments in, its one JSON object out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def headway(*arguments: object, expect: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Run `headway ARGUMENTS --json` (before a `--`) and return its answer; raises when it exits otherwise."""
    texts = [str(argument) for argument in arguments]
    cut = texts.index("--") if "--" in texts else len(texts)
    command = [sys.executable, "-m", "headway.cli", *texts[:cut], "--json", *texts[cut:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    if answer.returncode not in expect:
        raise RuntimeError(f"{' '.join(command)} exited with {answer.returncode}:\n{answer.stderr}")
    result: dict[str, Any] = json.loads(answer.stdout)
    return result
