"""What grows while a run goes on is a cause: steps that get slower, memory that fills, streams that repeat examples."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from headway.ledger.growth import BLOCKS, rising
from headway.trace.recording.host_series import HostSeries
from tests.paths import ROOT
from tests.runs_made import MS, RunMaker

GIB = 1 << 30


def named(ledger: Ledger) -> dict[str, str]:
    return {cause.cause: cause.evidence for cause in find_causes(ledger)}


@pytest.mark.parametrize("cost", ["script_ns", "compute_ns", "prep_ns"])
def test_steps_that_get_slower_are_named_with_what_grew(cost):
    usual = {"ranks": 1, "steps": 160, "compute_ns": 5 * MS, "prep_ns": MS, "script_ns": MS}
    grows = Ledger.of(RunMaker(**{**usual, cost: lambda rank, step: (5 + step // 10) * MS}).make())
    where = {"script_ns": "script's own code", "compute_ns": "forward, backward", "prep_ns": "input"}[cost]

    assert where in named(grows)["steps.grow"]
    fixes = {cause.cause: cause.fix for cause in find_causes(grows)}
    assert fixes.get("host.script", "").startswith(fixes["steps.grow"]) == (cost == "script_ns"), "as its cause has it"


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), min_size=80, max_size=80))
def test_steps_that_wobble_do_not_grow(cost):
    made = RunMaker(ranks=1, steps=80, compute_ns=lambda rank, step: (20 + cost[step] % 9) * MS).make()

    assert "steps.grow" not in named(Ledger.of(made))


@given(st.lists(st.floats(1, 100), min_size=BLOCKS, max_size=200))
def test_what_rises_does_not_rise_backwards(values):
    assert rising(values) is None or rising(values[::-1]) is None


@pytest.mark.parametrize(
    ("rank", "worker", "who"), [(1, 0, "training process"), (0, 1, "loader workers"), (0, 0, None)]
)
def test_memory_that_fills_is_named_with_who_holds_it_and_when_it_is_full(rank, worker, who):
    ledger = Ledger.of(RunMaker(ranks=1, steps=100).make())
    at = np.arange(1, 41)
    moments = tuple((at * sum(ledger.step_wall_ns) / 40e9).tolist())
    series = HostSeries(
        end_s=moments, own_cores=(1.0,) * 40, other_cores=(0.0,) * 40, memory_bytes=(GIB,) * 40,
        rank_bytes=tuple((GIB + rank * (at << 26)).tolist()), worker_bytes=tuple((GIB + worker * (at << 26)).tolist()),
    )  # fmt: skip
    facts = structs.replace(ledger.facts, host_series=series, memory_available_bytes=64 * GIB)
    found = named(replace(ledger, facts=facts))

    assert ("memory.grow" in found) == (who is not None)
    if who is not None:
        assert who in found["memory.grow"]
        assert "full after about" in found["memory.grow"]
    late = structs.replace(series, end_s=tuple((at * sum(ledger.step_wall_ns) / 10e9).tolist()))  # most was start-up
    assert "memory.grow" not in named(replace(ledger, facts=structs.replace(facts, host_series=late)))
    anew = Ledger.of(RunMaker(ranks=1, steps=100, epoch_steps=20, num_workers=1).make())
    anew = replace(anew, facts=structs.replace(anew.facts, host_series=series))
    assert ("memory.grow" in named(anew)) == bool(rank), "workers that start anew in each pass keep nothing"


STREAM = """
import sys, torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        shares = (info.id, info.num_workers) if sys.argv[1] == "shares" else (0, 1)
        yield from (torch.tensor(0.0 if sys.argv[1] == "constant" else i) for i in range(shares[0], 64, shares[1]))
weight = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([weight], 1e-6)
for batch in DataLoader(Stream(), 4, num_workers=2):
    (weight * batch).sum().backward(); optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "repeats"), [("whole", True), ("shares", False), ("constant", False)])
def test_a_stream_that_each_worker_yields_whole_is_named(tmp_path, kind, repeats):
    (tmp_path / "stream.py").write_text(STREAM)
    run = [sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", "run", "--", "stream.py", kind]
    subprocess.run(run, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, check=True, timeout=300)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())

    assert facts["loaders"]["0"]["repeats"] is repeats
