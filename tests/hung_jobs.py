"""A 3D-parallel training job that stops: an independent play of its programs, rank by rank, until nothing moves.

Every rank runs 1F1B over its micro-batches: a receive from the stage before or
behind, a tensor-parallel all-reduce inside the stage, a send; at the end of a
step a data-parallel reduce-scatter and an all-reduce over the model-parallel
ranks. A faulty rank stops before one of its operations. Messages are put into
a mailbox, so a send never holds its rank; those that nobody has fetched are
open at the end. Nothing here knows of wait-for graphs.
"""

import random
from dataclasses import dataclass

from benchmarks._one_f_one_b import actions
from headway.core.mesh import Mesh
from headway.ledger.hang import RankReport, Wait

Instruction = tuple[str, str, int, int]
"""(operation, axes of its group, number of it there, distance of the peer's stage)."""


@dataclass(frozen=True)
class HungJob:
    """What is planted: who stops where, and whether a stopped rank still answers."""

    mesh: Mesh
    num_microbatches: int
    stops: dict[int, int]
    """Rank -> how many of its operations it completes."""
    answering: frozenset[int] = frozenset()
    """Faulty ranks that still report: they compute for ever."""


def program(stage: int, num_stages: int, num_microbatches: int, num_steps: int = 2) -> list[Instruction]:
    """Return what a rank of `stage` executes."""
    order = actions(num_stages, num_microbatches)[stage]
    out: list[Instruction] = []
    count: dict[tuple[str, str, int], int] = {}

    def put(operation: str, axes: str, distance: int = 0) -> None:
        number = count[operation, axes, distance] = count.get((operation, axes, distance), -1) + 1
        out.append((operation, axes, number, distance))

    for _ in range(num_steps):
        for kind, _microbatch in order:
            ahead = 1 if kind == "F" else -1
            if 0 <= stage - ahead < num_stages:
                put("recv", "pp", -ahead)
            put("all_reduce", "tp")
            if 0 <= stage + ahead < num_stages:
                put("send", "pp", ahead)
        put("reduce_scatter", "dp")
        put("all_reduce", "tp-pp")
    return out


class Play:
    """The state of every rank while the job runs."""

    def __init__(self, job: HungJob) -> None:
        self.job, self.mesh = job, job.mesh
        world, stages = job.mesh.world_size, job.mesh.size("pp")
        self.programs = [program(stage, stages, job.num_microbatches) for stage in range(stages)]
        self.stage = [0] * world
        self.neighbours: list[list[int]] = [[]] * world
        for ranks in job.mesh.groups("pp"):
            for stage, rank in enumerate(ranks):
                self.stage[rank], self.neighbours[rank] = stage, ranks
        self.group: dict[str, list[list[int]]] = {}
        for axes in ("tp", "dp", "tp-pp"):
            self.group[axes] = [[]] * world
            for ranks in job.mesh.groups(*axes.split("-")):
                for rank in ranks:
                    self.group[axes][rank] = ranks
        self.at = [0] * world
        self.arrived: dict[tuple[str, int, int], int] = {}
        self.mail: set[tuple[int, int, int]] = set()
        self.awaited: set[tuple[int, int, int]] = set()

    def run(self) -> None:
        """Let every rank run as far as it can."""
        ready = list(range(self.mesh.world_size))
        while ready:
            rank = ready.pop()
            code, stop = self.programs[self.stage[rank]], self.job.stops.get(rank, -1)
            while self.at[rank] < len(code) and self.at[rank] != stop:
                if not self.perform(rank, code[self.at[rank]], ready):
                    break
                self.at[rank] += 1

    def perform(self, rank: int, instruction: Instruction, ready: list[int]) -> bool:
        """Enter an operation; False = the rank is held in it."""
        operation, axes, number, distance = instruction
        if operation == "send":
            letter = (rank, self.peer(rank, distance), number)
            if letter in self.awaited:
                self.awaited.remove(letter)
                self.at[letter[1]] += 1
                ready.append(letter[1])
            else:
                self.mail.add(letter)
            return True
        if operation == "recv":
            letter = (self.peer(rank, distance), rank, number)
            if letter in self.mail:
                self.mail.remove(letter)
                return True
            self.awaited.add(letter)
            return False
        members = self.group[axes][rank]
        key = (axes, members[0], number)
        self.arrived[key] = self.arrived.get(key, 0) + 1
        if self.arrived[key] < len(members):
            return False
        for member in members:
            if member != rank:
                self.at[member] += 1
                ready.append(member)
        return True

    def peer(self, rank: int, distance: int) -> int:
        """Return the rank of the same pipeline `distance` stages on."""
        return self.neighbours[rank][self.stage[rank] + distance]

    def reports(self) -> list[RankReport]:
        """Return what every answering rank says once nothing moves any more."""
        open_sends: dict[int, list[Wait]] = {}
        for source, target, number in sorted(self.mail):
            open_sends.setdefault(source, []).append(Wait("send", "pp", number, target, blocking=False))
        said = []
        for rank, at in enumerate(self.at):
            waits = open_sends.get(rank, [])
            if rank in self.job.stops:
                if rank in self.job.answering:
                    said.append(RankReport(rank, tuple(waits), doing="computes"))
                continue
            code = self.programs[self.stage[rank]]
            assert at < len(code), f"rank {rank} finished: the fault came too late to stop the job"
            operation, axes, number, distance = code[at]
            peer = self.peer(rank, distance) if operation == "recv" else -1
            said.append(RankReport(rank, (Wait(operation, axes, number, peer), *waits)))
        return said


def hung_reports(job: HungJob) -> list[RankReport]:
    """Play `job` until nothing moves and return what its ranks report."""
    play = Play(job)
    play.run()
    return play.reports()


def random_job(seed: int, *, most: int = 10_240, num_faults: int = 1, answering: bool = False) -> HungJob:
    """Return a job on a random (tp, pp, dp) grid of up to `most` ranks with faults at random places.

    Sizes are spread evenly over their logarithms; with `answering` half the
    faulty ranks still report. Later faults are planted where the rank comes to
    before the earlier ones hold it, and where the earlier ones still happen.
    """
    rng = random.Random(seed)
    world = max(2 * num_faults, round(2 ** rng.uniform(2, 13.33)))
    tp = 2 ** rng.randint(0, 3)
    pp = rng.randint(1, min(16, max(1, min(world, most) // tp)))
    dp = max(1, min(world, most) // (tp * pp))
    sizes = {"tp": tp, "pp": pp, "dp": max(dp, -(-2 * num_faults // (tp * pp)))}
    axes = list(sizes)
    rng.shuffle(axes)
    mesh = Mesh({axis: sizes[axis] for axis in axes})
    num_microbatches = rng.randint(1, pp + 2)
    ranks = rng.sample(range(mesh.world_size), num_faults)
    stops: dict[int, int] = {}
    for rank in ranks:
        held = Play(HungJob(mesh, num_microbatches, stops))
        held.run() if stops else None
        first_step = len(held.programs[held.stage[rank]]) // 2 - 1
        latest = held.at[rank] if stops else first_step
        tried = {**stops, rank: rng.randint(0, latest)}
        play = Play(HungJob(mesh, num_microbatches, tried))
        play.run() if stops else None
        # Stopped where it is held anyway, it keeps nobody from his own place.
        happens = not stops or all(play.at[other] == at for other, at in tried.items())
        stops = tried if happens else {**stops, rank: latest}
    still = frozenset(rank for rank in ranks if answering and rng.random() < 0.5)
    return HungJob(mesh, num_microbatches, stops, still)
