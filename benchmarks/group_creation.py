"""Store operations of creating all process groups of a 3D job, counted: O(n) in order, O(n^2) with global barriers.

Claim: with torch's global barrier after each group the operations of all ranks together are 3n + 1 per group, so n^2
for groups that grow with n; created in order, with barriers of the members only, they are 12 to 14 per rank, so n;
torch's default of today adds none of its own; and headway's probe of `new_group` adds not one to any of these. Every
rank is a thread with its own torch.distributed world; the store is torch's in-process store behind a counter, the
backend moves no data.
"""

import argparse
import collections
import json
import os
import sys
import tempfile
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from headway.core.mesh import Mesh
from headway.runtime.calls.probe_comm import new_group as recorded_new_group
from headway.runtime.recorder.probes import Probes
from headway.trace.rings.ring import Recorder

WORLDS, FULL = (32, 64, 128), (32, 64, 128, 256)
WAYS = {"global barriers": ("1", False), "in order": ("1", True), "torch's default": ("0", False)}
"""Way -> (TORCH_DIST_INIT_BARRIER, whether only the members of a group create it)."""
AXES = ("tp", "pp", "dp")


class CountingStore(dist.Store):
    """torch's in-process store, and how often each of its operations was called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()
        self.lock = threading.Lock()
        self.calls: collections.Counter[str] = collections.Counter()
        self.seen: set[str] = set()

    def _count(self, name: str) -> None:
        with self.lock:
            self.calls[name] += 1

    def set(self, key: str, value: Any) -> None:
        # Two ranks that both find themselves last set one key twice: that race is no cost of a way.
        with self.lock:
            self.calls["set"] += key not in self.seen
            self.seen.add(key)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._count("get")
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        self._count("add")
        return self.inner.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count("wait")
        self.inner.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)


def make_groups(rank: int, mesh: Mesh, store: CountingStore, create: Any, local: bool) -> None:
    """Create every group of the mesh as one rank does: all of them, or with `local` those it is in, axis by axis."""
    dist.init_process_group("fake", rank=rank, world_size=mesh.world_size, store=store)
    for axis in AXES:
        for ranks in mesh.groups(axis):
            if not local or rank in ranks:
                create(ranks, use_local_synchronization=local)


def count(world_size: int, way: str, *, probed: bool) -> int:
    """Return the store operations of all ranks of a tp 4, pp 4 job of `world_size` ranks."""
    barrier, local = WAYS[way]
    os.environ["TORCH_DIST_INIT_BARRIER"] = barrier
    store, mesh = CountingStore(), Mesh.fill(world_size, order=AXES, tp=4, pp=4)
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            create = dist.new_group
            if probed:
                folder = tempfile.mkdtemp(dir=scratch)
                create = recorded_new_group(create, Probes(Recorder(folder, rank=rank, capacity=1024), folder))
            make_groups(rank, mesh, store, create, local)
        except BaseException as cause:
            failures.append(cause)

    with tempfile.TemporaryDirectory() as scratch:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures, failures[0]
    assert not any(thread.is_alive() for thread in threads), "a rank never came out of its barriers"
    return sum(store.calls.values())


def closed_form(world_size: int, way: str) -> int:
    """Return what the barriers must cost: two additions and a wait per rank that takes part, and one key set."""
    barrier, local = WAYS[way]
    mesh = Mesh.fill(world_size, order=AXES, tp=4, pp=4)
    members = [len(ranks) if local else world_size for axis in AXES for ranks in mesh.groups(axis)]
    return sum(3 * size + 1 for size in [world_size, *members]) if barrier == "1" else 0


def main() -> None:
    """Count every way, with and without the probe, and print one JSON line; exit 3 when the claim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="up to 256 ranks")
    parser.add_argument("--worlds", type=lambda text: tuple(map(int, text.split(","))), default=None)
    options = parser.parse_args()
    worlds = options.worlds or (FULL if options.full else WORLDS)
    assert fake_pg is not None  # its import registers the backend
    dist.distributed_c10d._world = ThreadLocalWorld()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    plain = {way: [count(world, way, probed=False) for world in worlds] for way in WAYS}
    probed = {way: [count(world, way, probed=True) for world in worlds] for way in WAYS}
    expected = {way: [closed_form(world, way) for world in worlds] for way in WAYS}
    per_rank = [found / world for found, world in zip(plain["in order"], worlds, strict=True)]
    met = plain == expected and probed == plain and min(per_rank) >= 12 and max(per_rank) <= 14
    result = {
        "bench": "group_creation", "baseline": "new_group with TORCH_DIST_INIT_BARRIER=1", "worlds": list(worlds),
        **{f"operations, {way}": found for way, found in plain.items()},
        "operations per rank, in order": per_rank,
        "added by headway": sum(map(sum, probed.values())) - sum(map(sum, plain.values())),
        "ratio": plain["global barriers"][-1] / plain["in order"][-1],
        "claim": "every count is the closed form; in order 12 to 14 per rank, headway adds none", "met": met,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    os._exit(0 if met else 3)  # worlds of threads cannot be taken down by torch's own exit handlers


if __name__ == "__main__":
    sys.exit(main())
