"""Where a hung job is blocked: from what every rank is waiting in to the ranks that all others wait for.

Use it when a job of many ranks makes no progress. Each rank reports its
ongoing operation; a rank that reports nothing is silent (MegaScale, arXiv
2402.15627, section 5.3: faulty ranks stay silent). A rank in a collective
waits for the members that have not entered it, one in a send or receive for
its peer; following these waits leads to the origins: ranks that are silent,
ranks that wait for nobody, operations that all have entered and that do not
end. Waits that lead round in a circle are deadlocks. Everything is linear in
the ranks and in the sizes of the groups they wait in.

The reports must be of a job at rest: a rank that computes counts as an origin.

>>> reports = [RankReport(0, (Wait("all_reduce", "tp", seq=7),)), RankReport(2, (Wait("recv", "pp", peer=0),)),
...            RankReport(3, (Wait("recv", "pp", peer=1),))]
>>> verdict = localise(reports, Mesh({"tp": 2, "pp": 2}))
>>> [(origin.ranks, origin.reason, origin.num_waiting) for origin in verdict.origins]
[((1,), 'silent', 3)]
>>> verdict.chain(2)
[2, 0, 1]
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.core.tables import suggestion

Group = int | str
"""A group of ranks: a key of the table of groups, or axes of the mesh ('tp', 'tp-pp'), which mean the rank's own."""

SEND, RECV = "send", "recv"
"""The two operations that have a peer; every other one is a collective of its whole group."""

REASONS: dict[str, str] = {
    "silent": "sends no report",
    "absent": "waits for nobody and has not entered what others wait in",
    "differs": "is in another collective, or one of another size, than most of its group under the same number",
    "stuck": "is in an operation that all its ranks have entered and that does not end",
}
"""Why a rank is an origin -> what that means."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One operation that a rank has entered and not left."""

    op: str
    """Name: 'all_reduce', 'reduce_scatter', ..., 'send', 'recv'."""

    group: Group
    """The group it runs in."""

    seq: int = -1
    """n-th collective of the group, or n-th message to or from that peer; -1 = not known."""

    peer: int = -1
    """Rank at the other end of a send or receive; -1 = none, or a receive from anybody."""

    blocking: bool = True
    """Whether the rank can do nothing else meanwhile; an asynchronous send stays open behind a rank that moves on."""

    size_bytes: int = -1
    """Bytes of a collective to which all its ranks give the same; -1 = not known, or not the same."""

    usual: bool = False
    """Whether most groups of the same role are known to have run this one under this number."""

    def __str__(self) -> str:
        """Return the operation in words."""
        number = f" {self.seq}" if self.seq >= 0 else ""
        if self.op == SEND:
            return f"send{number} to rank {self.peer}"
        if self.op == RECV:
            return f"recv{number} from {'anybody' if self.peer < 0 else f'rank {self.peer}'}"
        return f"{self.op}{number} of group {self.group}"


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank says of itself."""

    rank: int
    """Rank in the job."""

    waits: tuple[Wait, ...] = ()
    """Operations it has entered and not left; none = it is busy with something else."""

    doing: str = ""
    """What it is busy with besides, in words; '' = nothing, or not said."""

    reached: Mapping[Group, int] = field(default_factory=dict)
    """Group -> number of the last collective that it has completed there, where known."""

    attempt: int = 0
    """Attempt of the job that the rank belongs to."""

    stack: tuple[str, ...] = ()
    """Frames of its training thread, innermost first; () = not known."""

    @property
    def free(self) -> bool:
        """Whether nothing holds the rank: no operation is open, or only asynchronous ones while it does something."""
        return not self.waits or bool(self.doing and not any(wait.blocking for wait in self.waits))


@dataclass(frozen=True, slots=True)
class WaitOrigin:
    """Where waits end."""

    ranks: tuple[int, ...]
    """The rank; several for an operation that all of them have entered and that does not end."""

    reason: str
    """One of `REASONS`."""

    num_waiting: int
    """Ranks whose shortest chain of waits ends here."""

    doing: str = ""
    """What the rank says that it does; the operation of a stuck group."""

    awaited: str = ""
    """An operation in which others wait for it; '' when nobody does."""


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Which ranks block a job, and how everybody else depends on them."""

    mesh: Mesh
    """Where the ranks stand."""

    origins: tuple[WaitOrigin, ...]
    """Where waits end, those that most ranks wait for first."""

    deadlocks: tuple[tuple[int, ...], ...]
    """Ranks that wait for each other in a circle."""

    next_rank: Mapping[int, int]
    """Waiting rank -> the rank it waits for, one step nearer to an origin; missing where it is in a stuck operation."""

    reports: Mapping[int, RankReport]
    """Rank -> its report; silent ranks have none."""

    num_ignored: int = 0
    """Reports of other attempts, left out."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that is an origin or part of a deadlock, ascending."""
        groups = [origin.ranks for origin in self.origins] + list(self.deadlocks)
        return tuple(sorted({rank for group in groups for rank in group}))

    def chain(self, rank: int) -> list[int]:
        """Return the ranks from `rank` to the origin it waits for, both included."""
        chain = [rank]
        while chain[-1] in self.next_rank:
            chain.append(self.next_rank[chain[-1]])
        return chain

    def place(self, rank: int) -> str:
        """Return a rank with its coordinates: 'rank 5 (tp 1, dp 0, pp 1)'; axes of size 1 are left out."""
        where = ", ".join(
            f"{axis} {at}" for axis, at in self.mesh.coordinates(rank).items() if self.mesh.size(axis) > 1
        )
        return f"rank {rank} ({where})" if where else f"rank {rank}"

    def states(self) -> list[str]:
        """Return [world_size] 'waiting', a reason of `REASONS`, 'deadlock', or 'busy', by rank."""
        states = ["waiting"] * self.mesh.world_size
        for rank, report in self.reports.items():
            states[rank] = "busy" if report.free else "waiting"
        for circle in self.deadlocks:
            for rank in circle:
                states[rank] = "deadlock"
        for origin in self.origins:
            for rank in origin.ranks:
                states[rank] = origin.reason
        return states

    def to_json(self) -> dict[str, object]:
        """Return the `headway.hang/1` object."""
        origins = [
            {
                "ranks": list(origin.ranks),
                "coordinates": [self.mesh.coordinates(rank) for rank in origin.ranks],
                "reason": origin.reason,
                "num_waiting": origin.num_waiting,
                "doing": origin.doing,
                "awaited": origin.awaited,
            }
            for origin in self.origins
        ]
        return {
            "schema": "headway.hang/1",
            "mesh": self.mesh.sizes,
            "world_size": self.mesh.world_size,
            "origins": origins,
            "deadlocks": [list(circle) for circle in self.deadlocks],
            "states": self.states(),
            "ongoing": {str(rank): _said(report) for rank, report in sorted(self.reports.items())},
            "explained": {str(rank): row.doing for rank, row in sorted(self.reports.items()) if ": " in row.doing},
            "stacks": {str(n): list(row.stack) for n in self.ranks if (row := self.reports.get(n)) and row.stack},
            "next_rank": {str(rank): target for rank, target in sorted(self.next_rank.items())},
            "ignored_reports": self.num_ignored,
        }


def _said(report: RankReport) -> str:
    """Return what a rank is in, in a few words: without what explains it."""
    return "; ".join(map(str, report.waits)) or report.doing.partition(": ")[0] or "no operation"


def localise(
    reports: Iterable[RankReport],
    mesh: Mesh,
    *,
    groups: Mapping[Group, Sequence[int]] | None = None,
    attempt: int | None = None,
) -> HangVerdict:
    """Find the ranks that block a job at rest, from one report of every rank that still answers.

    `groups` maps the group keys of the reports to their ranks; axes of the
    mesh need none. Reports of another attempt than `attempt` (the newest one
    reported, by default) are counted and left out. Raises `InputError` on two
    reports of one rank, a rank outside the mesh, or a group nobody knows.
    """
    given = list(reports)
    current = max((report.attempt for report in given), default=0) if attempt is None else attempt
    known = _by_rank([report for report in given if report.attempt == current], mesh)
    waits = _Waits(known, _GroupMembers(mesh, groups or {}))
    roots = [rank for rank in range(mesh.world_size) if rank not in known or known[rank].free]
    roots = sorted({*roots, *waits.differing})
    next_rank, ends = waits.reach(roots)
    # A rank that leads to no origin, and has only asynchronous operations open, is not held by these.
    free = [rank for rank in known if rank not in ends and not any(wait.blocking for wait in known[rank].waits)]
    if free:
        roots = sorted([*roots, *free])
        next_rank, ends = waits.reach(roots)
    deadlocks = waits.circles([rank for rank in known if rank not in ends])
    origins = [*_single(roots, known, ends, waits, next_rank), *_stuck(waits, ends)]
    origins.sort(key=lambda origin: (-origin.num_waiting, origin.ranks))
    return HangVerdict(mesh, tuple(origins), deadlocks, next_rank, known, len(given) - len(known))


def _by_rank(reports: Sequence[RankReport], mesh: Mesh) -> dict[int, RankReport]:
    """Return rank -> report after checking that ranks are in the mesh and report once."""
    known: dict[int, RankReport] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        mesh.coordinates(report.rank)  # raises outside the mesh
        if report.rank in known:
            raise InputError(
                f"rank {report.rank} reports twice in attempt {report.attempt}; each rank has one ongoing state. "
                "Keep the newer report, and check that no two processes run as that rank."
            )
        known[report.rank] = report
    return known


@dataclass(slots=True)
class _GroupMembers:
    """Finds the members of a group, whether it is named by a key or by axes."""

    mesh: Mesh
    table: Mapping[Group, Sequence[int]]
    along: dict[Group, list[list[int]]] = field(default_factory=dict)
    """Axes -> [world_size] the rank's own group; members of one group share the list."""

    def of(self, group: Group, rank: int) -> tuple[tuple[Group, int], Sequence[int]]:
        """Return an identity of the group and its ranks; raises `InputError` where neither is known."""
        if group in self.table:
            members = self.table[group]
            if rank not in members:
                few = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
                raise InputError(
                    f"rank {rank} reports group {group}, whose ranks are {few}. "
                    "Give the table of groups of the same attempt."
                )
            return (group, -1), members
        if group not in self.along:
            self.along[group] = self._split(group)
        members = self.along[group][rank]
        return (group, members[0]), members

    def _split(self, group: Group) -> list[list[int]]:
        axes = str(group).split("-")
        if not all(axis in self.mesh.sizes for axis in axes):
            names = [*map(str, self.table), *self.mesh.sizes]
            raise InputError(f"group {group!r} is not known. {suggestion(names, str(group))} Add it to the groups.")
        own: list[list[int]] = [[]] * self.mesh.world_size
        for members in self.mesh.groups(*axes):
            for rank in members:
                own[rank] = members
        return own


@dataclass(slots=True)
class _Operation:
    """One operation that ranks wait in."""

    wait: Wait
    inside: list[int]
    """Ranks that have entered it."""
    missing: list[int] = field(default_factory=list)
    """Ranks that it waits for."""


class _Waits:
    """Who waits in which operation, and which ranks each operation waits for."""

    def __init__(self, known: Mapping[int, RankReport], groups: _GroupMembers) -> None:
        self.known, self.groups = known, groups
        self.operations: list[_Operation] = []
        self.of_rank: dict[int, list[int]] = {}
        """Rank -> the operations it is in."""
        self.differing: list[int] = []
        """Ranks that give a number to another collective than most of their group."""
        collectives: dict[tuple[tuple[Group, int], int, str, int], int] = {}
        members: dict[int, Sequence[int]] = {}
        for rank, report in known.items():
            for wait in report.waits:
                key, ranks = groups.of(wait.group, rank)
                if wait.op in (SEND, RECV):
                    index = self._add(_Operation(wait, [], self._peers(rank, wait, ranks)))
                else:
                    # Ranks that give one number to different collectives wait for each other for ever.
                    place = key, wait.seq, wait.op, wait.size_bytes
                    index = collectives.get(place, -1)
                    if index < 0:
                        index = collectives[place] = self._add(_Operation(wait, []))
                        members[index] = ranks
                self.operations[index].inside.append(rank)
                self.of_rank.setdefault(rank, []).append(index)
        for index, ranks in members.items():
            operation = self.operations[index]
            inside = set(operation.inside)
            operation.missing = [m for m in ranks if m not in inside and not self._is_past(m, operation.wait)]
        numbered: dict[tuple[tuple[Group, int], int], list[int]] = {}
        for (key, seq, _, _), index in collectives.items():
            if seq >= 0:
                numbered.setdefault((key, seq), []).append(index)
        for alike in numbered.values():
            if len(alike) > 1:
                self._compare([self.operations[index] for index in alike])

    def _compare(self, alike: Sequence[_Operation]) -> None:
        """Note who is wrong of ranks that give one number to different collectives.

        Those that differ from most of their group; where it is divided, from what other groups of its role ran.
        """
        most = max(alike, key=lambda operation: len(operation.inside))
        right = [most] if 2 * len(most.inside) > sum(len(one.inside) for one in alike) else []
        right = right or [one for one in alike if one.wait.usual]
        if len(right) == 1:
            self.differing += [rank for one in alike if one is not right[0] for rank in one.inside]

    def _add(self, operation: _Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def _is_past(self, rank: int, wait: Wait) -> bool:
        """Tell whether a rank has completed a collective that others are still in."""
        return rank in self.known and self.known[rank].reached.get(wait.group, -1) >= wait.seq >= 0

    def _peers(self, rank: int, wait: Wait, members: Sequence[int]) -> list[int]:
        """Return the ranks that a send or receive waits for: none when its peer is in the other half of it."""
        if wait.peer < 0:
            return [member for member in members if member != rank]
        self.groups.mesh.coordinates(wait.peer)  # raises outside the mesh
        other = RECV if wait.op == SEND else SEND
        for theirs in self.known[wait.peer].waits if wait.peer in self.known else ():
            same_number = theirs.seq == wait.seq or min(theirs.seq, wait.seq) < 0
            if theirs.op == other and theirs.peer in (rank, -1) and theirs.group == wait.group and same_number:
                return []
        return [wait.peer]

    def reach(self, roots: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Return, for ranks that wait for a root, the next rank on the shortest way and the end of that way.

        An end is the root's number, or -1 - i for stuck operation i.
        """
        waiting_for: dict[int, list[int]] = {}
        for index, operation in enumerate(self.operations):
            for rank in operation.missing:
                waiting_for.setdefault(rank, []).append(index)
        ends = {rank: rank for rank in roots}
        next_rank: dict[int, int] = {}
        for index, operation in enumerate(self.operations):
            if not operation.missing:
                ends.update((rank, -1 - index) for rank in operation.inside if rank not in ends)
        queue = deque(ends)
        done: set[int] = set()
        while queue:
            target = queue.popleft()
            for index in waiting_for.get(target, ()):
                if index in done:
                    continue
                done.add(index)
                for rank in self.operations[index].inside:
                    if rank not in ends:
                        ends[rank], next_rank[rank] = ends[target], target
                        queue.append(rank)
        return next_rank, ends

    def circles(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the circles that waits of `ranks`, none of which reaches an origin, lead into."""
        found: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for first in sorted(ranks):
            walk: dict[int, int] = {}
            rank = first
            while rank not in seen:
                seen.add(rank)
                walk[rank] = len(walk)
                # Everything such a rank waits for is of its kind too, or it would have reached an origin.
                rank = self.operations[self.of_rank[rank][0]].missing[0]
            if rank in walk:
                found.append(tuple(sorted(member for member, place in walk.items() if place >= walk[rank])))
        return tuple(found)


def _single(
    roots: Sequence[int],
    known: Mapping[int, RankReport],
    ends: Mapping[int, int],
    waits: _Waits,
    next_rank: Mapping[int, int],
) -> Iterable[WaitOrigin]:
    """Yield the ranks that wait for nobody."""
    number = Counter(ends.values())
    awaited: dict[int, str] = {}
    for rank, target in next_rank.items():
        if target not in awaited and target in ends and ends[target] == target:
            operations = [waits.operations[index] for index in waits.of_rank[rank]]
            awaited[target] = next(str(op.wait) for op in operations if target in op.missing)
    for rank in roots:
        if rank in known and not waits.operations:
            continue  # nobody waits for anybody: ranks that compute block no one
        reason = "silent" if rank not in known else "differs" if rank in waits.differing else "absent"
        doing = known[rank].doing if rank in known else ""
        yield WaitOrigin((rank,), reason, number[rank] - 1, doing, awaited.get(rank, ""))


def _stuck(waits: _Waits, ends: Mapping[int, int]) -> Iterable[WaitOrigin]:
    """Yield the operations that all have entered; the two halves of a message are one."""
    number = Counter(ends.values())
    chains: Counter[tuple[int, ...]] = Counter()
    words: dict[tuple[int, ...], str] = {}
    for index, operation in enumerate(waits.operations):
        if operation.missing:
            continue
        ranks = {*operation.inside, *([operation.wait.peer] if operation.wait.peer >= 0 else [])}
        key = tuple(sorted(ranks))
        chains[key] += number[-1 - index] - sum(ends.get(rank) == -1 - index for rank in ranks)
        words.setdefault(key, str(operation.wait))
    for key, num_waiting in chains.items():
        yield WaitOrigin(key, "stuck", num_waiting, words[key])
