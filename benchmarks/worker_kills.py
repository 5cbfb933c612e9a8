"""Random kills of workers, master, supervisor and readers of a fleet: every item exactly once, and does nothing hang?

Claim: over 200 random schedules of SIGKILL (and SIGSTOP) against real processes, every rank's committed sequence is bit
for bit the one without kills, and each run ends within 60 s. Readers are trainers in small: they write a checkpoint
(their items, and how many batches they took) whole or not at all, and a killed one goes on from it. A tenth of the
schedules, `--full` all 200; `--seed N` begins elsewhere.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil

from headway.core.files.safe_files import whole_file
from headway.core.rng import stream
from headway.data.bytes.order import item_seeds
from headway.data.bytes.packing import unpack
from headway.data.fleet.reader import FleetReader
from headway.data.fleet.splits import BatchKeys, FleetPass
from headway.data.fleet.supervisor import FleetSettings, Keeper, forked

LIMIT_S = 60.0
LEASE_S = 1.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one schedule ended."""

    exact: bool
    """Every rank's committed rows are those of the undisturbed passes, in order."""
    seconds: float
    kills: dict[str, int]


def seeds(keys: BatchKeys) -> np.ndarray:
    """Return the seed of each item's random numbers."""
    return item_seeds(keys.seed, keys.epoch, np.array(keys.items), np.array(keys.occurrence))


def prepared(item_s: float) -> Callable[[BatchKeys], dict[str, np.ndarray]]:
    """Return what prepares a batch: it takes a while, and its rows depend on items and their random numbers."""

    def make(keys: BatchKeys) -> dict[str, np.ndarray]:
        time.sleep(item_s * len(keys.items))
        return {"rows": np.stack([np.array(keys.items, np.uint64), seeds(keys)], axis=1)}

    return make


def train(address: str, token: str, passes: list[FleetPass], rank: int, every: int, checkpoint: Path) -> None:
    """Be one rank: read the passes, and write a checkpoint every few batches; go on from the one that is there."""
    state = {"epoch": 0, "taken": 0, "rows": []}
    if checkpoint.exists():
        state = msgspec.json.decode(checkpoint.read_bytes())

    def save() -> None:
        with whole_file(checkpoint) as draft:
            draft.write_bytes(msgspec.json.encode(state))

    while state["epoch"] < len(passes):
        reader = FleetReader(
            address, passes[state["epoch"]], rank, taken=state["taken"], token=token, patience_s=LIMIT_S
        )
        for delivered in reader:
            state["rows"] += unpack(delivered.body)["rows"].tolist()
            state["taken"] += 1
            if state["taken"] % every == 0:
                save()
        state["epoch"], state["taken"] = state["epoch"] + 1, 0
        save()


def expected(passes: list[FleetPass], rank: int) -> list[list[int]]:
    """Return the rows that a rank is to get."""
    keys = [work.keys(batch, rank) for work in passes for batch in range(work.num_batches(rank))]
    return [[item, seed] for key in keys for item, seed in zip(key.items, seeds(key).tolist(), strict=True)]


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def play(seed: int) -> Outcome:
    """Play one random schedule."""
    rng = stream(seed, "worker kills")
    world, workers = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    size = {"batch_size": int(rng.integers(1, 9)), "world_size": world, "seed": seed}
    num_items = int(rng.integers(100, 500))
    tail = str(rng.choice(["short", "pad", "drop"]))
    passes = [FleetPass(num_items, **size, tail=tail, epoch=epoch) for epoch in range(int(rng.integers(1, 3)))]
    tcp = {"host": "127.0.0.1", "port": free_port(), "token": f"{seed}"} if rng.random() < 0.2 else {}
    every, item_s = int(rng.integers(1, 5)), float(rng.uniform(0.001, 0.004))
    # Kills fall into the time that the undisturbed run takes, about: they are what makes it longer.
    long_s = min(0.8 * num_items * len(passes) * item_s / workers + 0.1, 3.0)
    kinds = rng.choice(["worker", "worker", "master", "supervisor", "client", "pause"], int(rng.integers(1, 8)))
    kills = sorted(zip(rng.uniform(0.0, long_s, len(kinds)).tolist(), map(str, kinds), strict=True))
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        options = {"split_batches": int(rng.integers(1, 7)), "lease_s": LEASE_S, "patience_s": LIMIT_S, **tcp}
        settings = FleetSettings(folder, num_items, num_workers=workers, most_workers=workers, **options)
        keeper = Keeper(prepared(item_s), settings)
        trainers: dict[int, int] = {}

        def trainer(rank: int) -> Callable[[], None]:
            return lambda: train(settings.address, settings.token, passes, rank, every, folder / f"rank{rank}.json")

        begun = time.monotonic()
        for rank in range(world):
            trainers[forked(trainer(rank))] = rank
        done: dict[str, int] = {}
        failed = 0
        left, resuming = list(kills), []
        while trainers and time.monotonic() - begun < LIMIT_S:
            for child in list(trainers):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    rank = trainers.pop(child)
                    if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:  # it goes on from its checkpoint
                        trainers[forked(trainer(rank))] = rank
                    failed += status not in (0, signal.SIGKILL)
            while left and time.monotonic() - begun >= left[0][0]:
                kind = left.pop(0)[1]
                if victim := strike(kind, keeper.supervisor, list(trainers), rng):
                    done[kind] = done.get(kind, 0) + 1
                    resuming += [(time.monotonic() + 1.3 * LEASE_S, victim)] if kind == "pause" else []
            while resuming and time.monotonic() >= resuming[0][0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(resuming.pop(0)[1], signal.SIGCONT)
            time.sleep(0.005)
        seconds = time.monotonic() - begun
        for child in trainers:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        keeper.close()
        exact = not trainers and not failed
        exact = exact and all(
            msgspec.json.decode((folder / f"rank{rank}.json").read_bytes())["rows"] == expected(passes, rank)
            for rank in range(world)
        )
        return Outcome(exact, seconds, done)


def strike(kind: str, supervisor: int, trainers: list[int], rng: np.random.Generator) -> int:
    """Kill one process of a kind, or stop it; returns which, 0 when there is none."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        names = {process.pid: process.name() for process in psutil.Process(supervisor).children()}
        workers = [pid for pid, name in names.items() if name.startswith("headway-w")]
        masters = [pid for pid, name in names.items() if name == "headway-master"]
        among = {
            "worker": workers,
            "pause": workers,
            "master": masters,
            "client": trainers,
            "supervisor": [supervisor],
        }[kind]
        if among:
            victim = int(rng.choice(among))
            os.kill(victim, signal.SIGSTOP if kind == "pause" else signal.SIGKILL)
            return victim
    return 0


def main() -> int:
    """Play the schedules; print one JSON line."""
    schedules = 200 if "--full" in sys.argv else 20
    first = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 0
    outcomes = [play(seed) for seed in range(first, first + schedules)]
    kills = {
        kind: sum(o.kills.get(kind, 0) for o in outcomes)
        for kind in ("worker", "master", "supervisor", "client", "pause")
    }
    wrong = [first + k for k, outcome in enumerate(outcomes) if not outcome.exact]
    longest_s = max(outcome.seconds for outcome in outcomes)
    ok = not wrong and longest_s < LIMIT_S
    print(json.dumps({
        "bench": "worker_kills", "schedules": schedules, "kills": kills, "not_exact": wrong,
        "longest_s": round(longest_s, 2), "peer": "the same passes without kills",
        "claim": "exactly once in all, none above 60 s", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
