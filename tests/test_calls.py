"""Saves behind the training by way of DCP's calls: what they leave in the record of a run."""

import threading

import pytest
import torch

import headway
from headway.checkpoint.torch_dcp import calls
from headway.core.errors import InputError
from headway.trace.recording.runs import Run


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The record of a run of six steps: saves after the second and the fourth, of which the last is not written."""
    folder = tmp_path_factory.mktemp("calls")
    (folder / "file").write_text("")
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    futures = []
    with headway.run(folder / "run"):
        for step in range(1, 7):
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            if step in (2, 4):
                place = folder / ("file/step-4" if step == 4 else "step-2")
                futures.append(calls.async_save({"model": model.state_dict()}, checkpoint_id=place))
                futures[-1].exception()
    return Run.open(folder / "run").parts.whole()


def test_the_training_thread_is_booked_the_copy_alone(rows):
    copies = rows.where(rows.named("checkpoint.snapshot"))

    assert copies.events["bytes"].tolist() == [100 * 101 * 4] * 2
    assert {rows.lanes[lane] for lane in copies.events["lane"]} == {"main"}
    assert not (rows.named("checkpoint.save") & (rows.events["lane"] == rows.lanes.index("main"))).any()


def test_only_what_was_written_counts_as_committed_and_on_no_training_thread(rows):
    copies, commits = (rows.where(rows.named(f"checkpoint.{name}")) for name in ("snapshot", "commit"))

    assert commits.events["seq"].tolist() == copies.events["seq"][:1].tolist()
    assert "main" not in {rows.lanes[lane] for lane in commits.events["lane"]}
    assert (commits.events["start_ns"] >= copies.events["start_ns"][0]).all()


def test_a_group_without_a_cpu_backend_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(calls.dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(calls.dist, "get_backend", lambda group: "nccl")
    before = threading.active_count()

    with pytest.raises(InputError, match=r"a group of nccl cannot save.*Leave process_group out"):
        calls.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", process_group=object())
    assert threading.active_count() == before
