"""A job on devices that hangs: hosts that run ahead, queues in front of devices, and what each Flight Recorder holds.

Every rank's host puts compute and collectives into two streams of its device, the compute stream (tensor-parallel
all-reduces in between) and that of the data-parallel gradients, runs ahead by up to `depth` entries, and reads the
loss at the end of every second step. One rank has a fault. The job is played until nothing moves; each rank's Flight
Recorder then says of each collective whether it is scheduled, started or completed, as NCCL's does. Nothing here
knows how hangs are localised.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from headway.core.mesh import Mesh

FAULTS = ("host", "device", "stopped", "skips", "none")
"""The host never launches again; a kernel never ends; the process is stopped, and gives no dump; the host leaves out
one collective that the others launch; nothing at all, but a collective that all entered does not end (the network)."""


@dataclass(frozen=True)
class HungDevices:
    """A hung job, and the truth."""

    mesh: Mesh
    fault: str
    culprit: int
    """The rank with the fault, -1 for none."""
    dumps: dict[int, bytes]
    """Rank -> what its Flight Recorder holds, of those that answer."""
    launched: dict[int, int]
    """Rank -> how many entries its host has launched: who blocks first in Python is not who is at fault."""


@dataclass
class _Entry:
    """One entry of a rank's program: compute, a collective, or the host's wait for its device."""

    kind: str
    group: str = ""
    name: str = ""
    size: int = 0
    seq: int = -1


def _program(layers: int, steps: int) -> list[_Entry]:
    """What a host launches: forward with tensor-parallel sums, backward with gradients in buckets, update, read."""
    program: list[_Entry] = []
    for step in range(steps):
        for layer in range(layers):
            program += [_Entry("compute"), _Entry("coll", "tp", "all_reduce", 4096 + layer)]
        for layer in reversed(range(layers)):
            program += [_Entry("compute"), _Entry("coll", "tp", "all_reduce", 4096 + layer)]
            program.append(_Entry("coll", "dp", "_reduce_scatter_base", 1 << (10 + layer % 3)))
        program.append(_Entry("join"))  # the update needs all gradients
        program += [_Entry("coll", "dp", "_all_gather_base", 1 << 14), _Entry("join"), _Entry("compute")]
        if step % 2:
            program.append(_Entry("read"))
    return program


class _Rank:
    """A host and the two queues of its device."""

    def __init__(self, program: list[_Entry], depth: int) -> None:
        self.program, self.depth = program, depth
        self.at = 0
        self.queues: dict[str, list[tuple[int, _Entry]]] = {"compute": [], "dp": []}
        self.done: set[int] = set()
        self.started: set[int] = set()
        self.recorded: list[tuple[int, _Entry]] = []
        self.counts: dict[str, int] = {}
        self.stops_at = self.hangs_at = -1

    def launch(self) -> bool:
        """Launch one entry more; False where the host waits, or is stuck."""
        waiting = sum(map(len, self.queues.values()))
        if self.at >= len(self.program) or self.at == self.stops_at or waiting >= self.depth:
            return False
        entry = self.program[self.at]
        if entry.kind == "read" and waiting:
            return False
        if entry.kind == "coll":
            seq = self.counts[entry.group] = self.counts.get(entry.group, 0) + 1
            entry = _Entry("coll", entry.group, entry.name, entry.size, seq)
            self.recorded.append((self.at, entry))
        if entry.kind != "read":
            self.queues["dp" if entry.group == "dp" else "compute"].append((self.at, entry))
        self.at += 1
        return True

    def heads(self) -> list[tuple[str, int, _Entry]]:
        """Return the entries that the device may work on: heads of queues whose dependencies are met."""
        found = []
        for name, queue in self.queues.items():
            if not queue:
                continue
            place, entry = queue[0]
            other = self.queues["compute" if name == "dp" else "dp"]
            # A gradient is there when what was launched before it has been computed; an update when all gradients are.
            needs = name == "dp" or entry.kind == "join"
            if not (needs and any(before < place for before, _ in other)):
                found.append((name, place, entry))
        return found


def hung_devices(seed: int, fault: str | None = None) -> HungDevices:
    """Play a job with a fault drawn by `seed` until nothing moves."""
    rng = random.Random(seed)
    mesh = Mesh({"tp": rng.choice([1, 2, 4]), "dp": rng.choice([2, 3, 4, 8])})
    fault = fault or rng.choice(FAULTS)
    layers, steps = rng.randint(1, 4), rng.randint(3, 6)
    depth = rng.choice([2, 8, 32, 1000])
    program = [entry for entry in _program(layers, steps) if entry.group != "tp" or mesh.size("tp") > 1]
    ranks = [_Rank(list(program), depth) for _ in range(mesh.world_size)]
    culprit = -1 if fault == "none" else rng.randrange(mesh.world_size)
    place = rng.randrange(len(program) // 3, len(program) - 4)
    broken: tuple[str, int, int] = ("", -1, -1)  # group, its first rank, and number of a collective that never ends
    if fault in ("host", "stopped"):
        ranks[culprit].stops_at = place
    elif fault == "device":
        ranks[culprit].hangs_at = next(k for k in range(place, -1, -1) if program[k].kind == "compute")
    elif fault == "skips":
        ranks[culprit].program.pop(next(k for k in range(place, -1, -1) if program[k].kind == "coll"))
    else:
        seq = rng.randint(2, 2 * steps)
        broken = ("dp", mesh.group_of(rng.randrange(mesh.world_size), "dp")[0], seq)
    _play(ranks, mesh, rng, broken)
    silent = {culprit} if fault == "stopped" else set()
    dumps = {rank: _dump(one, rank, mesh, rng) for rank, one in enumerate(ranks) if rank not in silent}
    return HungDevices(mesh, fault, culprit, dumps, {rank: one.at for rank, one in enumerate(ranks)})


def _play(ranks: list[_Rank], mesh: Mesh, rng: random.Random, broken: tuple[str, int, int]) -> None:
    moved = True
    while moved:
        moved = False
        for rank in rng.sample(range(len(ranks)), len(ranks)):
            while ranks[rank].launch():
                moved = True
            for _, place, entry in ranks[rank].heads():
                if entry.kind == "coll":
                    ranks[rank].started.add(place)
                elif place != ranks[rank].hangs_at:
                    _end(ranks[rank], place)
                    moved = True
        for rank, one in enumerate(ranks):
            for _, _, entry in one.heads():
                if entry.kind == "coll" and _all_in(ranks, mesh, rank, entry, broken):
                    moved = True
                    for member in mesh.group_of(rank, entry.group):
                        _end(ranks[member], next(at for at, e in ranks[member].recorded if e == entry))
                    break


def _all_in(ranks: list[_Rank], mesh: Mesh, rank: int, entry: _Entry, broken: tuple[str, int, int]) -> bool:
    members = mesh.group_of(rank, entry.group)
    if broken == (entry.group, members[0], entry.seq):
        return False
    return all(any(e == entry and at in ranks[m].started for _, at, e in ranks[m].heads()) for m in members)


def _end(rank: _Rank, place: int) -> None:
    rank.done.add(place)
    for queue in rank.queues.values():
        queue[:] = [one for one in queue if one[0] != place]


def _dump(rank: _Rank, number: int, mesh: Mesh, rng: random.Random) -> bytes:
    """Return what NCCL's Flight Recorder of a rank holds, the newest entries; the newest mark may lag behind."""
    entries: list[dict[str, Any]] = []
    for place, entry in rank.recorded:
        state = "completed" if place in rank.done else "started" if place in rank.started else "scheduled"
        entries.append({
            "process_group": [_group(entry.group, mesh.group_of(number, entry.group)), entry.group],
            "profiling_name": f"nccl:{entry.name}", "state": state, "retired": state == "completed",
            "collective_seq_id": entry.seq, "p2p_seq_id": 0, "is_p2p": False,
            "input_sizes": [[entry.size]], "input_dtypes": ["Float"], "output_sizes": [[entry.size]],
            "output_dtypes": ["Float"], "time_created_ns": 1_000 + place,
        })  # fmt: skip
    newest = [row for row in entries if row["state"] == "completed"][-1:]
    if newest and len(entries) > entries.index(newest[0]) + 1 and rng.random() < 0.3:
        newest[0].update(state="started", retired=False)
    groups = [("0", list(range(mesh.world_size)))]
    groups += [(_group(axis, ranks), ranks) for axis in mesh.sizes for ranks in mesh.groups(axis) if number in ranks]
    config = {name: {"name": name, "desc": name.split(" ")[0], "ranks": str(ranks)} for name, ranks in groups}
    return json.dumps({"version": "2.10", "pg_config": config, "entries": entries[-2000:]}).encode()


def _group(axis: str, ranks: list[int]) -> str:
    return f"{axis} {ranks[0]}"
