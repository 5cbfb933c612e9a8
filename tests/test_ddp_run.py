"""What-ifs of a recorded two-rank run that its deep windows answer, from the run folder to the command and the plan."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from headway.comm.advise import propose
from headway.core.errors import InputError
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.runtime.recorder.ddp_facts import facts_of, order_of
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.ddp.ddp_window import models_of, windows_of
from headway.sim.recorded.program import Program
from headway.trace.recording.runs import Run
from headway.trace.rings.rank_tables import DdpModel
from headway.verbs.runs.plan import whatif
from tests.ddp_made import Job, changed, play, unoverlapped_s
from tests.runs_made import MS, RunMaker
from tests.spawn import on_ranks

GOLDEN = Path(__file__).parent / "golden" / "runs" / "ddp-conv"
"""A small convolutional network on two gloo ranks behind a token bucket of 1 Gbit/s, default buckets; one window."""


@pytest.fixture(scope="module")
def program() -> Program:
    return Program.from_run(Run.open(GOLDEN))


def with_windows(job: Job, **changes: Any) -> Program:
    """Return the program of a made run whose deep windows are those of `job`."""
    made = RunMaker(**{"ranks": 2, "steps": 60, "cores": 8, "comm_ns": 5 * MS, **changes}).make()
    deep = DdpReplay.from_windows([play(job).window], models=[DdpModel(**job.model())], cores=8)
    return replace(Program.from_trace(made.trace, made.meta), deep=[deep])


# The recorded run


def test_a_recorded_window_replays_within_five_percent(program: Program) -> None:
    deep = program.windows()

    assert deep.fidelity == pytest.approx(1.0, abs=0.05)
    assert not deep.busy
    assert deep.links[0].bytes_per_s == pytest.approx(1e9 / 8 / 2, rel=0.05)  # Both ranks send every byte once.
    assert deep.step_s < unoverlapped_s(deep)


def test_its_window_holds_whole_steps_of_both_ranks_and_its_model_is_known() -> None:
    run = Run.open(GOLDEN)
    (window,) = windows_of(run)
    (model,) = models_of(run)

    assert window.num_steps == 3
    assert sorted(set(window.trace.events["rank"].tolist())) == [0, 1]
    assert sorted(model.order) == list(range(len(model.parameter_bytes)))


def test_the_command_answers_from_the_windows(capsys: pytest.CaptureFixture[str]) -> None:
    edits = ["bucket_mb=25", "bandwidth=0.25x", "op:layer.5=2x"]
    code = whatif(GOLDEN, set_=edits, json=True)
    answer = json.loads(capsys.readouterr().out)

    assert code == 0
    assert answer["edits"] == edits
    assert 3 < answer["step_s"] / answer["base_step_s"] < 4.5
    assert answer["interval"][0] < answer["speedup"] < answer["interval"][1]
    assert "Replayed from 1 deep window:" in answer["note"]


def test_one_bucket_for_everything_hides_nothing(program: Program) -> None:
    assert program.predict(["bucket_mb=default"]).speedup == pytest.approx(1.0, abs=0.02)
    assert program.predict(["bucket_mb=25"]).speedup < 0.95


def test_operations_that_only_windows_show_are_reached(program: Program) -> None:
    assert program.predict(["op:ConvolutionBackward0=2x"]).speedup < 0.98
    with pytest.raises(InputError, match=r"no recorded operation matches 'Attention'"):
        program.predict(["op:Attention=2x"])


def test_a_damaged_window_is_left_out_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN, folder)
    (folder / "windows" / "r1-w3.json.gz").write_bytes(b"\x1f\x8b damaged")

    with pytest.raises(InputError, match=r"bucket_mb=5 is not predictable.*no profiler sample of the run covers"):
        Program.from_run(Run.open(folder)).predict(["bucket_mb=5"])


# Together with what the always-on records answer


def test_a_bucket_size_and_input_add_their_seconds() -> None:
    job = Job()
    program = with_windows(job)
    both = program.predict(["bucket_mb=25", "input=instant"])
    one, other = program.predict(["bucket_mb=25"]), program.predict(["input=instant"])

    assert both.step_s == pytest.approx(one.step_s + other.step_s - one.base_step_s, rel=1e-6)
    assert both.interval[0] <= both.speedup <= both.interval[1]


def test_windows_answer_a_link_and_without_them_the_exposed_part_does() -> None:
    job = Job(bytes_per_s=5e7)
    program = with_windows(job)
    bare = replace(program, deep=[])
    faster = play(changed(job, bytes_per_s=1e8)).step_s / play(job).step_s

    assert program.predict(["bandwidth=2x"]).step_s / program.measured_s == pytest.approx(faster, rel=0.05)
    note = bare.predict(["bandwidth=2x"]).note
    assert "Only exposed communication is recorded" in note
    assert "a bare trace has no deep windows" in note


# The plan


def advice(program: Program) -> dict[str, Proposal | Refusal]:
    return {
        row.name: row for row in propose(None, program, Setup.from_facts(structs.replace(program.facts, world_size=2)))
    }


def test_the_best_bucket_size_is_proposed_with_its_gain() -> None:
    """Recorded with one bucket for everything on a slow link: smaller ones overlap backward."""
    job = Job(limit=(100 << 20, 100 << 20), bytes_per_s=1.5e8)
    row = advice(with_windows(job))["comm.bucket"]
    size = row.parameters["bucket_mb"]
    gain = play(job).step_s / play(changed(job, limit=(size << 20, size << 20))).step_s

    assert row.edits == (f"bucket_mb={size}",)
    assert row.applies
    assert row.predicted_speedup == pytest.approx(gain, rel=0.05)
    assert row.interval[0] < row.predicted_speedup < row.interval[1]


def test_a_size_that_wins_nothing_is_not_proposed(program: Program) -> None:
    rows = advice(program)

    assert isinstance(rows["comm.bucket"], Refusal)
    assert "is predicted best" in rows["comm.bucket"].reason
    assert isinstance(rows["comm.links"], Proposal)
    assert "deep window" in rows["comm.links"].reason


def test_on_busy_cores_the_size_is_left_to_a_live_try() -> None:
    row = advice(with_windows(Job(rate_of=(1.0, 0.3, 2.5), steps=6)))["comm.bucket"]

    assert (row.predicted_speedup, row.clear, row.edits) == (1.0, False, ())
    assert "not predictable here" in row.reason
    assert "Try it live" in row.reason


def noted() -> dict[str, Any]:
    """Train a wrapped network for three steps and return what a window would note of it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))), bucket_cap_mb=0.02
    )
    for _ in range(3):
        model(torch.randn(2, 64)).sum().backward()
    return facts_of(model)


def test_ddp_itself_tells_sizes_order_and_limits() -> None:
    """Three layers of 16 KiB and 256 B: the last one is ready first, its bias before its weight."""
    facts = on_ranks(noted, 2)[1]

    assert facts["parameter_bytes"] == [16384, 256] * 3
    assert facts["order"] == [5, 4, 3, 2, 1, 0]
    assert (facts["first_bucket_bytes"], facts["bucket_bytes"], facts["default"]) == (20971, 20971, False)


def test_the_order_of_readiness_is_that_of_rebuilt_buckets() -> None:
    assert order_of({"rebuilt_per_bucket_param_indices": "3 2, 0, 1"}) == [3, 2, 0, 1]
