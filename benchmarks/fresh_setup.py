"""Set-up from a fresh clone: a bare PATH, a path with spaces, two set-ups at once; then the second start.

Claim: set-up <= 60 s (CPU of both set-ups together, torch included; wall time depends on the index), <= 450 MB beyond
torch, the second start adds <= 0.5 s, `headway --help` <= 150 ms of CPU beyond the interpreter's. Peer: the bare
interpreter, and the command started directly.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _command import ROOT

TOOLS = ("sh", "bash", "env", "ls", "uname", "rm", "cat", "mkdir", "dirname")
OF_TORCH = (
    "torch", "functorch", "torchgen", "numpy", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec",
    "isympy", "filelock", "typing_extensions", "setuptools", "pkg_resources", "_distutils_hack", "pip",
)  # fmt: skip
"""What a virtual environment with torch and numpy alone would hold."""


def bare_path(folder: Path) -> str:
    """Make a PATH that holds python3 and a few basic tools: no gcc, make, git."""
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable if sys.prefix == sys.base_prefix else sys._base_executable)
    for tool in TOOLS:
        found = next((Path(p) / tool for p in os.environ["PATH"].split(":") if (Path(p) / tool).exists()), None)
        if found:
            (folder / tool).symlink_to(found)
    return str(folder)


def cpu_of(command: list[str], **options: object) -> tuple[float, float, str]:
    """Run a command; return its CPU and wall seconds, children included, and its output."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    answer = subprocess.run(command, capture_output=True, text=True, check=True, **options)  # type: ignore[call-overload]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.perf_counter() - start, answer.stdout


def megabytes(site: Path) -> float:
    """Return the megabytes of site-packages that do not belong to torch."""
    total = 0
    for entry in site.iterdir():
        name = entry.name.lower().split("-")[0].split(".")[0]
        if name not in OF_TORCH:
            total += sum(p.stat().st_size for p in ([entry] if entry.is_file() else entry.rglob("*")) if p.is_file())
    return total / 1e6


def main() -> int:
    """Clone, set up twice at once, start again; print one JSON line."""
    with tempfile.TemporaryDirectory(prefix="a fresh place ") as temporary:
        checkout = Path(temporary) / "head way"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
        env = {"PATH": bare_path(Path(temporary) / "bin"), "HOME": os.environ["HOME"]}
        env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        command = ["python3", "go.py", "headway", "--version"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        twin = subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, wall_s, _ = cpu_of(command, cwd=checkout, env=env)
        together = twin.wait()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        again = [cpu_of(command, cwd=checkout, env=env)[1] for _ in range(5)]
        python = str(checkout / ".venv" / "bin" / "python")
        direct = [cpu_of([python, "-m", "headway.cli", "--version"], cwd=checkout, env=env)[1] for _ in range(5)]
        bare = min(cpu_of([python, "-c", "pass"], env=env)[0] for _ in range(5))
        shown = min(cpu_of([python, "-m", "headway.cli", "--help"], cwd=checkout, env=env)[0] for _ in range(5))
        size = megabytes(next((checkout / ".venv").glob("lib/python3*/site-packages")))
    extra = min(again) - min(direct)
    ok = cpu_s <= 60 and size <= 450 and extra <= 0.5 and shown - bare <= 0.150 and together == 0
    print(json.dumps({
        "bench": "fresh_setup", "setup_cpu_s": round(cpu_s, 1), "setup_wall_s": round(wall_s, 1),
        "beyond_torch_mb": round(size), "second_start_adds_s": round(extra, 3), "twin_exit": together,
        "help_cpu_beyond_interpreter_s": round(shown - bare, 3), "peer": "the bare interpreter, the installed command",
        "claim": "<= 60 s, <= 450 MB, <= 0.5 s, <= 0.15 s", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
