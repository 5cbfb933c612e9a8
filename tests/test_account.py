"""What loader threads and data servers report becomes loads like any other; without a recorder it costs nothing."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from headway.data import DataLoader as OwnLoader
from headway.data.bytes import account
from headway.data.bytes.account import ThreadClocks
from headway.ledger.answers.ledger import Ledger
from headway.sim.recorded.recording import Recording
from headway.trace.recording.assemble import trace_of_rings
from headway.trace.recording.runs import Run
from tests.datasets import Sized
from tests.recorded import recording, rows

MS = 1_000_000
instants = st.tuples(*[st.integers(0, 10**9)] * 3)


@given(instants, instants, st.booleans())
def test_the_three_parts_of_a_threads_time_partition_it(first, more, told):
    before = ThreadClocks(*first[:2], first[2] if told else -1)
    after = ThreadClocks(*(a + b for a, b in zip(first[:2], more[:2], strict=True)), first[2] + more[2])
    spent = before.until(after)

    assert spent.fetch_ns + spent.prep_ns + spent.cpu_wait_ns == more[0]
    assert min(spent.fetch_ns, spent.prep_ns, spent.cpu_wait_ns) >= 0


def test_sleep_is_fetch_and_work_is_prep():
    before = account.clocks()
    time.sleep(0.02)
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    spent = before.until(account.clocks())

    assert spent.fetch_ns >= 20 * MS * 0.9
    assert 20 * MS <= spent.prep_ns <= 25 * MS


class Threaded(_SingleProcessDataLoaderIter):
    """Two threads make each batch, half of it each; every batch sleeps 2 x 4 ms and computes 2 x 2 ms."""

    def _next_data(self):
        index = self._next_index()
        first = account.clocks()
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(self._some, (index[::2], index[1::2])))
        spent = sum((spent for _, spent in parts), account.ThreadTime())
        account.loaded(
            first.wall_ns, account.clocks().wall_ns, batch=self._num_yielded, items=len(index), workers=2,
            fetch_ns=spent.fetch_ns, prep_ns=spent.prep_ns, cpu_wait_ns=spent.cpu_wait_ns, bytes=64,
        )  # fmt: skip
        return torch.tensor([item for found, _ in parts for item in found])

    def _some(self, index):
        before = account.clocks()
        time.sleep(0.004)
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            pass
        return index, before.until(account.clocks())


class Loader(DataLoader):
    def _get_iterator(self):
        return Threaded(self)


class Numbers(Sized):
    size = 32

    def __getitem__(self, index):
        return index


def test_a_batch_that_threads_made_is_the_load_its_call_waited_for(tmp_path):
    with recording(tmp_path):
        for _ in range(2):
            seen = list(Loader(Numbers(), batch_size=4))
        [trace] = trace_of_rings(tmp_path, 0)
    events = trace.events
    lanes = [trace.lanes[lane] for lane in events["lane"]]
    loads = [i for i in range(len(trace)) if trace.name_of(i) == "input.load"]
    calls = [i for i in range(len(trace)) if trace.name_of(i) == "input.next" and events["seq"][i] >= 0]
    made = [i for i in range(len(trace)) if trace.name_of(i) == "input.iter"]

    assert len(seen) == 8
    assert not trace.named("input.made").any()
    assert [events["peer"][i] for i in made] == [2, 2]
    key = sorted((events["corr"][i], events["peer"][i] + 2 * events["seq"][i], events["group"][i]) for i in loads)
    assert key == sorted((events["corr"][i], events["seq"][i], events["group"][i]) for i in calls)
    assert [int(events["peer"][i]) for i in calls] == [0, 1] * 8
    assert {lanes[i] for i in loads} == {"loader/0", "loader/1"}
    for name, least in (("input.fetch", 8 * MS), ("input.prep", 4 * MS)):
        parts = events["duration_ns"][trace.named(name)]
        assert len(parts) == 16
        assert parts.mean() >= 0.7 * least  # both threads' time, though they worked side by side
    assert set(events["depth"][loads].tolist()) == {0}
    children = trace.named("input.fetch") | trace.named("input.cpu_wait") | trace.named("input.prep")
    assert events["duration_ns"][children].sum() == events["duration_ns"][loads].sum()


def test_what_is_left_of_a_batch_whose_waiting_is_not_told_is_waiting(tmp_path):
    with recording(tmp_path):
        account.loaded(100, 1000, batch=0, items=1, fetch_ns=300, prep_ns=200)
    [load], [parts] = rows(tmp_path)["input.made"], rows(tmp_path)["input.parts"]

    assert (load["start_ns"], load["duration_ns"]) == (parts["start_ns"], 900) == (100, 900)
    assert (parts["a"], parts["b"]) == (200, 400)


def test_counts_add_up_and_reach_the_tables(tmp_path):
    with recording(tmp_path) as session:
        for _ in range(3):
            account.counted("cache.decoded", hits=2, misses=1)
        account.counted("order", substituted=5)
        tables = session.probes.tables["input"]

    assert tables == {"cache.decoded": {"hits": 6, "misses": 3}, "order": {"substituted": 5}}
    assert '"hits": 6' in (tmp_path / "tables" / "r0.json").read_text()


def test_counts_that_are_no_numbers_never_reach_the_script(tmp_path, capfd):
    with recording(tmp_path):
        account.counted("cache", hits="many")

    assert "input counts" in capfd.readouterr().err


@pytest.mark.parametrize(
    "call",
    [
        lambda: account.loaded(0, 1, batch=0, items=1, fetch_ns=0, prep_ns=0),
        lambda: account.counted("cache", hits=1),
        lambda: account.delivered(0, 1, 2, 3),
    ],
    ids=["loaded", "counted", "delivered"],
)
def test_without_a_recorder_a_call_costs_less_than_twenty_empty_ones(call):
    def cpu_ns(function):
        begin = time.thread_time_ns()
        for _ in range(2000):
            function()
        return time.thread_time_ns() - begin

    assert not account.on()
    assert min(cpu_ns(call) for _ in range(5)) < 20 * min(cpu_ns(lambda: None) for _ in range(5))


class Work(Sized):
    """Examples that sleep, or sort numbers: what sorts lets go of the interpreter lock, as decoders do."""

    size = 160

    def __init__(self, what):
        self.what, self.numbers = what, np.random.default_rng(0).random(20_000)

    def __getitem__(self, index):
        if self.what == "fetch":
            time.sleep(0.003)
        end = time.thread_time() + (0.003 if self.what == "prep" else 0.0)
        while time.thread_time() < end:
            np.sort(self.numbers)
        return index


def verdict(folder, what, kind):
    """Train on it with two workers of that kind; return which of fetch and prep cost more, and the input's sub-lines.

    Starting processes and handing over costs what a busy host makes of it, and is no part of the verdict.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    with recording(folder):
        for batch in OwnLoader(Work(what), 8, num_workers=2, workers=kind):
            weight.grad = batch.float().mean().reshape(1)
            optimizer.step()
    ledger = Ledger.of(Run.open(folder))
    waits = {sub: ledger.sub_ns.get(f"input.{sub}", 0) for sub in ("fetch", "prep", "cpu_wait", "transfer")}
    # By their sub-lines: against the life of this process, hours perhaps, the whole loss is too small to be a cause.
    return max(("fetch", "prep"), key=waits.__getitem__), waits


@pytest.mark.slow
@pytest.mark.parametrize("what", ["fetch", "prep"])
def test_a_job_loaded_by_threads_gets_the_verdict_of_its_twin_loaded_by_processes(tmp_path, what):
    found = {kind: verdict(tmp_path / kind, what, kind) for kind in ("threads", "processes")}

    assert {most for most, _ in found.values()} == {what}
    for kind in found:
        [batches] = Recording.from_trace(Run.open(tmp_path / kind).trace, max_steps=20).batches
        assert batches.together.tolist() == [kind == "threads"]
    for _, waits in found.values():
        assert waits["fetch"] + waits["prep"] + waits["cpu_wait"] > 0
        own = waits["fetch"] if what == "fetch" else waits["prep"] + waits["cpu_wait"]
        assert own > 0.6 * sum(waits[sub] for sub in ("fetch", "prep", "cpu_wait"))
