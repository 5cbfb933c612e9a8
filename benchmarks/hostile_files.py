"""Broken and hostile files of every format: does a reader ever fail with a traceback, hang, or take what it may not?

Claim: of 5,000 seeded mutations of good files (50,000 with --full) of all formats that headway reads, checkpoints,
traces, dumps, plans and run folders, none ends in a traceback or a crash, and none costs more than 64 MB + 8 n of
memory or 5 s + 2 us x n of CPU, n being its bytes (unpacked ones of a packed file). Every verdict is an exit code
0, 2 or 3. Verbs that compute from a file of a user's, or from the numbers of a call (queues, prices, pipelines, power,
failures, gradients, latencies), are called 20 times each (200 with --full) with one that was changed: no traceback
either, and an answer, or an error that names its bound, within 20 s. Hand-made attacks (nesting, bombs, claims of size)
are in tests/test_hostile_files.py.
"""

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SEED = 20261123
FREE_BYTES, PER_BYTE = 64_000_000, 8
FREE_CPU_S, CPU_S_PER_BYTE = 5.0, 2e-6
MOST_WALL_S = 120
"""After this long a reader hangs."""

MOST_CALL_S = 20
"""After this long a verb that computes hangs."""

UNITS_PER_KB = 1024


def status(name: str) -> int:
    """Return a size of this process out of /proc, bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * UNITS_PER_KB


def read(command: tuple[str, ...], path: Path) -> int:
    """Run one command of headway on `path` in this process; return its exit code."""
    from headway.cli import main
    from headway.core.errors import HeadwayError
    from headway.core.files.planfile import read_plan

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if command == ("PLAN",):
            try:
                read_plan(path)
            except HeadwayError as error:
                return error.exit_code
            return 0
        new = path.with_name(f"new-{time.monotonic_ns()}")
        words = [word.replace("NEW", str(new)).replace("FILE", str(path)) for word in command]
        words += [*([] if "FILE" in command else [str(path)]), "--json"]
        if command == ("ARGUMENTS",):  # what the file holds is the call
            words = path.read_text(errors="replace").replace("\0", "").split()
        try:
            main(words)
        except SystemExit as leaving:
            return int(leaving.code or 0)
    return 0


def cost_of(command: tuple[str, ...], path: Path) -> dict[str, Any]:
    """Return what reading `path` came to: exit code or traceback, memory above what there was, CPU seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before, cpu_s = status("VmRSS"), time.process_time()
    try:
        code: int | str = read(command, path)
    except BaseException as cause:  # whatever comes here, a user would have seen as a traceback
        code = "".join(traceback.format_exception(cause)[-4:])
    return {"code": code, "memory": max(0, status("VmHWM") - before), "cpu_s": time.process_time() - cpu_s}


def work(link: Connection) -> None:
    """Read what comes through the link until it closes."""
    with contextlib.suppress(EOFError):
        while True:
            command, path, seconds = link.recv()
            signal.alarm(seconds)
            link.send(cost_of(command, Path(path)))
            signal.alarm(0)


def bounds_of(size: int) -> dict[str, float]:
    """Return what reading `size` bytes may cost: memory in bytes, CPU in seconds."""
    return {"memory": FREE_BYTES + PER_BYTE * size, "cpu_s": FREE_CPU_S + CPU_S_PER_BYTE * size}


class Reader:
    """A child process that reads files; a new one where the last has died."""

    def __init__(self) -> None:
        self._child: Any = None

    def ask(self, command: tuple[str, ...], path: Path, seconds: int = MOST_WALL_S) -> dict[str, Any]:
        """Return the cost of reading `path`; `code` is text where it failed."""
        if self._child is None:
            self._link, theirs = multiprocessing.Pipe()
            self._child = multiprocessing.get_context("forkserver").Process(target=work, args=(theirs,), daemon=True)
            self._child.start()
            theirs.close()
        try:
            self._link.send((command, str(path), seconds))
            answer: dict[str, Any] = self._link.recv()
        except (EOFError, OSError):
            self._child.join()
            answer = {"code": f"died with {self._child.exitcode}", "memory": 0, "cpu_s": 0.0}
            self._child = None
        return answer


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def attack(count: int, folder: Path, seed: int = SEED) -> dict[str, Any]:
    """Mutate and read `count` files; return the counts and the failures."""
    from _hostile_samples import mutate, samples  # needs torch, which the tests of single attacks do not

    draw, reader = random.Random(seed), Reader()
    good = samples(folder)
    codes: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    largest = {"memory": 0.0, "cpu_s": 0.0}
    for path, commands in good.values():  # the first reading of each format loads what it needs
        for command in commands:
            answer = reader.ask(command, path)
            assert answer["code"] == 0, f"{path} is good, and {command} says {answer['code']}"
    for number in range(count):
        name = draw.choice(sorted(good))
        path, commands = good[name]
        target = folder / "broken" / path.name
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
        mutate(target, draw)
        size, command = size_of(target), draw.choice(commands)
        answer = reader.ask(command, target)
        bounds = bounds_of(size)
        for key, bound in bounds.items():
            largest[key] = max(largest[key], answer[key] / bound)
        over = [key for key, bound in bounds.items() if answer[key] > bound]
        failed = answer["code"] not in (0, 2, 3)
        codes["traceback" if failed else str(answer["code"])] += 1
        if failed or over:
            failures.append({"number": number, "format": name, "command": " ".join(command), "bytes": size, **answer})
    return {"codes": dict(codes), "failures": failures, "largest": largest, "formats": len(good)}


def attack_call(reader: Reader, sample: Any, count: int, folder: Path, seed: int = SEED) -> list[dict[str, Any]]:
    """Call what reads a file, or what a file holds, with `count` mutations of it in `folder`; return the failures."""
    from _hostile_samples import mutate

    (path, commands), failures = sample, []
    draw, target = random.Random(f"{seed} {path.name}"), folder / path.name
    for command in commands:  # the first call loads what it needs
        answer = reader.ask(command, path)
        assert answer["code"] in (0, 3), f"{path} is good, and {command} says {answer['code']}"
    for number in range(count):
        shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
        mutate(target, draw)
        command = draw.choice(commands)
        answer = reader.ask(command, target, MOST_CALL_S)
        if answer["code"] not in (0, 2, 3):
            failures.append({"number": number, "format": path.name, "command": " ".join(command), **answer})
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    return failures


def attack_calls(count: int, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Attack each call `count` times; return their number, and the failures."""
    from _hostile_calls import calls

    (folder / "good").mkdir()
    (folder / "changed").mkdir()
    good, reader = calls(folder / "good"), Reader()
    return len(good) * count, [
        row for sample in good.values() for row in attack_call(reader, sample, count, folder / "changed")
    ]


def main() -> int:
    """Mutate, read, count; print one JSON line."""
    chosen = next((int(word.removeprefix("--files=")) for word in sys.argv if word.startswith("--files=")), 5_000)
    count = 50_000 if "--full" in sys.argv else chosen
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp())
    try:
        found = attack(count, folder)
        num_calls, of_calls = attack_calls(200 if "--full" in sys.argv else 20, folder)
    finally:
        shutil.rmtree(folder)
    failures = [*found["failures"], *of_calls]
    for failure in failures[:20]:
        print(json.dumps(failure), file=sys.stderr)
    tracebacks = found["codes"].get("traceback", 0)
    over = len([row for row in found["failures"] if row["code"] in (0, 2, 3)])
    print(json.dumps({
        "bench": "hostile_files", "files": count, "formats": found["formats"], "tracebacks": tracebacks,
        "calls": num_calls, "calls_failed": len(of_calls),
        "over_the_bound": over, "said_good": found["codes"].get("0", 0), "refused": found["codes"].get("2", 0),
        "damaged": found["codes"].get("3", 0), "largest_share_of_memory_bound": round(found["largest"]["memory"], 3),
        "largest_share_of_cpu_bound": round(found["largest"]["cpu_s"], 3), "seed": SEED,
        "claim": "0 tracebacks, 0 over 64 MB + 8 n and 5 s + 2 us x n, calls within 20 s", "met": not failures,
    }))  # fmt: skip
    return 3 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
