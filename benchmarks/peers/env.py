"""An environment of its own for each peer, built when a benchmark first needs it.

`python_of("hta")` returns the interpreter of a virtual environment with the
pins of `benchmarks/peers/hta.txt`, under ~/.cache/headway/peers (or
$HEADWAY_PEERS). It is built once: a stamp holds the pins' and the
interpreter's fingerprint, a file lock lets two benchmarks start together, and
an interrupted build is done again.

>>> pins("hta").name
'hta.txt'
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

from headway.core.errors import InputError

PEERS = Path(__file__).resolve().parent


def python_of(peer: str) -> Path:
    """Return the interpreter of the environment called `peer`, which is built or rebuilt when its pins changed.

    Raises `InputError` when there are no pins for it, and when pip cannot install them (its last lines are quoted).
    """
    wanted = pins(peer)
    folder = Path(os.environ.get("HEADWAY_PEERS", Path.home() / ".cache" / "headway" / "peers")) / peer
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "headway.stamp"
    python = folder / "bin" / "python"
    with (folder / "headway.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print_of = fingerprint(wanted)
        if not (stamp.exists() and stamp.read_text() == print_of and python.exists()):
            stamp.unlink(missing_ok=True)
            _build(folder, python, wanted)
            stamp.write_text(print_of)
    return python


def packages_of(peer: str) -> Path:
    """Return a folder with the pins of `peer` and nothing that they ask for: to be put on PYTHONPATH beside our torch.

    For a peer that wants an older torch than it needs. Raises `InputError` as `python_of` does.
    """
    wanted = pins(peer)
    folder = Path(os.environ.get("HEADWAY_PEERS", Path.home() / ".cache" / "headway" / "peers")) / f"{peer}-packages"
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "headway.stamp"
    with (folder / "headway.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == fingerprint(wanted)):
            stamp.unlink(missing_ok=True)
            _install(Path(sys.executable), wanted, "--no-deps", "--upgrade", "--target", str(folder))
            stamp.write_text(fingerprint(wanted))
    return folder


def layered(peer: str) -> Path:
    """Return the interpreter of an environment with the pins of `peer`, laid over the packages of this interpreter.

    A `.pth` file names this interpreter's site-packages, so that torch and numpy are not installed again; what `peer`
    needs in another version is found first. constraints.txt binds what gets installed. Raises `InputError` as
    `python_of` does.
    """
    wanted = pins(peer)
    folder = Path(os.environ.get("HEADWAY_PEERS", Path.home() / ".cache" / "headway" / "peers")) / peer
    folder.mkdir(parents=True, exist_ok=True)
    stamp, python = folder / "headway.stamp", folder / "bin" / "python"
    with (folder / "headway.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == fingerprint(wanted) and python.exists()):
            stamp.unlink(missing_ok=True)
            venv.EnvBuilder(with_pip=False).create(folder)
            packages = next(folder.glob("lib/python3*/site-packages"))
            (packages / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
            _install(python, wanted, "-c", str(PEERS.parent.parent / "constraints.txt"))
            stamp.write_text(fingerprint(wanted))
    return python


def pins(peer: str) -> Path:
    """Return the requirements file of `peer`. Raises `InputError` when there is none."""
    path = PEERS / f"{peer}.txt"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in PEERS.glob("*.txt")))
        raise InputError(f"there are no pins for the peer {peer!r}. Write {path} or choose one of: {known}.")
    return path


def versions(peer: str) -> dict[str, str]:
    """Return package -> pinned version of a peer's environment; those of this interpreter's packages for ""."""
    if not peer:
        return {found.metadata["Name"]: found.version for found in metadata.distributions()}
    lines = [line.split("==") for line in pins(peer).read_text().splitlines() if "==" in line]
    return {name.partition("[")[0].strip(): version.strip() for name, version in lines}


def fingerprint(wanted: Path) -> str:
    """Return what an environment depends on: its pins and this interpreter."""
    return hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()


def _build(folder: Path, python: Path, wanted: Path) -> None:
    """Make the environment and install the pins."""
    venv.EnvBuilder(with_pip=True, clear=False).create(folder)
    _install(python, wanted)


def _install(python: Path, wanted: Path, *options: str) -> None:
    """Install pins. Raises `InputError` when pip cannot."""
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-r",
        str(wanted),
        *options,
    ]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise InputError(f"pip cannot install {wanted}:\n{answer.stderr[-1500:]}\nCheck the network or the pins.")
