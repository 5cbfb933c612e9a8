"""CPU time per image of the loaders that people use, each in its best configuration: 500x375 JPEG to 224x224, uint8.

Claim: headway's pipeline in threads takes at most 1.1 of the CPU of any of them per image. All read the same files and
use headway's own operators with the same draws, so equal pixels are asserted; the common DataLoader (Pillow, float32
per example) differs, as Pillow rounds otherwise. Two workers each, kept over epochs, starting them and the first epoch
not counted; CPU of all processes of a loader; rounds interleaved, one loader at a time. `--full`: longer rounds, and
how often an image is prepared when two jobs read it at once. Peers run in environments of their own; one that cannot be
installed or run says so in its row.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _command import ROOT
from jobs.load_images import ENDLESS
from peers.env import python_of, versions

from headway.core.errors import InputError
from headway.data import SyntheticJpeg
from headway.data.stalls.torch_costs import COMMON

LOADERS = {
    "headway Pipeline, threads": ("", "headway"),
    "headway DataLoader, threads": ("", "headway"),
    "headway DataLoader, processes": ("", "headway"),
    "torch DataLoader": ("", "torch"),
    COMMON: ("", "torch"),
    "torchdata StatefulDataLoader": ("loaders", "torchdata"),
    "SPDL, threads": ("loaders", "spdl_core"),
    "Grain, threads": ("loaders", "grain"),
    "Grain, processes": ("loaders", "grain"),
    "WebDataset": ("loaders", "webdataset"),
    "MosaicML Streaming": ("streaming", "mosaicml-streaming"),
    "Ray Data": ("ray", "ray"),
}
"""Name in jobs/load_images.py -> (environment, "" for this one; package whose version counts)."""

OURS = "headway Pipeline, threads"
DIFFERENT, SHARD = 96, 64
"""JPEGs that are generated, the rest repeats them; images per tar file."""


class Loader:
    """One loader in its process, asked for an epoch at a time."""

    def __init__(self, name: str, folder: Path, num_images: int, **env: str) -> None:
        environment, _ = LOADERS[name]
        python = str(python_of(environment)) if environment else sys.executable
        self.words = Path(tempfile.mkdtemp(dir=folder)) / "stderr"
        with self.words.open("w") as errors:
            self.process = subprocess.Popen(
                [python, str(ROOT / "benchmarks" / "jobs" / "load_images.py"), name, str(folder), str(num_images)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}, cwd=folder,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip

    def ask(self, what: str, timeout_s: float = 120.0) -> list:
        """Return the answer to a line. Raises `InputError` with the loader's last words when there is none."""
        late = threading.Timer(timeout_s, self.process.kill)
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                print(what, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            self.process.wait()
            words = self.words.read_text().strip().splitlines() or ["it took too long"]
            raise InputError(f"it ended: {words[-1][:200]}. Run jobs/load_images.py by itself to see more.")
        return json.loads(line)

    def close(self) -> None:
        """Let it end."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def write_images(folder: Path, num_images: int) -> None:
    """Write the same JPEGs as files and as tar shards."""
    images = SyntheticJpeg(DIFFERENT, 500, 375, seed=11)
    for name in ("images", "shards"):
        (folder / name).mkdir()
    for k in range(num_images):
        (folder / "images" / f"{k:06}.jpg").write_bytes(images.read(k % DIFFERENT))
    for first in range(0, num_images, SHARD):
        with tarfile.open(folder / "shards" / f"{first:06}.tar", "w") as tar:
            for k in range(first, min(first + SHARD, num_images)):
                tar.add(folder / "images" / f"{k:06}.jpg", f"{k:06}.jpg")


def started(folder: Path, num_images: int) -> tuple[dict[str, Loader], dict[str, list], dict[str, str]]:
    """Start every loader and let it read an epoch; returns those that run, what they delivered, why others do not."""
    loaders, checks, reasons = {}, {}, {}
    for name in LOADERS:
        try:
            loaders[name] = Loader(name, folder, num_images)
        except InputError as error:
            reasons[name] = str(error)
    for name, loader in list(loaders.items()):
        try:
            checks[name] = loader.ask("check")
        except InputError as error:
            reasons[name] = str(error)
            loaders.pop(name).close()
    return loaders, checks, reasons


def measured(loaders: dict[str, Loader], rounds: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds per image of every round, interleaved."""
    figures: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, loader in loaders.items():
            images, cpu_s = loader.ask("epoch")
            figures[name].append(1000 * cpu_s / images)
    return figures


def preparations(name: str, folder: Path, num_images: int) -> float:
    """Return how often an image is prepared when two jobs read an epoch at the same time."""
    with tempfile.NamedTemporaryFile() as prepared, ThreadPoolExecutor(2) as pool:
        jobs = [Loader(name, folder, num_images, PREPARED=prepared.name) for _ in range(2)]
        try:
            list(pool.map(lambda job: job.ask("check"), jobs))
        finally:
            for job in jobs:
                job.close()
        return os.path.getsize(prepared.name) / num_images


def row(name: str, figures: dict[str, list[float]], shared: dict[str, float]) -> dict[str, object]:
    """Return a loader's line of the table; `ours_over_it` is the median of the rounds' ratios."""
    environment, package = LOADERS[name]
    ratios = [ours / its for ours, its in zip(figures[OURS], figures[name], strict=True)]
    answer: dict[str, object] = {
        "version": versions(environment)[package],
        "cpu_ms_per_image": round(statistics.median(figures[name]), 3),
        "range": [round(min(figures[name]), 3), round(max(figures[name]), 3)],
        "ours_over_it": round(statistics.median(ratios), 3),
    }
    return answer | ({"preparations_for_two_jobs": round(shared[name], 2)} if name in shared else {})


def main() -> int:
    """Measure every loader; print one JSON line."""
    full = "--full" in sys.argv
    num_images, rounds = (1024, 9) if full else (256, 3)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder, num_images)
        loaders, checks, reasons = started(folder, num_images)
        try:
            figures = measured(loaders, rounds)
        finally:
            for loader in loaders.values():
                loader.close()
        asked = [name for name in loaders if full and name not in ENDLESS]  # their reading ahead would count
        shared = {name: preparations(name, folder, num_images) for name in asked}
    if missing := [name for name in reasons if not LOADERS[name][0]]:
        raise SystemExit(f"{missing[0]}: {reasons[missing[0]]}")
    for name, check in checks.items():
        assert check[0] == num_images, f"{name} delivered {check[0]} of {num_images} images"
        assert check == checks[OURS] or name == COMMON, f"{name} delivered other pixels"
    table = {name: row(name, figures, shared) if name in figures else {"reason": reasons[name]} for name in LOADERS}
    ok = max(table[name]["ours_over_it"] for name in figures if not name.startswith("headway")) <= 1.1
    print(json.dumps({
        "bench": "loader_peers", "images": num_images, "rounds": rounds, "loaders": table,
        "claim": "ours <= 1.1 of any peer", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
