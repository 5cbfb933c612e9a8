"""Finalising: one file per rank and attempt, rings removed, facts gathered, no quadratic work."""

import json
import time

import numpy as np
import pytest

from headway.runtime.run_folder.finalise import doings, finalise, finalise_attempt
from headway.trace.events import parquet
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.records import RECORD_DTYPE, pack, stems
from tests.rings_made import Process


def test_finalising_writes_one_file_per_rank_and_attempt_and_removes_the_rings(tmp_path):
    for attempt in (0, 1):
        for rank in (0, 1):
            Process(tmp_path, rank=rank, attempt=attempt).train(2)
    expected = {f"a{a}-r{r}.parquet" for a in (0, 1) for r in (0, 1)}

    assert {path.name for path in finalise(tmp_path)} == expected
    assert list((tmp_path / "rings").iterdir()) == []
    assert parquet.read(tmp_path / "events" / "a1-r1.parquet").events["rank"].tolist()[0] == 1
    assert finalise(tmp_path) == []


def test_one_rank_under_another_launcher_leaves_its_peers_rings_alone(tmp_path):
    for rank in (0, 1):
        Process(tmp_path, rank=rank).train(1)

    assert [path.name for path in finalise_attempt(tmp_path, 0, rings=tmp_path / "rings", ranks={1})] == [
        "a0-r1.parquet"
    ]
    assert len(stems(tmp_path / "rings")) == 1


def test_the_facts_of_a_run_come_from_what_the_ranks_wrote(tmp_path):
    Process(tmp_path).train(10)
    finalise(tmp_path)
    for part, content in (
        ("loaders", {"0": {"num_workers": 2}}),
        ("applied", {"rank": 0, "remedies": [{"name": "host.gc"}]}),
    ):
        (tmp_path / part).mkdir()
        (tmp_path / part / "r0.json").write_text(json.dumps(content))
    found = doings(tmp_path)

    assert found.loaders == {"0": {"num_workers": 2}}
    assert found.applied == [{"name": "host.gc"}]
    assert found.bytes_per_step == round((tmp_path / "events/a0-r0.parquet").stat().st_size / 10, 1)


@pytest.mark.slow
def test_the_work_of_finalising_grows_with_the_records_not_with_their_square(tmp_path):
    spent = []
    for n in (50_000, 200_000):
        run = tmp_path / str(n)
        records = np.zeros(n, RECORD_DTYPE)
        records["number"] = np.arange(1, n + 1)
        records["start_ns"] = np.arange(n) * 1000 + 10**12
        records["duration_ns"] = 900
        records["code"] = np.tile([SPANS["input.next"].code, SPANS["optimizer.step"].code], n // 2)
        Process(run)
        stem = stems(run / "rings")[0]
        stem.with_name(stem.name + ".00000.sealed").write_bytes(pack(records))
        before = time.process_time()
        finalise(run)
        spent.append(time.process_time() - before)

        assert len(parquet.read(run / "events" / "a0-r0.parquet")) == n + n // 2 + 1
    assert spent[1] < 10 * max(spent[0], 0.05)
