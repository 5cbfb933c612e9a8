"""Interruptions, other world sizes and worker counts: does a loader deliver what it would have delivered?

Claim: headway's DataLoader delivers the uninterrupted sequence bit for bit (items and their random augmentation) in
every random case, with a state of at most 1 KB; a billion items resume in 50 ms of CPU. Ranks are objects in one
process; a tenth of the cases load in real worker processes, a tenth in threads, changing between both and neither from
life to life (their examples draw from `headway.data.generator()`, which works everywhere). Peer: torchdata's
StatefulDataLoader on the kinds of case that it can be asked, in an environment of its own. 50 cases, `--full` 500.

And at every place (before a pass, after each batch, at its end, between two passes, after the last one) loaders of
every kind (an order of their own, torch's samplers, a user's, batch samplers, streams with a state) go on as if nothing
had been: without workers, `--full` also with two processes, kept or not, with two threads, through a fleet of two
worker processes, and from a data server, whose order is its own: there each pass has to give each item once.
Samplers that shuffle an array or a tensor of theirs in place go on exactly through one to three interruptions; those
whose order rests on a closure, a partial, a class, a default or an iterator are never wrong without a warning.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from _command import ROOT
from peers.env import python_of

from headway.core.rng import stream
from headway.data import DataLoader, generator, torch_generator
from headway.data.fleet.torch_fleet import Fleet

sys.path.insert(0, str(Path(__file__).parent))

from jobs.augmented import Augmented, rows
from jobs.resume_kinds import (
    IN_PLACE,
    ITEMS,
    LIVES,
    SAMPLED,
    STREAMED,
    TURNING,
    after,
    lived,
    once_each,
    places,
    played,
    rest,
    served,
)


class Keyed(Augmented):
    """Examples that draw from the generators of the example, which threads may."""

    def __getitem__(self, item: int) -> tuple[int, float, float, torch.Tensor]:
        draws = generator()
        return item, draws.random(), draws.normal(), torch.rand(2, generator=torch_generator())


def uninterrupted(dataset: Augmented, global_batch: int, epochs: int, seed: int) -> list[list[tuple[float, ...]]]:
    """Return every global batch of one rank without workers."""
    loader = DataLoader(dataset, global_batch, True, seed=seed)
    return [rows(batch) for _ in range(epochs) for batch in loader]


def interrupted(dataset: Augmented, global_batch: int, seed: int, lives: list[tuple]) -> tuple[list, int]:
    """Return the global batches delivered over `lives` of (world size, workers, kind, steps), and the largest state."""
    delivered, state, largest = [], b"", 0
    for world, workers, kind, steps in lives:
        options = {"num_workers": workers, "workers": kind, "seed": seed, "world_size": world}
        ranks = [DataLoader(dataset, global_batch // world, True, rank=r, **options) for r in range(world)]
        for loader in ranks if state else ():
            loader.load_state_dict(pickle.loads(state))
        iterators = [iter(loader) for loader in ranks]
        while steps:
            parts = [rows(batch) for batch in (next(it, None) for it in iterators) if batch is not None]
            if not parts:
                iterators = [iter(loader) for loader in ranks]
                continue
            width = max(map(len, parts))
            delivered.append([part[k] for k in range(width) for part in parts if k < len(part)])
            steps -= 1
        state = pickle.dumps(ranks[steps % world].state_dict())
        largest = max(largest, len(state))
    return delivered, largest


def case(number: int, *, workers: str) -> tuple[bool, int]:
    """Play one random case; returns whether everything came as it would have come, and the largest state."""
    rng = stream(number, "resume cases")
    world_sizes = [1, 2, 3, 4, 6, 8]
    batch = int(rng.integers(1, 5)) * 24
    num_items = int(rng.integers(1, 5001))
    lives = []
    for _ in range(int(rng.integers(2, 8))):
        world = int(rng.choice(world_sizes if workers == "none" else world_sizes[:2]))
        count = 0 if workers == "none" else int(rng.integers(0, 5))
        kind = str(rng.choice(["threads", "processes"])) if workers == "threads" else "processes"
        lives.append((world, count, kind, int(rng.integers(0, 3 * max(1, num_items // batch // 4) + 2))))
    dataset = Keyed(num_items) if workers == "threads" else Augmented(num_items)
    expected, epochs = [], 1
    while len(expected) < sum(life[-1] for life in lives):
        expected, epochs = uninterrupted(dataset, batch, epochs, number), epochs * 2
    delivered, largest = interrupted(dataset, batch, number, lives)
    return delivered == expected[: len(delivered)], largest


HELD_BY = {
    "none": {}, "processes": {"num_workers": 2}, "processes, kept": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "workers": "threads"},
}  # fmt: skip
"""Kind of workers -> arguments."""


def at_every_place(workers: str) -> tuple[int, int]:
    """Interrupt every kind of loader at every place of three passes; returns how often, and how often wrongly."""
    cases = different = 0
    for make in (SAMPLED | (STREAMED if workers != "threads" else {})).values():
        whole = played(make, 3, **HELD_BY[workers])
        for place in places(whole):
            found = rest(make, place, 3, times=1 + place[0] % 2, **HELD_BY[workers])
            cases, different = cases + 1, different + (found != after(whole, place))
    return cases, different


def shared_at_every_place() -> tuple[int, int]:
    """The same for a loader through a fleet, and one from a data server."""
    with Fleet(ITEMS, num_workers=2) as fleet:

        def make() -> DataLoader:
            return fleet.batches(4, True)

        whole = played(make, 3)
        differs = [rest(make, place, 3) != after(whole, place) for place in places(whole)]
        differs.append(whole != played(SAMPLED["own order"], 3))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # a server of this benchmark's own
        differs += [not once_each(served, place, 3) for place in places(whole)]
    return len(differs), sum(differs)


def interrupted_often() -> tuple[int, int, int, int]:
    """Interrupt samplers once, twice and thrice, also within a pass.

    Returns how often those that hold their order, and how often it was wrong; the same of those whose order rests on
    what no look finds, where only a wrong order without a warning counts.
    """
    seen, hidden = [], []
    warnings.filterwarnings("ignore", message="Turning read again")  # by what is played whole
    for table, found in ((IN_PLACE, seen), (TURNING, hidden)):
        for make in table.values():
            whole = [batch for one in played(make, 4) for batch in one]
            found += [lived(make, whole, lives) for lives in LIVES]
    return len(seen), sum(not same for same, _ in seen), len(hidden), sum(not (same or said) for same, said in hidden)


def resume_seconds() -> float:
    """Return the CPU seconds from a state deep inside a billion items to its next batch's indices."""
    loader = DataLoader(range(1_000_000_000), 256, True)
    state = {**loader.state_dict(), "position": 999_999_488}
    start = time.process_time()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.process_time() - start


def peer_table() -> dict[str, dict[str, dict[str, object]]]:
    """Return kind of case -> {loader: whether items and bits went on exactly}, both asked on the same data."""
    job = ROOT / "benchmarks" / "jobs" / "resume_peer.py"
    table: dict[str, dict[str, dict[str, object]]] = {}
    for name, python in (("headway", sys.executable), ("torchdata", str(python_of("torchdata")))):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([python, str(job), name], cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}:\n{done.stderr[-2000:]}")
        for kind, same in json.loads(done.stdout.strip().splitlines()[-1]).items():
            table.setdefault(kind, {})[name] = same
    return table


def main() -> int:
    """Play the cases; print one JSON line."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: on purpose
    cases = 500 if "--full" in sys.argv else 50
    kinds = ["processes", "threads", *["none"] * 8]
    outcomes = [case(number, workers=kinds[number % 10]) for number in range(cases)]
    placed = [at_every_place(workers) for workers in (HELD_BY if "--full" in sys.argv else ["none"])]
    placed += [shared_at_every_place()] if "--full" in sys.argv else []
    in_place, wrong_in_place, hidden, silent = interrupted_often()
    seconds = min(resume_seconds() for _ in range(3))
    table = peer_table()
    different = sum(not same for same, _ in outcomes) + sum(wrong for _, wrong in placed)
    different += wrong_in_place
    ok = not different and not silent and max(size for _, size in outcomes) <= 1024 and seconds <= 0.05
    ok = ok and all(row["headway"]["bits"] for row in table.values())
    print(json.dumps({
        "bench": "resume_exact", "cases": cases, "places": sum(count for count, _ in placed),
        "different": different, "in_place": in_place, "hidden": hidden, "hidden_silent": silent,
        "state_bytes": max(s for _, s in outcomes),
        "resume_1e9_cpu_ms": round(1000 * seconds, 2), "kinds": table,
        "peer": "torchdata 0.11.0 StatefulDataLoader",
        "claim": "0 different, 0 silent, <= 1 KB, <= 50 ms", "met": bool(ok),
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
