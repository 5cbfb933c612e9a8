"""Traces of ranks whose clocks stand apart by a known offset and drift: what alignment has to find again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.sync.clocks import aligned_ns

US, MS, S = 1_000, 1_000_000, 1_000_000_000


@dataclass(frozen=True)
class Wrong:
    """Clocks [R]: raw = true + offset + drift * (true - zero)."""

    offset_ns: np.ndarray
    drift: np.ndarray
    zero_ns: int = 0

    @classmethod
    def draw(cls, rng: np.random.Generator, ranks: int, *, offset_ns: int = 50 * MS, drift: float = 20e-6) -> Wrong:
        """Draw evenly from both ranges."""
        return cls(rng.integers(-offset_ns, offset_ns + 1, ranks), rng.uniform(-drift, drift, ranks))

    def tell(self, rank: np.ndarray, true_ns: np.ndarray) -> np.ndarray:
        """Return what the clock of each rank shows at true times."""
        more = np.rint(self.drift[rank] * (true_ns - self.zero_ns)).astype(np.int64)
        return true_ns + self.offset_ns[rank] + more

    def spoil(self, trace: Trace) -> Trace:
        """Return `trace`, made in true time, as these clocks would have recorded it."""
        rank, start = trace.events["rank"].astype(np.int64), trace.events["start_ns"]
        told = self.tell(rank, start)
        ended = self.tell(rank, start + trace.events["duration_ns"])
        return replace(trace, events={**trace.events, "start_ns": told, "duration_ns": ended - told})

    def error_ns(self, aligned: Trace, at_ns: np.ndarray) -> np.ndarray:
        """[R, n] How far each aligned clock is from that of the first rank at true times `at_ns` [n]."""
        ranks = sorted(aligned.ranks)
        shown = [
            aligned_ns(aligned.ranks[rank], self.tell(np.full(len(at_ns), rank), at_ns)).astype(np.int64)
            for rank in ranks
        ]
        return np.abs(np.stack(shown) - shown[0])


def stepped(trace: Trace, rank: int, at_ns: int, by_ns: int) -> Trace:
    """Return `trace` with the clock of `rank` set forward by `by_ns` when it shows `at_ns`."""
    start, end = trace.events["start_ns"], trace.events["start_ns"] + trace.events["duration_ns"]
    start, end = (x + by_ns * ((trace.events["rank"] == rank) & (x > at_ns)) for x in (start, end))
    return replace(trace, events={**trace.events, "start_ns": start, "duration_ns": end - start})


class Maker:
    """Collects calls in true time."""

    def __init__(self, rng: np.random.Generator, *, noise_ns: float = 20 * US) -> None:
        self.rng, self.noise_ns = rng, noise_ns
        self.parts: list[dict[str, np.ndarray]] = []
        self.length_ns: list[int] = []

    def collective(self, group: int, seq: int, ranks: np.ndarray, at_ns: int, *, late_ns: float, work_ns: int) -> int:
        """Let `ranks` meet: they come up to a few `late_ns` after `at_ns`, and leave when it is done plus noise."""
        start = at_ns + self.rng.exponential(late_ns, len(ranks)).astype(np.int64)
        done = int(start.max()) + work_ns
        self._add(0, group, seq, ranks, start, done + self._noise(len(ranks)), np.full(len(ranks), -1))
        self.length_ns.append(done - int(np.median(start)))
        return done

    def message(self, seq: int, source: int, target: int, at_ns: int, *, late_ns: float, work_ns: int) -> int:
        """Let `source` send to `target`."""
        pair = np.array([source, target])
        start = at_ns + self.rng.exponential(late_ns, 2).astype(np.int64)
        done = int(start.max()) + work_ns
        end = done + self._noise(2)
        self._add(1, 0, seq, pair[:1], start[:1], end[:1], pair[1:])
        self._add(2, 0, seq, pair[1:], start[1:], end[1:], pair[:1])
        self.length_ns.append(work_ns)
        return done

    def _noise(self, n: int) -> np.ndarray:
        return self.rng.exponential(self.noise_ns, n).astype(np.int64) if self.noise_ns else np.zeros(n, np.int64)

    def _add(self, name: int, group: int, seq: int, rank, start, end, peer) -> None:
        n = len(rank)
        self.parts.append(
            {
                "name": np.full(n, name), "group": np.full(n, group), "seq": np.full(n, seq), "rank": rank,
                "start_ns": start, "duration_ns": end - start, "peer": peer,
                "kind": np.full(n, [KIND["COLL"], KIND["SEND"], KIND["RECV"]][name]),
                "corr": np.full(n, 0 if name == 0 else -1),
            }
        )  # fmt: skip

    def trace(self, **ranks: dict) -> Trace:
        """Return what was collected, in an order that tells nothing."""
        columns = {key: np.concatenate([part[key] for part in self.parts]) for key in self.parts[0]}
        mixed = self.rng.permutation(len(columns["rank"]))
        columns = {key: values[mixed] for key, values in columns.items()}
        names = ["comm.collective", "comm.send", "comm.recv"]
        table = {int(rank): dict(ranks.get(str(rank), {})) for rank in np.unique(columns["rank"])}
        return Trace.from_columns(columns, names=names, ranks=table, meta={"source": "headway"})


def one_group(
    seed: int,
    *,
    ranks: int = 64,
    meetings: int = 300,
    span_s: float = 60.0,
    noise_ns: float = 20 * US,
    work_ns: int = 300 * US,
) -> tuple[Trace, list[int]]:
    """Return a job whose ranks all meet in one group (data parallel), and the lengths of its collectives, ns."""
    maker = Maker(np.random.default_rng(seed), noise_ns=noise_ns)
    everyone = np.arange(ranks)
    for seq in range(meetings):
        maker.collective(0, seq, everyone, round(seq * span_s * S / meetings), late_ns=200 * US, work_ns=work_ns)
    return maker.trace(), maker.length_ns


def three_axes(
    seed: int,
    *,
    tp: int = 4,
    pp: int = 4,
    dp: int = 4,
    steps: int = 60,
    span_s: float = 60.0,
    noise_ns: float = 20 * US,
) -> tuple[Trace, list[int]]:
    """Return a job with sparse groups: tensor-parallel all-reduces, messages between stages, data-parallel ones."""
    rng = np.random.default_rng(seed)
    maker = Maker(rng, noise_ns=noise_ns)
    grid = np.arange(tp * pp * dp).reshape(pp, dp, tp)
    for step in range(steps):
        at = round(step * span_s * S / steps)
        for p in range(pp):
            for d in range(dp):
                for k in range(3):
                    maker.collective(
                        1 + p * dp + d, 3 * step + k, grid[p, d], at + k * 10 * MS, late_ns=50 * US, work_ns=150 * US
                    )
                for t in range(tp):
                    if p + 1 < pp:
                        here, there = int(grid[p, d, t]), int(grid[p + 1, d, t])
                        maker.message(step, here, there, at + 50 * MS, late_ns=300 * US, work_ns=200 * US)
                        maker.message(step, there, here, at + 80 * MS, late_ns=300 * US, work_ns=200 * US)
            for t in range(tp):
                maker.collective(1000 + p * tp + t, step, grid[p, :, t], at + 100 * MS, late_ns=MS, work_ns=2 * MS)
    return maker.trace(), maker.length_ns


def pipeline(seed: int, *, stages: int = 8, steps: int = 200, span_s: float = 60.0) -> tuple[Trace, list[int]]:
    """Return a job that only sends messages, both ways, between neighbours."""
    maker = Maker(np.random.default_rng(seed))
    for step in range(steps):
        at = round(step * span_s * S / steps)
        for p in range(stages - 1):
            maker.message(step, p, p + 1, at + p * 5 * MS, late_ns=500 * US, work_ns=200 * US)
            maker.message(step, p + 1, p, at + (2 * stages - p) * 5 * MS, late_ns=500 * US, work_ns=200 * US)
    return maker.trace(), maker.length_ns
