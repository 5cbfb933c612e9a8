"""Hypothesis strategies: random Dags with everything that can make them awkward."""

from dataclasses import dataclass

from hypothesis import strategies as st

from headway.sim.graph.dag import Dag
from tests import oracles


@dataclass(frozen=True)
class Case:
    """A random order and durations, in the plain form that the oracles take."""

    n: int
    edges: list[oracles.Edge]
    lane: list[int]
    priority: list[int]
    duration_ns: list[int]

    @property
    def all_edges(self) -> list[oracles.Edge]:
        """Edges and lane order."""
        return oracles.with_lanes(self.n, self.edges, self.lane)

    def dag(self, *, lane_order: bool = True) -> Dag:
        """Build it, without lags and priorities when all are zero."""
        lags = [lag for _, _, lag in self.edges]
        return Dag.from_edges(
            self.n, [source for source, _, _ in self.edges], [target for _, target, _ in self.edges],
            lane=self.lane if any(on >= 0 for on in self.lane) else None, lag_ns=lags if any(lags) else None,
            priority=self.priority if any(self.priority) else None, lane_order=lane_order,
        )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, *, most: int = 14, shuffled: bool = False, longest: int = 30) -> Case:
    """Random DAGs: parallel edges, lags, ops on no lane, zero durations; indices out of topological order if asked."""
    n = draw(st.integers(1, most))
    place = draw(st.permutations(range(n))) if shuffled else list(range(n))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] != pair[1])
    lag = st.integers(0, 9) if draw(st.booleans()) else st.just(0)
    ends = draw(st.lists(pairs, max_size=2 * n)) if n > 1 else []
    edges = [(place[min(pair)], place[max(pair)], draw(lag)) for pair in ends]
    lane = [-1] * n if draw(st.booleans()) else draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n))
    priority = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    durations = draw(st.lists(st.integers(0, longest), min_size=n, max_size=n))
    return Case(n, edges, lane, priority, durations)
