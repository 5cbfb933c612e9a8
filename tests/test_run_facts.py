"""Typed run.json: newer, older and partial ones are read, and a value of another type is one clear error."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import FormatError
from headway.trace.recording.run_facts import RankRow, RunExit, RunFacts
from headway.trace.recording.runs import Run
from tests.paths import GOLDEN
from tests.runs_made import RunMaker, write_folder


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("world_size", "two", r"world_size = 'two': Expected `int"),
        ("cores", 2.5, r"cores = 2.5: Expected `int"),
        ("exit", [137], r"exit = \[137\]: Expected `object"),
        ("ranks", [{"rank": 0}, {"rank": "1"}], r"ranks = \[.*\$\.ranks\[1\]\.rank"),
        ("ranks", [{}], r"ranks = \[\{\}\]: Object missing required field `rank`"),
        ("bad_losses", {"zero": []}, r"bad_losses = \{'zero': \[\]\}"),
        ("env", {"A": ["b" * 500]}, r"env = .{1,90}\.\.\.: Expected `str"),
    ],
)
def test_a_value_of_another_type_is_one_error_that_names_file_key_value_and_rule(tmp_path, key, value, rule):
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "runs" / "before", run)
    meta = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**meta, key: value}))

    with pytest.raises(FormatError, match=rf"run\.json has {rule}.*Copy the run folder again"):
        Run.open(run)


@pytest.mark.parametrize(
    ("key", "value"), [("loaders", 3), ("applied", {"name": "host.gc"}), ("host_load", "none"), ("host_series", [1])]
)
def test_what_only_advice_rests_on_costs_no_run_when_it_is_damaged(tmp_path: Path, key: str, value: Any) -> None:
    made = RunMaker(ranks=1, steps=3).make()
    made.meta[key] = value
    write_folder(made, tmp_path)

    facts = Run.open(tmp_path).facts

    assert getattr(facts, key) in ({}, (), None)
    assert facts.world_size == 1


def test_keys_of_a_newer_version_are_ignored_and_those_that_an_older_one_lacks_have_defaults() -> None:
    facts = RunFacts.of({"schema": "headway.run-folder/1", "from_the_future": [1], "ranks": [{"rank": 3, "more": 1}]})

    assert facts == RunFacts(schema="headway.run-folder/1", ranks=(RankRow(rank=3),))
    assert (facts.world_size, facts.device_type, facts.launched, facts.exit) == (1, "cpu", True, None)


def test_a_launcher_that_was_killed_leaves_facts_that_are_not_known_yet(tmp_path: Path) -> None:
    made = RunMaker(ranks=2, steps=3).make()
    unknown = dict.fromkeys(
        ("end_ns", "exit", "baseline", "plan", "host_load", "host_series", "bytes_per_step", "cores")
    )
    made.meta.update(unknown | {"ranks": [], "loaders": {}, "memory": {}})
    write_folder(made, tmp_path)

    facts = Run.open(tmp_path).facts

    assert (facts.end_ns, facts.exit, facts.cores, facts.ranks) == (None, None, None, ())
    assert facts.start_ns == made.meta["start_ns"]


def test_facts_of_a_trace_of_somebody_else_are_read_as_far_as_they_fit() -> None:
    facts = RunFacts.of({"source": "kineto", "world_size": "8", "device_type": "NVIDIA H100", "memory": 3})

    assert facts == RunFacts(device_type="NVIDIA H100")
    assert not facts.is_recorded
    assert RunFacts.of(facts) is facts
    assert RunFacts.of({"exit": {"code": 9, "class": "infra"}}).exit == RunExit(code=9, cls="infra")
