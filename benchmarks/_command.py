"""What benchmarks start: the command (arguments in, its one JSON object out), and a job on two gloo ranks."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH of these folders and what stands there already, such as the quick start of tests."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def headway(*arguments: object, expect: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Run `headway ARGUMENTS --json` (before a `--`) and return its answer; raises when it exits otherwise."""
    texts = [str(argument) for argument in arguments]
    cut = texts.index("--") if "--" in texts else len(texts)
    command = [sys.executable, "-m", "headway.cli", *texts[:cut], "--json", *texts[cut:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    if answer.returncode not in expect:
        raise RuntimeError(f"{' '.join(command)} exited with {answer.returncode}:\n{answer.stderr}")
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def on_two_ranks(job: str, folder: Path, *, timeout_s: float, **env: str) -> list[Any]:
    """Run the script `job` on two ranks and return what each wrote as JSON to $ANSWER; $STORE is theirs to meet at."""
    script = folder / "job.py"
    script.write_text(job)
    run = Path(tempfile.mkdtemp(dir=folder))
    ranks = []
    for rank in (0, 1):
        names = {
            **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "STORE": f"file://{run}/store?rank={rank}&world_size=2", "ANSWER": str(run / f"answer{rank}.json"),
            "FOLDER": str(run), **env,
        }  # fmt: skip
        ranks.append(subprocess.Popen([sys.executable, str(script)], env=names, stderr=subprocess.PIPE, text=True))
    for number, rank in enumerate(ranks):
        _, error = rank.communicate(timeout=timeout_s)
        # gloo at times aborts at the very end of a process, recorded or not: what counts is that the job is done.
        if rank.returncode and not (run / f"answer{number}.json").exists():
            raise SystemExit(f"a rank failed with {rank.returncode}:\n{error[-1500:]}")
    return [json.loads((run / f"answer{rank}.json").read_text()) for rank in (0, 1)]
