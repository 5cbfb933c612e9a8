"""Builds recorded runs whose every nanosecond is known: the truth that the ledger and the replay are held to.

A `RunMaker` plays a small training job step by step (loader, compute, all-reduce, optimizer, saves, logging, garbage
collection) and writes exactly the rows that `headway run` finalises: names of `SPANS`, lanes 'main' and 'loader/<w>',
children of `input.load`, MARK rows for steps and processes. Every cost is nanoseconds, or a function of (rank, step).

    trace, meta, truth = RunMaker(ranks=2, steps=50, fetch_ns=3_000_000, num_workers=2).make()

`truth` maps bucket -> device-seconds; `made.truth_ns` and `made.sub_truth_ns` hold the same as exact integers.

Order inside a step: save, logging, [iterator], next(loader), compute with a collection in its middle, wait for the
gradients, optimizer. The last rank's arrival ends the straggler share of that wait.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.trace.events.trace import COLUMNS, Trace, concat
from headway.trace.events.vocabulary import GC_CALLED, KIND, SPANS
from headway.trace.recording.run_facts import RunFacts

Cost = int | Callable[[int, int], int]
"""Nanoseconds, or a function of (rank, step) that returns them."""

MS = 1_000_000
NAMES = tuple(SPANS)


@dataclass
class Rows:
    """Rows of one rank, as they are appended."""

    rank: int
    rows: list[dict[str, int]] = field(default_factory=list)
    lanes: list[str] = field(default_factory=lambda: ["main"])

    def add(self, name: str, start_ns: int, duration_ns: int, *, lane: str = "main", **columns: int) -> None:
        """Append one row; `columns` are trace columns."""
        if lane not in self.lanes:
            self.lanes.append(lane)
        self.rows.append(
            {
                "rank": self.rank, "name": NAMES.index(name), "kind": KIND[SPANS[name].kind],
                "lane": self.lanes.index(lane), "start_ns": start_ns, "duration_ns": duration_ns, **columns,
            }
        )  # fmt: skip

    def trace(self, **tables: Any) -> Trace:
        """Return the rows as a Trace."""
        columns = {
            column: np.array([row.get(column, blank) for row in self.rows], dtype=dtype)
            for column, (dtype, blank) in COLUMNS.items()
        }
        return Trace.from_columns(columns, names=NAMES, lanes=tuple(self.lanes), **tables)


@dataclass(frozen=True)
class Made:
    """A made run. It unpacks into (trace, meta, truth) and looks like `headway.trace.recording.runs.Run`."""

    trace: Trace
    """Rows of the last attempt, all ranks."""
    meta: dict[str, Any]
    """What run.json would say."""
    truth: dict[str, float]
    """Bucket -> device-seconds."""
    truth_ns: dict[str, int]
    """Bucket -> device-nanoseconds."""
    sub_truth_ns: dict[str, int]
    """Sub-line -> device-nanoseconds."""
    path: Path = Path("made")
    earlier: tuple[Trace, ...] = ()
    """Traces of the attempts before the last."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.trace, self.meta, self.truth))

    @property
    def facts(self) -> RunFacts:
        """What run.json would say, typed."""
        return RunFacts.of(self.meta)

    def attempts(self) -> list[Trace]:
        """Return the traces of all attempts, oldest first."""
        return [*self.earlier, self.trace]

    def windows(self) -> list[Path]:
        """Return the deep windows: a made run has none."""
        return []


@dataclass
class _Rank:
    """State of one rank while the run is played."""

    rows: Rows
    now_ns: int
    worker_free_ns: list[int] = field(default_factory=list)
    loads: list[tuple[int, int, int]] = field(default_factory=list)
    """(seq, start_ns, end_ns) of the loads of the iterator in use."""
    taken_ns: list[int] = field(default_factory=list)
    """When each batch of this iterator was taken by the training thread."""
    corr: int = -1
    step_bounds: list[tuple[int, int]] = field(default_factory=list)
    arrival_ns: int = 0


@dataclass
class RunMaker:
    """A made job. Costs are nanoseconds or functions of (rank, step); 0 means that it does not happen."""

    ranks: int = 2
    steps: int = 100
    compute_ns: Cost = 5 * MS
    """Forward and backward on the training thread."""
    optimizer_ns: Cost = MS // 2
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent: bool = False
    holds_lock: bool = False
    """Whether loads hold the interpreter's lock: a worker hands a batch over only when its next load ends."""
    fetch_ns: Cost = 0
    cpu_wait_ns: Cost = 0
    acts: bool = False
    prep_ns: Cost = 0
    collate_ns: Cost = 0
    transfer_ns: Cost = MS // 10
    """Hand-off inside next() after the batch is loaded."""
    batch_bytes: int = 196_608
    batch_size: int = 64
    epoch_steps: int | None = None
    """Batches per iterator; None = one iterator for the whole run."""
    iter_ns: Cost = 2 * MS
    """iter(loader); with workers their first load starts when it ends."""
    comm_ns: Cost = MS
    """Own time of the gradient all-reduce after the last rank has arrived; no comm rows when ranks == 1."""
    save_ns: Cost = 0
    sync_ns: Cost = 0
    rename_ns: Cost = 0
    logging_ns: Cost = 0
    gc_ns: Cost = 0
    compiled_from: int = 0
    """`FROM_CACHE` where torch's cache held what it compiles."""
    gc_called: bool = False
    """Whether the script calls `gc.collect` for these."""
    script_ns: Cost = 0
    """Code of the script between the update before and the batch."""
    recording_ns: Cost = 0
    """Headway's own work behind the update before."""
    evaluation_ns: Cost = 0
    """An evaluation at the start of the step, half of it forwards."""
    grad_enabled: bool = False
    """Whether these have gradients enabled."""
    compile_ns: Cost = 0
    """torch.compile at work, inside the step (usually step 0)."""
    load_ns: int = 0
    """checkpoint.load before the first step."""
    import_ns: int = 300 * MS
    init_ns: int = 50 * MS
    """comm.init, at start-up."""
    startup_ns: int = 700 * MS
    """Process start to first step, import and init included."""
    launch_ns: int = 200 * MS
    """Launcher start to process start."""
    epilogue_ns: int = 20 * MS
    """End of the last step to the process's end."""
    exit_ns: int = 30 * MS
    """Process end to launcher exit."""
    start_ns: int = 1_000_000_000
    """Launcher start on the monotonic clock."""
    cores: int = 2
    attempt: int = 0
    truth_ns: Counter[str] = field(default_factory=Counter, init=False)
    sub_ns: Counter[str] = field(default_factory=Counter, init=False)

    def make(self) -> Made:
        """Play the job and return its rows, its run.json and the truth."""
        self.truth_ns, self.sub_ns = Counter(), Counter()
        ranks = [self._start_rank(rank) for rank in range(self.ranks)]
        for step in range(self.steps):
            for state in ranks:
                self._to_arrival(state, step)
            last_ns = max(state.arrival_ns for state in ranks)
            for state in ranks:
                self._finish_step(state, step, last_ns)
        for state in ranks:
            state.now_ns += self.epilogue_ns
        end_ns = max(state.now_ns for state in ranks) + self.exit_ns
        for state in ranks:
            self._end_rank(state, end_ns)
        trace = concat([_with_steps(state) for state in ranks])
        trace = replace(
            trace, groups={0: {"name": "default", "ranks": list(range(self.ranks))}}, meta={"source": "made"}
        )
        truth = {bucket: ns / 1e9 for bucket, ns in self.truth_ns.items()}
        return Made(trace, self._meta(ranks, end_ns), truth, dict(self.truth_ns), dict(self.sub_ns))

    def _cost(self, cost: Cost, state: _Rank, step: int) -> int:
        return cost if isinstance(cost, int) else int(cost(state.rows.rank, step))

    def _book(self, sub: str, duration_ns: int) -> None:
        """Add to the truth; the bucket is the sub-line's first word."""
        if duration_ns:
            self.truth_ns[sub.split(".")[0]] += duration_ns
            self.sub_ns[sub] += duration_ns

    def _spend(self, state: _Rank, name: str, cost: Cost, step: int, sub: str, **columns: int) -> int:
        """Run one span of the training thread to its end; returns its duration."""
        duration_ns = self._cost(cost, state, step)
        if duration_ns:
            state.rows.add(name, state.now_ns, duration_ns, **columns)
            self._book(sub, duration_ns)
            state.now_ns += duration_ns
        return duration_ns

    def _start_rank(self, rank: int) -> _Rank:
        state = _Rank(Rows(rank), self.start_ns + self.launch_ns)
        born_ns = state.now_ns
        first = "restart" if self.attempt else "startup"
        self._book(f"{first}.launch", self.launch_ns)
        state.rows.add("process", born_ns, 0)
        self._spend(state, "host.import", self.import_ns, -1, f"{first}.import")
        if self.ranks > 1:
            self._spend(state, "comm.init", self.init_ns, -1, f"{first}.init", group=0)
        self._spend(state, "checkpoint.load", self.load_ns, -1, f"{first}.load")
        rest_ns = max(0, born_ns + self.startup_ns - state.now_ns)
        self._book(f"{first}.script", rest_ns)
        state.now_ns += rest_ns
        return state

    def _to_arrival(self, state: _Rank, step: int) -> None:
        """Play one step up to the point where this rank's own gradients are done."""
        state.step_bounds.append((state.now_ns, 0))
        self._spend(state, "host.recording", self.recording_ns, step, "host.recording")
        self._spend(state, "checkpoint.save", self.save_ns, step, "checkpoint.save", bytes=10**6, seq=step)
        self._spend(state, "checkpoint.sync", self.sync_ns, step, "checkpoint.persist")
        self._spend(state, "checkpoint.rename", self.rename_ns, step, "checkpoint.commit")
        self._spend(state, "host.logging", self.logging_ns, step, "host.logging", corr=20)
        self._spend(state, "host.script", self.script_ns, step, "host.script")
        self._evaluate(state, step)
        epoch_steps = self.epoch_steps or self.steps
        if step % epoch_steps == 0:
            self._new_iterator(state, step)
        self._next(state, step, step % epoch_steps)
        self._spend(state, "host.compile", self.compile_ns, step, "startup.compile", corr=self.compiled_from)
        compute_ns = self._cost(self.compute_ns, state, step)
        state.now_ns += compute_ns // 2
        self._spend(state, "host.gc", self.gc_ns, step, "host.gc", corr=2 + GC_CALLED * self.gc_called, seq=100)
        state.now_ns += compute_ns - compute_ns // 2
        self._book("useful.compute", compute_ns)
        state.arrival_ns = state.now_ns

    def _evaluate(self, state: _Rank, step: int) -> None:
        """Run the model on examples that it does not learn from."""
        duration_ns = self._cost(self.evaluation_ns, state, step)
        if duration_ns:
            state.rows.add("eval", state.now_ns, duration_ns, corr=0, seq=2 * self.acts)
            state.now_ns += duration_ns - duration_ns // 2
            of_forward, other = ("eval.rollout",) * 2 if self.acts else ("eval.forward", "eval.other")
            self._book(other, duration_ns - duration_ns // 2)
            self._spend(state, "forward", duration_ns // 2, step, of_forward, corr=0, seq=int(self.grad_enabled))

    def _finish_step(self, state: _Rank, step: int, last_ns: int) -> None:
        """Wait for the last rank, reduce, update."""
        if self.ranks > 1:
            comm_ns = self._cost(self.comm_ns, state, step)
            start_ns, end_ns = state.arrival_ns, last_ns + comm_ns
            state.rows.add("comm.wait", start_ns, end_ns - start_ns, group=0, seq=step, bytes=4 * 10**6)
            self._book("straggler", last_ns - start_ns)
            self._book("comm.exposed", comm_ns)
            state.now_ns = end_ns
        optimizer_ns = self._cost(self.optimizer_ns, state, step)
        state.rows.add("optimizer.step", state.now_ns, optimizer_ns, corr=0, seq=0)
        self._book("useful.optimizer", optimizer_ns)
        state.now_ns += optimizer_ns
        state.step_bounds[-1] = (state.step_bounds[-1][0], state.now_ns)

    def _new_iterator(self, state: _Rank, step: int) -> None:
        state.corr += 1
        iter_ns = self._cost(self.iter_ns, state, step)
        state.rows.add("input.iter", state.now_ns, iter_ns, group=0, corr=state.corr, peer=self.num_workers)
        self._book("input.start", iter_ns)
        state.now_ns += iter_ns
        state.loads, state.taken_ns = [], []
        state.worker_free_ns = [state.now_ns] * self.num_workers

    def _next(self, state: _Rank, step: int, seq: int) -> None:
        if self.num_workers:
            self._next_from_worker(state, step, seq)
        else:
            self._next_inline(state, step, seq)

    def _parts(self, state: _Rank, step: int) -> dict[str, int]:
        return {
            "input.fetch": self._cost(self.fetch_ns, state, step),
            "input.cpu_wait": self._cost(self.cpu_wait_ns, state, step),
            "input.prep": self._cost(self.prep_ns, state, step),
            "input.collate": self._cost(self.collate_ns, state, step),
        }

    def _load(self, state: _Rank, start_ns: int, parts: Mapping[str, int], lane: str, depth: int, seq: int) -> int:
        """Write input.load with its children; returns its end."""
        peer = int(lane.split("/")[1]) if "/" in lane else -1
        keys = {"group": 0, "seq": seq, "peer": peer}
        state.rows.add(
            "input.load", start_ns, sum(parts.values()), lane=lane, depth=depth, bytes=self.batch_bytes, **keys
        )
        now_ns = start_ns
        for name, duration_ns in parts.items():
            if duration_ns:
                state.rows.add(name, now_ns, duration_ns, lane=lane, depth=depth + 1, **keys)
            now_ns += duration_ns
        return now_ns

    def _next_inline(self, state: _Rank, step: int, seq: int) -> None:
        parts, hand_ns = self._parts(state, step), self._cost(self.transfer_ns, state, step)
        start_ns = state.now_ns
        end_ns = self._load(state, start_ns, parts, "main", 1, seq) + hand_ns
        state.rows.add("input.next", start_ns, end_ns - start_ns, group=0, seq=seq, peer=-1, corr=state.corr)
        for name, duration_ns in parts.items():
            self._book("input.prep" if name == "input.collate" else name, duration_ns)
        self._book("input.transfer", hand_ns)
        state.now_ns = end_ns

    def _next_from_worker(self, state: _Rank, step: int, seq: int) -> None:
        self._dispatch(state, step, seq)
        _, load_start_ns, load_end_ns = state.loads[seq]
        start_ns, hand_ns = state.now_ns, self._cost(self.transfer_ns, state, step)
        _, next_start_ns, next_end_ns = (state.loads[seq:] + state.loads[-1:])[: self.num_workers + 1][-1]
        at_once = self.holds_lock and next_start_ns == load_end_ns
        end_ns = max(start_ns, next_end_ns if at_once else load_end_ns) + hand_ns
        worker = seq % self.num_workers
        state.rows.add("input.next", start_ns, end_ns - start_ns, group=0, seq=seq, peer=worker, corr=state.corr)
        state.taken_ns.append(end_ns)
        state.now_ns = end_ns
        self._book("input.transfer", end_ns - max(start_ns, load_end_ns) + max(0, load_start_ns - start_ns))
        loading_ns = max(0, load_end_ns - max(start_ns, load_start_ns))
        self._book_share(loading_ns, self._parts(state, step))

    def _book_share(self, loading_ns: int, parts: Mapping[str, int]) -> None:
        """Book the waited part of a load in proportion to what the load did."""
        total_ns = sum(parts.values())
        if not total_ns or not loading_ns:
            return
        edges = np.cumsum([0, *parts.values()]) * loading_ns // total_ns
        for name, share_ns in zip(parts, np.diff(edges).tolist(), strict=True):
            self._book("input.prep" if name == "input.collate" else name, share_ns)

    def _dispatch(self, state: _Rank, step: int, seq: int) -> None:
        """Let the workers load every batch that torch would have handed out by now."""
        window = self.num_workers * self.prefetch_factor
        epoch_steps = self.epoch_steps or self.steps
        while len(state.loads) < min(seq + window, epoch_steps, self.steps - step + seq):
            batch = len(state.loads)
            worker = batch % self.num_workers
            handed_ns = state.worker_free_ns[worker]
            if batch >= window:
                handed_ns = max(handed_ns, state.taken_ns[batch - window])
            parts = self._parts(state, step - seq + batch)
            end_ns = self._load(state, handed_ns, parts, f"loader/{worker}", 0, batch // self.num_workers)
            state.worker_free_ns[worker] = end_ns
            state.loads.append((batch, handed_ns, end_ns))

    def _end_rank(self, state: _Rank, end_ns: int) -> None:
        born_ns = state.rows.rows[0]["start_ns"]
        state.rows.rows[0]["duration_ns"] = state.now_ns - born_ns
        self._book("idle.teardown", self.epilogue_ns)
        self._book("idle.exit", end_ns - state.now_ns)

    def _meta(self, ranks: Sequence[_Rank], end_ns: int) -> dict[str, Any]:
        """Return what run.json says of this run."""
        return {
            "schema": "headway.run-folder/1",
            "run_id": "made",
            "headway_version": "0.1.0",
            "attempt": self.attempt,
            "host": "made-host",
            "script": ["train.py"],
            "env": {},
            "start_ns": self.start_ns,
            "end_ns": end_ns,
            "realtime_ns": 1_700_000_000_000_000_000,
            "nproc": self.ranks,
            "world_size": self.ranks,
            "device_type": "cpu",
            "cores": self.cores,
            "ranks": [
                {
                    "rank": state.rows.rank, "local_rank": state.rows.rank, "pid": 1000 + state.rows.rank,
                    "start_ns": state.rows.rows[0]["start_ns"], "end_ns": state.now_ns, "exit_code": 0,
                }
                for state in ranks
            ],
            "exit": {"code": 0, "class": "ok", "first_rank": None, "traceback": None},
            "baseline": None,
            "plan": None,
            "applied": [],
            "bytes_per_step": 640,
            "dropped": 0,
            "loaders": {
                "0": {
                    "num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor,
                    "persistent": self.persistent, "pin_memory": False, "batch_size": self.batch_size,
                    "dataset_size": self.batch_size * (self.epoch_steps or self.steps), "sampler": "RandomSampler",
                    "dataset": "MadeDataset", "reason_untunable": None,
                }
            },
        }  # fmt: skip


def _with_steps(state: _Rank) -> Trace:
    """Add the MARK rows of complete steps and fill the step column by time."""
    for step, (start_ns, end_ns) in enumerate(state.step_bounds):
        state.rows.add("step", start_ns, end_ns - start_ns, step=step)
    bounds = np.array(
        [start for start, _ in state.step_bounds] + [state.step_bounds[-1][1]] if state.step_bounds else []
    )
    for row in state.rows.rows:
        name = NAMES[row["name"]]
        if name == "process":
            row["step"] = -1
        elif name != "step":
            row["step"] = int(np.searchsorted(bounds, row["start_ns"], side="right")) - 1
    rank = state.rows.rank
    return state.rows.trace(ranks={rank: {"host": "made-host", "device": "cpu"}})


def cut_short(made: Made, at_ns: int, *, exit_code: int | None = -9) -> Made:
    """Return the run as if every process had died at `at_ns`: later rows are gone.

    With `exit_code` None nobody saw the end (the launcher died too): no process rows, no end in run.json.
    """
    events = made.trace.events
    process = made.trace.named("process")
    ended = events["start_ns"] + events["duration_ns"] <= at_ns
    trace = made.trace.where(ended | process if exit_code is not None else ended & ~process)
    duration_ns = trace.events["duration_ns"].copy()
    process = trace.named("process")
    duration_ns[process] = at_ns - trace.events["start_ns"][process]
    trace = replace(trace, events={**trace.events, "duration_ns": duration_ns})
    seen = exit_code is not None
    ranks = [{**row, "end_ns": at_ns if seen else None, "exit_code": exit_code} for row in made.meta["ranks"]]
    exits = {"code": 137, "class": "infra", "first_rank": 0, "traceback": None} if seen else None
    meta = {**made.meta, "ranks": ranks, "end_ns": at_ns if seen else None, "exit": exits}
    return replace(made, trace=trace, meta=meta)


def joined(first: Made, second: Made) -> Made:
    """Return one run of two attempts; `second` must start when `first` ends (see `RunMaker.start_ns`)."""
    meta = {**second.meta, "start_ns": first.meta["start_ns"], "attempt": 1}
    return replace(second, meta=meta, earlier=(*first.earlier, first.trace))


def write_folder(made: Made, path: Path) -> Path:
    """Write the run as a run folder: run.json and one Parquet file per rank and attempt."""
    import json

    from headway.trace.events import parquet

    (path / "events").mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps(made.meta))
    for attempt, trace in enumerate(made.attempts()):
        for rank in sorted({int(rank) for rank in trace.events["rank"]}):
            parquet.write(trace.select(ranks=[rank]), path / "events" / f"a{attempt}-r{rank}.parquet")
    return path
