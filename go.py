#!/usr/bin/env python3
"""Set headway up on a bare machine, and do something with it: `python3 go.py demo`, `python3 go.py test`.

Needs Python >= 3.11 with venv and pip; no compiler, make, git or root. The
first call makes a virtual environment and installs into it; later calls see
a stamp and start at once. Arguments after the task are passed on.
HEADWAY_VENV puts the environment elsewhere (for a read-only checkout).
"""

import contextlib
import fcntl
import hashlib
import json
import os
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
    """Print one line and exit with 2."""
    sys.exit(f"go.py: {message}")


def fingerprint() -> str:
    """Hash everything that decides what gets installed."""
    inputs = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*inputs, sys.version.encode(), str(ROOT).encode()])).hexdigest()


def is_ready(stamp: Path, extras: tuple[str, ...]) -> bool:
    """Tell whether the environment already holds these extras of this fingerprint."""
    try:
        installed = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return False
    return installed["fingerprint"] == fingerprint() and set(extras) <= set(installed["extras"])


def set_up(extras: tuple[str, ...]) -> Path:
    """Make the environment hold headway with `extras`; return its Python."""
    python, stamp = VENV / "bin" / "python", VENV / "headway-stamp.json"
    if is_ready(stamp, extras):
        return python
    VENV.parent.mkdir(parents=True, exist_ok=True)
    with open(VENV.parent / f"{VENV.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second set-up at the same time waits here, then finds the stamp
        if is_ready(stamp, extras):
            return python
        with contextlib.suppress(OSError, ValueError):  # no stamp yet: the first set-up
            extras = tuple(sorted({*extras, *json.loads(stamp.read_text())["extras"]}))
        stamp.unlink(missing_ok=True)
        install(python, extras)
        stamp.write_text(json.dumps({"fingerprint": fingerprint(), "extras": sorted(extras)}))
    return python


def install(python: Path, extras: tuple[str, ...]) -> None:
    """Make the environment and install headway with `extras` into it."""
    print(f"go.py: setting up {VENV} (once, about a minute)", file=sys.stderr, flush=True)
    unfinished = VENV / "headway-unfinished"
    # An installation that was killed can leave half a package that pip takes for a whole one: start over then.
    clear = ["--clear"] if unfinished.exists() else []
    if subprocess.run([sys.executable, "-m", "venv", *clear, str(VENV)]).returncode:
        fail("python could not make a virtual environment. Install its venv module (Debian: apt install python3-venv).")
    unfinished.touch()
    wanted = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    failed = subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "-e", wanted], cwd=ROOT).returncode
    unfinished.unlink()
    if failed:
        fail("the installation failed (its reason stands above). Run the same command again to continue.")


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
        command += [] if arguments else ["-n", "2", "--dist", "loadfile"]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
