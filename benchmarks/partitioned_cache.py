"""Two hosts that cache a dataset together, over throttled disks of their own, against each host's own page cache.

Claim: with room for the dataset on both together, the first epoch reads each byte from storage once and later ones
none; with less room an epoch reads exactly the bytes that no host holds; a host killed (-9) in mid-epoch costs no
example and gives none twice (the survivor goes on from the last common step, as one rank). Peer: an LRU cache of equal
size on each host alone, as the page cache of the machine would be, over the same orders and disks. Every payload is
compared with the source; bytes are counted by the throttled disks. `--full`: more examples and rounds.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

from _command import ROOT

from headway.core.rng import stream
from headway.data.bytes.source import FolderSource, Throttled
from headway.data.cached.tiered import TieredCache
from headway.data.loader.loader import DataLoader
from headway.data.partitioned.partitioned import Partitioned
from headway.data.partitioned.peers import listen

HOSTS, BATCH, EPOCHS, TOKEN = 2, 4, 3, "benchmark"
BYTES_PER_S, LATENCY_S = 8e6, 0.002
"""A disk: reads of small files at 8 MB/s and 2 ms each, a shared spindle's share."""
AMPLE, SCARCE = 0.6, 0.3
"""Part of the dataset that each host has room for."""


class Lru:
    """A source behind this host's own cache, which drops what was not used for longest."""

    def __init__(self, source: Any, capacity_bytes: int) -> None:
        self.source, self.cache = source, TieredCache(capacity_bytes, policies="lru")

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> bytes:
        """Return the item from memory or from storage."""
        found = self.cache.get(index)
        if found is not None:
            return bytes(found[1])
        payload = self.source.read(index)
        self.cache.put(index, "encoded", payload)
        return payload


class Checked:
    """A dataset of (index, checksum of the payload)."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, zlib.crc32(self.source.read(index))


class Host:
    """One server and rank: does what it is told, a line of JSON each."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.folder = rank, folder
        self.cached: Any = None

    def listen(self) -> int:
        """Open a port for the next cache."""
        self.listener = listen("127.0.0.1", 0, TOKEN)
        return self.listener.port

    def cache(self, ports: list[int], capacity_bytes: int) -> None:
        """Begin a cache of all hosts or, without ports, one of this host's own."""
        self.close()
        self.disk = Throttled(FolderSource(self.folder, (".bin",)), BYTES_PER_S, LATENCY_S)
        if ports:
            self.cached = Partitioned(
                self.disk, hosts={f"host{k}": f"127.0.0.1:{port}" for k, port in enumerate(ports)},
                host=f"host{self.rank}", capacity_bytes=capacity_bytes, token=TOKEN, listener=self.listener,
            ).start()  # fmt: skip
        else:
            self.cached = Lru(self.disk, capacity_bytes)
        self.loader = self.loaded(self.rank, HOSTS)

    def loaded(self, rank: int, world_size: int) -> DataLoader:
        """Return a loader of this rank's part of each epoch."""
        data = Checked(self.cached)
        return DataLoader(data, BATCH, shuffle=True, seed=3, rank=rank, world_size=world_size, collate_fn=list)

    def epoch(self) -> dict[str, Any]:
        """Read an epoch; returns what came, the bytes from storage, and how long it took."""
        before, start = self.disk.bytes_read, time.perf_counter()
        items = [item for batch in self.loader for item in batch]
        return {"items": items, "bytes": self.disk.bytes_read - before, "s": time.perf_counter() - start}

    def step(self) -> list[tuple[int, int]]:
        """Read one batch."""
        if not hasattr(self, "steps"):
            self.steps = iter(self.loader)
        return next(self.steps)

    def rest(self) -> list[tuple[int, int]]:
        """Go on as the only rank from where this one is, to the end of the epoch."""
        alone = self.loaded(0, 1)
        alone.load_state_dict(self.loader.state_dict(), allow_batch_change=True)
        return [item for batch in alone for item in batch]

    def held(self) -> list[int]:
        """Return the items in this host's memory."""
        return [item for item in range(len(self.cached)) if self.cached.holds(item)]

    def losses(self) -> int:
        """Return how often another host was found gone."""
        return int(self.cached.statistics().peer_losses)

    def close(self) -> None:
        """Leave the cache."""
        if isinstance(self.cached, Partitioned):
            self.cached.close()


def host_main(rank: int, folder: str) -> None:
    """Answer commands until the input ends."""
    warnings.simplefilter("ignore", RuntimeWarning)  # that the other host is away: it is counted
    host = Host(rank, folder)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(host, name)(*arguments)), flush=True)


class Hosts:
    """The processes of all hosts."""

    def __init__(self, folder: str) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "host", str(rank), folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, cwd=ROOT,
            )
            for rank in range(HOSTS)
        ]  # fmt: skip

    def tell(self, *command: Any) -> list[Any]:
        """Let all hosts do something at the same time; returns their answers."""
        for process in self.processes:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def cache(self, capacity_bytes: int, together: bool) -> None:
        """Begin new caches."""
        self.tell("cache", self.tell("listen") if together else [], capacity_bytes)

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.communicate()


def write_files(folder: Path, num: int) -> dict[int, tuple[int, int]]:
    """Write files of many sizes; returns item -> (bytes, checksum)."""
    rng = stream(0, "files")
    (folder / "class").mkdir()
    found = {}
    for item, size in enumerate(rng.integers(4_000, 24_000, num).tolist()):
        payload = rng.bytes(size)
        (folder / "class" / f"{item:06}.bin").write_bytes(payload)
        found[item] = size, zlib.crc32(payload)
    return found


def epochs(hosts: Hosts, files: dict[int, tuple[int, int]], num: int) -> tuple[list[int], list[float]]:
    """Read epochs on all hosts, each example once and right; returns bytes from storage and seconds of each."""
    bytes_read, seconds = [], []
    for _ in range(num):
        answers = hosts.tell("epoch")
        check(files, [item for answer in answers for item in answer["items"]])
        bytes_read.append(sum(answer["bytes"] for answer in answers))
        seconds.append(max(answer["s"] for answer in answers))
    return bytes_read, seconds


def check(files: dict[int, tuple[int, int]], items: list[list[int]]) -> None:
    """Raise unless each example is there exactly once, with its own bytes."""
    if sorted(item for item, _ in items) != sorted(files):
        raise SystemExit(f"{len(items)} examples of {len(files)} came, or some of them twice.")
    if any(files[item][1] != checksum for item, checksum in items):
        raise SystemExit("a payload is not what the file holds.")


def killed(hosts: Hosts, files: dict[int, tuple[int, int]]) -> dict[str, int]:
    """Kill one host in the middle of the third epoch; the other finishes the epoch alone, and reads one more."""
    steps = len(files) // (HOSTS * BATCH) // 2
    items = [item for _ in range(steps) for answer in hosts.tell("step") for item in answer]
    dead = hosts.processes.pop()
    dead.kill()
    dead.communicate()
    (rest,) = hosts.tell("rest")
    check(files, items + rest)
    (losses,) = hosts.tell("losses")
    return {"before": len(items), "after": len(rest), "losses": losses}


def main() -> int:
    """Run every part; print one JSON line."""
    full = "--full" in sys.argv
    with tempfile.TemporaryDirectory(prefix="headway-partitioned-") as folder:
        files = write_files(Path(folder), 1200 if full else 300)
        total = sum(size for size, _ in files.values())
        hosts = Hosts(folder)
        try:
            rounds = []
            for _ in range(5 if full else 2):
                hosts.cache(int(AMPLE * total), together=True)
                ours = epochs(hosts, files, EPOCHS)
                hosts.cache(int(AMPLE * total), together=False)
                rounds.append((ours, epochs(hosts, files, EPOCHS)))
            hosts.cache(int(SCARCE * total), together=True)
            scarce, _ = epochs(hosts, files, EPOCHS)
            held = set().union(*hosts.tell("held"))
            hosts.cache(int(SCARCE * total), together=False)
            scarce_lru, _ = epochs(hosts, files, EPOCHS)
            hosts.cache(int(AMPLE * total), together=True)
            epochs(hosts, files, 2)
            after_kill = killed(hosts, files)
        finally:
            hosts.end()
    ratios = sorted(sum(lru[1][1:]) / sum(ours[1][1:]) for ours, lru in rounds)
    unheld = sum(size for item, (size, _) in files.items() if item not in held)
    ok = all(ours[0] == [total, *[0] * (EPOCHS - 1)] for ours, _ in rounds)
    ok = ok and scarce == [total, *[unheld] * (EPOCHS - 1)] and unheld > 0
    ok = ok and after_kill["losses"] == 1
    print(json.dumps({
        "bench": "partitioned_cache", "examples": len(files), "hosts": HOSTS, "dataset_bytes": total,
        "cache_fraction_per_host": [AMPLE, SCARCE],
        "storage_bytes": {"ample": rounds[0][0][0], "ample_lru": rounds[0][1][0], "scarce": scarce,
                          "scarce_lru": scarce_lru, "unheld": unheld},
        "later_epochs_s": statistics.median(sum(ours[1][1:]) for ours, _ in rounds),
        "baseline_s": statistics.median(sum(lru[1][1:]) for _, lru in rounds),
        "ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]], "killed": after_kill,
        "baseline": "LRU cache of equal size on each host alone (headway.data.TieredCache)",
        "claim": "0 bytes from storage after the first epoch; what no host holds, exactly, with less room", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(host_main(int(sys.argv[2]), sys.argv[3]) if sys.argv[1:2] == ["host"] else main())
