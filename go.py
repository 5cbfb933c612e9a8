#!/usr/bin/env python3
"""Set headway up on a bare machine, and do something with it: `python3 go.py demo`, `python3 go.py test`.

Needs Python >= 3.11 with venv and pip; no compiler, make, git or root. The
first call makes a virtual environment and installs into it; later calls see
a stamp and start at once. A call by another Python than last time makes the
environment anew, and says so. Arguments after the task are passed on.
HEADWAY_VENV puts the environment elsewhere (for a read-only checkout).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = Path(os.environ.get("HEADWAY_VENV") or ROOT / ".venv")
TASKS = {
    # task: (extras, module, arguments)
    "demo": ((), "headway.cli", ["demo"]),
    "headway": ((), "headway.cli", []),
    "test": (("test",), "pytest", []),
    "check": (("test",), "go", ["check"]),
    "bench": (("test",), "headway.cli", ["bench"]),
    "setup": (("test",), "go", []),
}
CHECKS = [
    ["ruff", "check", "."],
    ["ruff", "format", "--check", "."],
    ["mypy"],
    ["lint-imports"],
]


def fail(message: str) -> None:
    """Print one line on stderr and exit with 2."""
    print(f"go.py: {message}", file=sys.stderr)
    sys.exit(2)


def interpreter() -> list[str]:
    """Return the version of the Python that runs this file, and the folder where it is installed."""
    return [sys.version, os.path.realpath(sys.base_prefix)]


PROBE = "import os, sys, json, ssl, pip; print(json.dumps([sys.version, os.path.realpath(sys.base_prefix)]))"
"""What the Python of an environment is asked before anything is installed into it: `interpreter()`, and that it has
what an installation needs."""


def fingerprint() -> str:
    """Hash everything that decides what gets installed."""
    inputs = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    inputs += [text.encode() for text in (*interpreter(), str(ROOT))]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()


def is_ready(python: Path, stamp: Path, extras: tuple[str, ...]) -> bool:
    """Tell whether the environment already holds these extras of this fingerprint."""
    try:
        installed = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return False
    current = installed["fingerprint"] == fingerprint() and os.access(python, os.X_OK)
    return current and set(extras) <= set(installed["extras"])


def set_up(extras: tuple[str, ...]) -> Path:
    """Make the environment hold headway with `extras`; return its Python."""
    python, stamp = VENV / "bin" / "python", VENV / "headway-stamp.json"
    if is_ready(python, stamp, extras):
        return python
    VENV.parent.mkdir(parents=True, exist_ok=True)
    with open(VENV.parent / f"{VENV.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second set-up at the same time waits here, then finds the stamp
        if is_ready(python, stamp, extras):
            return python
        with contextlib.suppress(OSError, ValueError):  # no stamp yet: the first set-up
            extras = tuple(sorted({*extras, *json.loads(stamp.read_text())["extras"]}))
        make_environment(python, stamp)
        # From here the stamp says that go.py made this environment, and that it is not ready.
        stamp.write_text(json.dumps({"fingerprint": "", "extras": sorted(extras)}))
        install(python, extras)
        stamp.write_text(json.dumps({"fingerprint": fingerprint(), "extras": sorted(extras)}))
    return python


def make_environment(python: Path, stamp: Path) -> None:
    """Make the virtual environment of this Python, or keep the one that is there if it is of this Python.

    An environment of another Python is emptied first, but only if go.py made it: nothing else of the user is deleted.
    """
    unfinished = VENV / "headway-unfinished"
    in_use = VENV.is_dir() and any(VENV.iterdir())
    # An installation that was killed can leave half a package that pip takes for a whole one: start over then.
    reason = "its last set-up was interrupted" if unfinished.exists() else mismatch(python) if in_use else ""
    if in_use and not reason:
        print(f"go.py: updating {VENV} (about a minute)", file=sys.stderr, flush=True)
        return
    if in_use and not (unfinished.exists() or stamp.exists()):
        fail(f"{VENV} cannot be used: {reason}, and go.py did not make it. Delete it, or name another in HEADWAY_VENV.")
    why = f"a new environment is made, because {reason}" if reason else "once"
    print(f"go.py: setting up {VENV} ({why}; about a minute)", file=sys.stderr, flush=True)
    VENV.mkdir(exist_ok=True)
    unfinished.touch()
    for entry in [entry for entry in VENV.iterdir() if entry != unfinished]:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode:
        fail("python could not make a virtual environment. Install its venv module (Debian: apt install python3-venv).")
    reason = mismatch(python)
    if reason:
        fail(
            f"the environment that {sys.executable} makes cannot be used: {reason}. "
            "Start go.py with another Python that has ssl and venv (Debian: apt install python3 python3-venv)."
        )
    unfinished.unlink()


def mismatch(python: Path) -> str:
    """Return why the environment's Python cannot serve the Python that runs this file; '' when it can."""
    ours = interpreter()
    try:
        answer = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True)
    except OSError:  # no such file, or a link to an interpreter that was removed
        return f"its Python ({os.path.realpath(python)}) is missing"
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        return f"its Python does not work ({last})"
    theirs = json.loads(answer.stdout)
    if theirs == ours:
        return ""
    there, here = (f"Python {version.split()[0]} in {prefix}" for version, prefix in (theirs, ours))
    return f"it is of {there} and this is {here}"


def install(python: Path, extras: tuple[str, ...]) -> None:
    """Install headway with `extras` into the environment."""
    unfinished = VENV / "headway-unfinished"
    unfinished.touch()
    wanted = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    failed = subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "-e", wanted], cwd=ROOT).returncode
    unfinished.unlink()
    if failed:
        fail("the installation failed (pip's reason is above). Run the same command again to continue.")


def check() -> int:
    """Run every static check, the cheapest first; return 1 if one fails."""
    tools = VENV / "bin"
    failed = [name for name, *rest in CHECKS if subprocess.run([str(tools / name), *rest], cwd=ROOT).returncode]
    return int(bool(failed))


def main() -> None:
    """Set up what the task needs, then become it."""
    if sys.version_info < (3, 11):  # noqa: UP036 - an older python may well be the one that runs this file
        fail(f"this is Python {sys.version.split()[0]}; headway needs 3.11 or newer. Start go.py with a newer python3.")
    task, *arguments = sys.argv[1:] or ["--help"]
    if task not in TASKS:
        lines = (__doc__ or "").strip().splitlines()
        print("\n".join([*lines, "", f"Tasks: {', '.join(TASKS)}."]))
        sys.exit(0 if task in ("-h", "--help") else 2)
    extras, module, first = TASKS[task]
    python = set_up(extras)
    if task == "check":
        sys.exit(check())
    if task == "setup":
        return
    command = [str(python), "-m", module, *first, *arguments]
    if task == "test":
        os.chdir(ROOT)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        command += [] if {*arguments} - {"--fast"} else ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
