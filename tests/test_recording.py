"""The run folder: claimed once, described from the first moment, whole or not written."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.runtime.run_folder.recording import (
    RUNS,
    SCHEMA,
    Exit,
    LaunchedRank,
    RunRecording,
    claim_folder,
    next_folder,
    write_json,
)
from headway.trace.recording import runs

KEYS = {
    "memory", "memory_total_bytes", "memory_available_bytes",
    "schema", "run_id", "headway_version", "attempt", "host", "group_rank", "script", "env", "start_ns", "end_ns",
    "realtime_ns", "nproc", "world_size", "device_type", "cores", "host_load", "host_series",
    "device_series",
    "bad_losses", "threads", "compute", "ranks", "exit", "baseline", "plan",
    "applied", "loaders", "bytes_per_step", "dropped", "max_run_bytes",
}  # fmt: skip


@given(names=st.lists(st.sampled_from(["train.py", "a b.py", "x/y.py", "-", "über.py"]), max_size=6))
def test_folders_are_numbered_per_script_and_never_shared(names, tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    made = [next_folder(base, name) for name in names]

    assert len(set(made)) == len(made)
    assert all(path.is_dir() and path.parent == base for path in made)


def test_a_folder_for_runs_is_no_part_of_the_repository_around_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    next_folder(RUNS, "train.py")
    assert (RUNS / ".gitignore").read_text() == "*\n"


def test_run_json_has_every_key_from_the_first_moment_to_the_last(tmp_path):
    recording = RunRecording(tmp_path, ["train.py", "--api-key=abc"], 5)
    recording.open()
    first = json.loads((tmp_path / "run.json").read_text())
    recording.rows = [LaunchedRank(0, 0, 7, 10, 20, 0)]
    recording.end(Exit(0, "ok"))
    last = json.loads((tmp_path / "run.json").read_text())

    assert set(first) == set(last) == KEYS
    assert (first["end_ns"], first["exit"]) == (None, None)
    assert last["exit"]["class"] == "ok"
    assert last["end_ns"] > last["start_ns"]
    assert first["run_id"] == last["run_id"]
    assert last["script"] == ["train.py", "--api-key=<redacted>"]
    assert SCHEMA == runs.SCHEMA


def test_every_key_and_file_is_documented():
    page = (Path(__file__).resolve().parent.parent / "docs" / "run-folder.md").read_text()

    assert [key for key in sorted(KEYS) if f"`{key}`" not in page] == []
    for part in ("rings/", "events/", "windows/", "logs/", "loaders/", "tables/", "applied/", "ranks/", "plan.json"):
        assert part in page


def test_a_later_attempt_goes_on_with_the_run_that_attempt_0_began(tmp_path):
    before = RunRecording(tmp_path, ["train.py"], 5)
    before.open()
    after = RunRecording(tmp_path, ["train.py"], 99, attempt=1)
    after.open()

    assert (after.run_id, after.start_ns) == (before.run_id, 5)
    with pytest.raises(InputError, match="holds a run already"):
        RunRecording(tmp_path, ["train.py"], 99).open()


def test_a_plan_is_copied_and_an_event_file_that_cannot_be_written_is_a_problem_not_a_failure(tmp_path, monkeypatch):
    plan = tmp_path / "p.json"
    plan.write_text("{}")
    recording = RunRecording(tmp_path / "run", ["train.py"], 5, plan=plan)
    recording.open()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.runtime.run_folder.finalise.finalise_attempt", full)
    recording.close_attempt([])()

    assert (tmp_path / "run" / "plan.json").read_text() == "{}"
    assert "No space left" in recording.problems.lines()[0]


def test_folders_that_cannot_be_claimed_say_why(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        claim_folder(tmp_path / "file")
    with pytest.raises(InputError, match="is not empty"):
        claim_folder(tmp_path)
    assert claim_folder(tmp_path, shared=True) == tmp_path
    assert claim_folder(tmp_path / "a" / "b").is_dir()


def test_json_is_written_whole(tmp_path):
    write_json(tmp_path / "x.json", {"a": "ü"})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})

    assert json.loads((tmp_path / "x.json").read_text()) == {"a": "ü"}
    assert [name for name in os.listdir(tmp_path) if "json" in name] == ["x.json"]
