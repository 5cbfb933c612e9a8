"""`headway.run` and `headway.steps`: with and without a launcher, and when switched off."""

import json
import time

import pytest
import torch

import headway
from headway.runtime.in_rank import bootstrap
from headway.trace.events.trace import Trace
from tests.recorded import recording, rows, run_script
from tests.training import small, train


def trained(loader, r):
    """Train on `loader` with a region of our own; returns the losses."""

    def augmented():
        for x in headway.steps(loader):
            with r.region("augment"):
                x = x + 1
            yield x

    return train(*small(), augmented())


def batches():
    """Yield five batches, slowly."""
    for _ in range(5):
        time.sleep(0.002)
        yield torch.ones(2, 4)


def test_a_block_without_a_launcher_becomes_a_finalised_run_folder(tmp_path):
    with headway.run(enabled=False) as r:
        plain = trained(batches(), r)
    with headway.run(tmp_path / "run") as r:
        path = r.path
        recorded = trained(batches(), r)
    (events,) = (tmp_path / "run" / "events").glob("*.parquet")
    trace = Trace.open(events)
    meta = json.loads((tmp_path / "run" / "run.json").read_text())

    assert recorded == plain
    assert path == str(tmp_path / "run")
    assert trace.named("optimizer.step").sum() == 5
    assert trace.named("region").sum() == 5
    assert trace.events["duration_ns"][trace.named("input.next")].sum() >= 5 * 2_000_000
    assert meta["schema"] == "headway.run-folder/1"
    assert meta["exit"]["class"] == "ok"
    assert not list((tmp_path / "run" / "rings").glob("*.ring"))
    assert bootstrap.active() is None


def test_inside_a_recording_the_block_joins_it(tmp_path):
    with recording(tmp_path) as session, headway.run("/never/made") as r:
        trained(batches(), r)
        assert r.path == str(tmp_path)
        assert bootstrap.active() is session
    found = rows(tmp_path)

    assert len(found["region"]) == 5
    assert [row["b"] for row in found["input.next"]] == [0, 1, 2, 3, 4, -1]


def test_a_torch_loader_is_not_recorded_twice(tmp_path):
    loader = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)
    with recording(tmp_path), headway.run() as r:
        trained(loader, r)

    assert [row["b"] for row in rows(tmp_path)["input.next"]] == [0, 1, 2, -1]


def test_switched_off_it_only_yields(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY", "off")
    with headway.run(tmp_path / "run") as r:
        assert r.path == ""
        assert list(headway.steps([1, 2])) == [1, 2]

    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_script_that_starts_it_after_importing_torch_covers_spawned_workers(tmp_path):
    run_script(
        """
        import torch, headway

        def main():
            data = torch.utils.data.TensorDataset(torch.ones(8, 2))
            with headway.run("own"):
                loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn")
                print(len(list(headway.steps(loader))))

        if __name__ == "__main__":
            main()
        """,
        tmp_path,
        recorded=False,
        PYTHONPATH=str(headway.__path__[0]).rsplit("/", 1)[0],
    )
    (events,) = (tmp_path / "own" / "events").glob("*.parquet")
    trace = Trace.open(events)

    assert trace.named("input.load").sum() == 4
    assert "loader/0" in trace.lanes
