"""What `headway why` and the page say of a job of many ranks: machines, MFU, groups, hangs."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticFault, SyntheticJob, generate
from headway.core.errors import InputError, UnknownNameError
from headway.core.mesh import Mesh
from headway.cost.transformer import flops_per_token
from headway.ledger.hang import localise
from headway.ledger.machines import Creation, creation, machine_times
from headway.report.page.html import ReportData, page
from headway.report.page.ranks import (
    hang_part,
    machine_heat_maps,
    machine_lines,
    machines_part,
    render_hang,
    rows_of_grid,
    sentences,
)
from headway.report.terminal import job_lines, mfu_lines
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunFacts
from headway.verbs.jobs.fault import mesh_of
from headway.verbs.runs.why import heat_maps_of, why_object
from headway.why.answer import MachinesRow, Why
from headway.why.explanation import explain
from headway.why.model_flops import ModelSpec, mfu_entry
from tests.hung_jobs import HungJob, hung_reports
from tests.launching import headway_here
from tests.paths import GOLDEN, ROOT
from tests.refusals import refused

GPT = "layers=96,hidden=12288,heads=96,sequence=2048,vocabulary=64000"
BEFORE = GOLDEN / "runs" / "before"


def entry_of(spec: str, steps_per_s: float = 1 / 8.57, ranks: int = 12288, **facts: Any) -> dict[str, Any]:
    return mfu_entry(ModelSpec.parse(spec), steps_per_s=steps_per_s, facts=RunFacts.of(facts), ranks=ranks)


def hung(mesh: Mesh, stops: dict[int, int]) -> dict[str, Any]:
    job = HungJob(mesh, 2, stops)
    return localise(hung_reports(job), mesh).to_json()


# ---- MFU ---------------------------------------------------------------------------------------------------------


def test_a_published_row_comes_out_of_the_option_and_the_rate_of_steps():
    found = entry_of(f"{GPT},batch=6144,dtype=bf16,recompute=full", device_type="NVIDIA A100-SXM4-80GB")

    assert 100 * found["mfu"] == pytest.approx(41.2, abs=0.3)
    recomputed = 1 + (1 - 6 * 64000 * 12288 / found["flops_per_token"]) / 3  # Every layer, not the output layer.
    assert found["hfu"] == pytest.approx(recomputed * found["mfu"])
    assert mfu_lines(Why.of({"mfu": found}))[0].startswith(
        "MFU 41.3 %, HFU 55.0 % with full recomputation: 129 TFLOP/s of 312"
    )


@given(st.floats(0.01, 100.0), st.integers(1, 512))
def test_mfu_is_tokens_times_flops_over_peak(steps_per_s, ranks):
    found = entry_of(f"{GPT},batch=8,peak=1e15", steps_per_s, ranks)

    expected = 8 * 2048 * steps_per_s * flops_per_token(ModelSpec.parse(GPT).model) / ranks / 1e15
    assert found["mfu"] == pytest.approx(expected)


def test_the_batch_comes_from_the_one_loader_of_the_run():
    assert entry_of(GPT, 2.0, 4, loaders={"0": {"batch_size": 16}})["tokens_per_s"] == 2 * 4 * 16 * 2048
    for loaders in ({}, {"0": {"batch_size": 16}, "1": {"batch_size": 8}}):
        with pytest.raises(InputError, match="Add batch=N to --model"):
            entry_of(GPT, 2.0, 4, loaders=loaders)


@pytest.mark.parametrize(
    ("spec", "reason"), [("batch=8", "the precision is not said"), ("batch=8,dtype=bf16", "cpu has no listed peak")]
)
def test_without_a_peak_there_is_no_mfu_but_a_rate_and_the_reason(spec, reason):
    found = entry_of(f"{GPT},{spec}", device_type="cpu")

    assert (found["mfu"], found["hfu"]) == (None, None)
    assert reason in found["reason"]
    assert "MFU is not known" in mfu_lines(Why.of({"mfu": found}))[0]


test_a_model_that_cannot_be_is_refused = refused(
    ("layer=4", r"unknown key of --model 'layer'. Did you mean 'layers'"),
    ("layers=4", r"says no hidden; give layers, hidden, heads, sequence, vocabulary"),
    ("layers", r"holds 'layers'; write each key once"),
    (f"{GPT},layers=2", r"holds 'layers=2'; write each key once"),
    (f"{GPT},batch=0", r"batch=0; give a whole number above 0"),
    (f"{GPT},batch=1.5", r"batch=1.5; give a whole number"),
    (f"{GPT},gated=perhaps", r"unknown value of gated 'perhaps'"),
    (f"{GPT},recompute=som", r"unknown recompute 'som'"),
    (f"{GPT},heads=7".replace("heads=96,", ""), r"Make hidden a multiple of heads"),
    by=ModelSpec.parse,
)


def test_a_device_nobody_knows_is_refused():
    with pytest.raises(UnknownNameError, match="unknown device 'A1000'"):
        entry_of(f"{GPT},batch=8,dtype=bf16,device=A1000")


def test_why_shows_mfu_of_a_recorded_run():
    shape = "layers=2,hidden=64,heads=4,sequence=128,vocabulary=1000,batch=8,peak=1e12"

    answer = headway_here("why", BEFORE, "--model", shape, "--json")

    assert answer.returncode == 0, answer.stderr
    assert 0 < json.loads(answer.stdout)["mfu"]["mfu"] < 1
    wrong = headway_here("why", BEFORE, "--model", "layers=two")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1


# ---- process groups ----------------------------------------------------------------------------------------------


def test_creation_counts_calls_of_the_busiest_rank_and_groups_of_all():
    rows = {"rank": [0, 0, 0, 1], "duration_ns": [10**9, 5, 5, 2 * 10**9], "group": [0, 1, -1, 0], "name": [0] * 4}

    found = creation(Trace.from_columns(rows, names=["comm.init"]))

    assert found == Creation(groups=2, calls=3, seconds=2.0)
    assert creation(Trace.from_columns({"rank": [0]}, names=[])) is None
    assert job_lines(Why.of({"group_creation": {"groups": 1, "calls": 1, "seconds": 0.2}})) == []


@pytest.mark.slow
def test_store_operations_are_the_closed_form_and_headway_adds_none():
    pytest.importorskip("torch")

    command = [sys.executable, "benchmarks/group_creation.py", "--worlds", "16"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)

    assert answer.returncode == 0, answer.stderr[-2000:] + answer.stdout
    found = json.loads(answer.stdout)
    assert found["added by headway"] == 0
    assert found["operations, in order"] == [217]
    assert found["operations, global barriers"] == [49 * 25]


# ---- machines ----------------------------------------------------------------------------------------------------


def test_a_slow_worker_is_named_and_its_maps_show_it(tmp_path):
    job = SyntheticJob(dp=4, pp=2, num_microbatches=4, num_steps=4)
    generate(job, seed=1, faults=[SyntheticFault("worker", 1.5, dp=2, stage=0)]).trace.save(
        tmp_path / "t.straggler.parquet"
    )
    explanation = explain([tmp_path / "t.straggler.parquet"])

    why = why_object(explanation)
    maps = heat_maps_of(explanation, why)

    assert [row["machine"] for row in why["machines"]["outliers"]] == ["dp 2 pp 0"]
    assert [heat.title.split(" of ")[0] for heat in maps[1:]] == [
        "Mean forward time", "Mean backward time",
    ]  # fmt: skip
    for heat in maps[1:]:
        assert np.unravel_index(heat.values.argmax(), (4, 2)) == (2, 0)
        assert heat.values[2, 0] == pytest.approx(1.5, rel=0.05)
    assert "dp 2 pp 0 computes 1.5" in job_lines(Why.of(why))[0]
    assert "dp 2 pp 0 computes" in page(ReportData("t", why, heat_maps=maps))


def test_where_nobody_stands_out_the_slowest_is_told_and_too_few_machines_say_nothing():
    entry = MachinesRow(slowdown={"a": 1.0, "b": 1.02, "c": 1.0, "d": 1.0}, basis="peers")
    two = MachinesRow(slowdown={"a": 0.7, "b": 1.3}, basis="peers")

    assert machine_lines(entry) == ["none stands out of 4; the slowest is b, 1.02x"]
    assert machine_lines(two) == []
    assert machine_lines(MachinesRow(slowdown={"a": 1.0})) == []
    assert machines_part(two) == machines_part(MachinesRow()) == ""


def test_ranks_without_coordinates_get_one_map_by_machine():
    rows = {"rank": [0, 1, 2], "duration_ns": [10, 11, 30], "name": [0, 0, 1]}
    hosts = {0: {"host": "b"}, 1: {"host": "a"}, 2: {"host": "b"}}
    times = machine_times(Trace.from_columns(rows, names=["segment.forward", "segment.backward"], ranks=hosts))

    (heat,) = machine_heat_maps(times, {})

    assert heat.row_names == ("0 (b)", "2 (b)", "1 (a)")
    assert heat.column_names == ("forward", "backward")
    assert machine_heat_maps(None, {}) == []


# ---- hangs -------------------------------------------------------------------------------------------------------


def test_the_screen_names_the_rank_its_place_and_who_waits():
    screen = render_hang(hung(Mesh({"tp": 2, "dp": 2, "pp": 3}), {7: 2}), source="dumps")

    assert "Rank 7 (tp 1, dp 1, pp 1) is silent; 11 ranks wait for it" in screen
    assert "pp 1  ·· ·X" in screen
    assert "no report" in screen.splitlines()[-1]
    assert max(map(len, screen.splitlines())) <= 88


def test_the_grid_holds_every_rank_once_and_of_a_large_job_the_replicas_that_matter():
    small = hung(Mesh({"tp": 2, "dp": 3, "pp": 2}), {5: 1})
    large = hung(Mesh({"tp": 8, "dp": 160, "pp": 4}), {4_321: 1})

    assert sorted(r for _, groups in rows_of_grid(small) for group in groups for r in group) == list(range(12))
    shown = [group for _, groups in rows_of_grid(large) for group in groups]
    assert [len(groups) for _, groups in rows_of_grid(large)] == [1, 1, 1, 1]
    assert any(4_321 in group for group in shown)


def test_deadlocks_and_ignored_reports_are_told_in_words():
    hang = {
        "mesh": {"dp": 2}, "world_size": 2, "origins": [], "deadlocks": [[0, 1]], "states": ["deadlock"] * 2,
        "ongoing": {"0": "all_reduce 3 of group 1", "1": "all_reduce 8 of group 2"}, "ignored_reports": 2,
    }  # fmt: skip

    assert sentences(hang) == [
        "Ranks 0, 1 wait for each other in a circle: rank 0 is in all_reduce 3 of group 1, "
        "rank 1 is in all_reduce 8 of group 2.",
        "2 reports of another attempt left out.",
    ]


def test_text_of_reports_cannot_steer_the_page():
    hang = hung(Mesh({"tp": 1, "dp": 2, "pp": 1}), {1: 0})
    hang["ongoing"]["0"] = "<script>alert(1)</script>\x1b[2J"

    assert "<script>" not in hang_part(hang)
    assert "\x1b" not in render_hang(hang)
    assert hang_part(None) == ""


def test_why_and_the_page_of_a_run_show_what_its_hang_watch_saw(tmp_path):
    import shutil

    shutil.copytree(BEFORE, tmp_path / "run")
    assert why_object(explain([tmp_path / "run"]))["hang"] is None
    (tmp_path / "run" / "hang").mkdir()
    rows = [{"rank": 0, "op": "comm.wait", "group": 0, "seq": 7}, {"rank": 1, "silent": True}]
    (tmp_path / "run" / "hang" / "0.json").write_text(json.dumps({"groups": {"0": [0, 1]}, "ranks": rows}))

    why = why_object(explain([tmp_path / "run"]))

    assert why["hang"]["origins"][0]["ranks"] == [1]
    assert "Hung: Rank 1 (dp 1) is silent; 1 rank waits for it, in wait 7 of group 0." in job_lines(Why.of(why))
    assert "Where it hangs" in page(ReportData("run", why))


def test_the_verb_prints_one_object_and_refuses_what_is_no_mesh():
    dumps = sorted(GOLDEN.glob("flight_rank_*.json"))

    answer = headway_here("hang", *dumps, "--mesh", "dp=4", "--json")

    found = json.loads(answer.stdout)
    assert found["schema"] == "headway.hang/1"
    assert found["states"] == ["busy", "busy", "silent", "silent"]
    wrong = headway_here("hang", *dumps, "--mesh", "tp:4")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--mesh holds 'tp:4'; write each axis once with its size" in wrong.stderr
    with pytest.raises(InputError, match="axis tp has size 0"):
        mesh_of("tp=0")
