"""The verbs on odd input: one clear line for every mistake, and advice that fits the run."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headway.catalog import REMEDIES, causes_of
from headway.core.errors import BarMissedError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.ledger.answers.causes import Fix, find_causes
from headway.ledger.answers.compare import RunComparison
from headway.ledger.answers.ledger import TRY, Ledger
from headway.ledger.cause import Cause
from headway.plan.planner import CUT_OFF_STEPS, GIVEN_UP, IN_FORCE, LeftOut, Plan
from headway.plan.proposal import Gain, Proposal, Refusal
from headway.report.page.timeline import timeline
from headway.report.screens import render_compare, render_plan
from headway.runtime.launching.run_of_ranks import ExitReport
from headway.sim.whatif import EDITS
from headway.trace.events.loader_facts import AppliedRow
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.recording.run_facts import RunExit, RunFacts
from headway.verbs.runs.compare import unfinished
from headway.verbs.runs.plan import plan as plan_verb
from headway.verbs.runs.report import heat_maps, known_steps, step_durations, timelines, window_of
from headway.verbs.runs.run import tell
from headway.verbs.runs.why import applied_rows, next_command
from headway.verbs.runs.why import why as why_verb
from headway.verbs.shared.run_options import newest_run
from headway.why.explanation import explain
from headway.why.fixes import OF_REMEDY, chosen_terms, fixes_of, refuted
from headway.why.verdict import verdict
from tests.launching import headway_here, refusal
from tests.paths import ROOT
from tests.runs_made import RunMaker

BEFORE = str(ROOT / "tests" / "golden" / "runs" / "before")
AFTER = str(ROOT / "tests" / "golden" / "runs" / "after")


def test_a_grant_that_nothing_needs_changes_no_plan(tmp_path):
    plans = [tmp_path / "plain.json", tmp_path / "lossy.json"]
    for path, grants in zip(plans, ([], ["--allow", "lossy"]), strict=True):
        assert headway_here("plan", BEFORE, "-o", str(path), *grants).returncode == 0

    assert plans[0].read_bytes() == plans[1].read_bytes()


READERS = [["why"], ["why", BEFORE], ["plan"], ["report"], ["hang"], ["compare", BEFORE], ["watch"], ["trace", "info"]]
"""Verbs that read a run, up to its path."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "train.py", "--lr", "1"], "arguments after `--`. Write: headway run -- train.py --lr 1"),
        (["run", "-m", "package", "x"], "Write: headway run -m -- package x"),
        (["run", "--", "-m", "package"], "For a module write: headway run --module -- package"),
        (["run", "--baseline", "nope", "--", "go.py"], "--baseline nope is not a run folder."),
        (["run", "--grace-s", "-1", "--", "go.py"], "--grace-s is -1.0; it must be at least 0."),
        (["run", "--window-at=1.5", "--", "go.py"], "value for --window-at: 1.5 is not a whole number. Pass 2."),
        (["run", "--max-run-bytes", "-3", "--", "go.py"], "for --max-run-bytes: '-3' is not a size in bytes."),
        *(([*verb, ""], "a run's path is empty. Name a run folder") for verb in READERS),
        *((["run", name, "", "--", "go.py"], f"headway: {name} is empty. Name a path") for name in ("--apply", "-o")),
        (["compare", "a"], "argument AFTER is missing. See: headway compare --help"),
        (["whatif", "a", "b"], "does not take the argument 'b'. Drop it"),
        (["whatif", BEFORE, "--set", "workers=-1"], "workers: '-1' is not a count."),
        (["plan", BEFORE, "--allow", "all"], "'all' is unknown: choose same-distribution or lossy"),
        (["plan", BEFORE, "--allow", "lossy,"], "'' is unknown: choose same-distribution or lossy"),
        (["plan", BEFORE, "--steps", "-1"], "--steps is -1; it must be at least 1."),
        (["plan", f"{BEFORE}/run.json"], f"It is a file of the run {BEFORE}: name that folder."),
        (["why", f"{BEFORE}/run.json"], f"It is a file of the run {BEFORE}: name that folder."),
        (["plan", str(Path(BEFORE).parent)], f"It holds the runs {AFTER}, {BEFORE}"),
        (["why", str(Path(BEFORE).parent)], f"It holds the runs {AFTER}, {BEFORE}"),
        (["watch", str(Path(BEFORE).parent)], f"It holds the runs {AFTER}, {BEFORE}"),
        (["compare", BEFORE, BEFORE, "--gate", "-5%"], "--gate is '-5%'; it must not be negative."),
        (["whatif", BEFORE, "--set", "workers=99999999999999"], "is too many. Write a whole number, at most"),
        (["whatif", BEFORE, "--set", "prefetch=99999999999999"], "is too many. Write a whole number, at most"),
        (["plan", BEFORE, "-o", "README.md"], "README.md exists and is no plan: it is not overwritten."),
        (["report", BEFORE, "-o", "README.md"], "README.md exists and is no page: it is not overwritten."),
        (["report", BEFORE, "-o", "docs"], "docs is a folder; a report is a file."),
        (["report", BEFORE, "--steps", "900:910"], "holds steps 0 to"),
        (["trace", "export", BEFORE, "x.json", "--ranks", "7:9"], "lies in ranks 7:9."),
        (
            ["trace", "export", BEFORE, "x.json", "--steps", "5:2"],
            "'5:2' is an empty range of steps: its end",
        ),
        (["trace", "export", BEFORE, "x.parquet", "--ideal"], "must end in .json.gz"),
    ],
)
def test_a_mistake_is_one_line_with_its_fix(arguments, message):
    answer = headway_here(*arguments)

    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("headway: ")
    assert answer.stderr.count("\n") == 1
    assert message in answer.stderr


@pytest.mark.parametrize("words", ["--help | true; exit ${PIPESTATUS[0]}", f"compare {BEFORE} {BEFORE} >&-"])
def test_a_verb_whose_reader_leaves_or_whose_output_was_closed_ends_as_usual(words):
    command = ["bash", "-c", f"{sys.executable} -m headway.cli {words}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_help_of_whatif_lists_every_edit():
    page = " ".join(headway_here("whatif", "--help").stdout.replace("│", " ").split())

    assert [target for target in EDITS if target not in page] == []


def test_the_newest_run_is_the_one_that_began_last_whatever_was_copied_since(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, facts in {
        "copied": {"realtime_ns": 100}, "last": {"realtime_ns": 300}, "several-hosts": {"realtime_ns": 200},
    }.items():  # fmt: skip
        file = tmp_path / "headway-runs" / name / ("run-host1.json" if name == "several-hosts" else "run.json")
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(facts))
    for order, name in enumerate(["last", "several-hosts", "copied"]):
        for path in [*(tmp_path / "headway-runs" / name).iterdir(), tmp_path / "headway-runs" / name]:
            os.utime(path, (order, order))

    assert newest_run().name == "last"


def test_a_run_without_facts_counts_from_when_its_folder_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"cut": "{", "whole": '{"realtime_ns": 5000000000}'}.items():
        folder = tmp_path / "headway-runs" / name
        (folder / "events").mkdir(parents=True)
        (folder / "run.json").write_text(text)
        os.utime(folder, (6, 6))

    assert newest_run().name == "cut"


def test_why_and_the_page_know_how_the_run_ended():
    whole = explain([Path(BEFORE)])

    assert whole.to_json()["exit"] == whole.run.meta["exit"] != {}


def test_a_run_that_was_stopped_does_not_tell_how_long_its_job_is(tmp_path):
    shutil.copytree(BEFORE, tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    for end, steps in (({"code": 143, "class": "preempted"}, CUT_OFF_STEPS), ({"code": 1, "class": "user"}, 160)):
        (tmp_path / "run" / "run.json").write_text(json.dumps({**facts, "exit": end}))

        plan = explain([tmp_path / "run"]).plan
        assert plan.steps == steps
        assert ("The run was stopped; planned as a job of 100,000 steps" in plan.note) == (steps == CUT_OFF_STEPS)


def proposed(name, speedup, *, applies=True):
    return Proposal(name, "data", ("workers=2",), speedup, (speedup, speedup), applies=applies)


def test_advice_that_the_planner_tried_without_a_gain_is_not_given():
    """An edit that `headway plan` predicts to cost time is no advice in `headway why`."""
    advised = Cause("input.prep", "loader", 2.0, "", f"prepare in workers{TRY}workers=2", 1.2, (1.2, 1.2))
    worse, better = proposed("data.workers", 0.65), proposed("data.cache", 1.3)

    told = refuted(advised, Plan(1.0, 1.0, (1.0, 1.0), (worse,)))

    assert (told.fix, told.predicted_speedup) == ("none that pays is known (predicted: data.workers 0.65x)", None)
    may_win = replace(better, interval=(0.9, 1.8))
    unsure = refuted(advised, Plan(1.0, 1.0, (1.0, 1.0), (may_win,)))
    noise = "not resolved: inside the noise of two runs (predicted: data.cache 1.30x)"
    assert unsure.fix == f"{noise}; record for longer, or on a quieter host"
    assert refuted(advised, Plan(1.0, 1.0, (1.0, 1.0), (worse, better))) == advised
    assert refuted(advised, Plan(1.0, 1.0, (1.0, 1.0))) == advised
    given = Refusal("data.workers", "data", "it is", known=IN_FORCE)
    told = refuted(advised, Plan(1.0, 1.0, (1.0, 1.0), refused=(given,)))
    assert (told.fix, told.predicted_speedup) == ("none that pays is known (data.workers is in force already)", None)
    lost = Refusal("data.workers", "data", "it was", known=GIVEN_UP)
    told = refuted(advised, Plan(1.0, 1.0, (1.0, 1.0), refused=(lost,)))
    assert told.fix == "none that pays is known (data.workers was refused or withdrawn in this run)"


def test_what_headway_cannot_apply_lends_its_prediction_to_the_rules_advice():
    remove = proposed("straggler.remove", 5.0, applies=False)

    assert fixes_of(Plan(1.0, 1.0, (1.0, 1.0), (remove,))) == {"straggler.rank": Fix("", 5.0, (5.0, 5.0))}


def test_equal_runs_are_not_called_faster():
    equal = RunComparison((10, 10), 1.0, (0.5, 0.5), (0.5, 0.5), (), threshold=0.05, slower=False, whole=True)

    assert "is as fast as the first (10 -> 10 steps/s)." in render_compare(equal)


def test_advice_names_no_edit_where_nothing_can_be_replayed():
    trace = Trace.from_columns(
        {"rank": [0] * 3, "start_ns": [0, 0, 20], "duration_ns": [100, 100, 30]},
        name=[0, 1, 2], names=["process", "step", "host.gc"],
    )  # fmt: skip

    assert [cause.fix for cause in find_causes(Ledger.of(trace)) if "--set" in cause.fix] == []


def test_a_plan_of_which_nothing_was_applied_has_no_measured_gain_to_compare():
    plan = PlanFile(remedies=(Remedy("data.workers", {"num_workers": 2}, 2.0),), predicted_speedup=2.0)

    refused = applied_rows(plan, {"data.workers": AppliedRow(reason_not_applied="not pure")}, 1.0)
    applied = applied_rows(plan, {"data.workers": AppliedRow()}, 1.9)

    assert (refused[-1]["reason_not_applied"], refused[-1]["measured_speedup"]) == (
        "none of its remedies could be",
        None,
    )
    assert (applied[-1]["reason_not_applied"], applied[-1]["measured_speedup"]) == (None, 1.9)


GIVEN = {"num_workers": 8, "prefetch_factor": 2, "persistent_workers": True, "pin_memory": False}


def test_a_fix_for_a_run_without_a_launcher_is_in_the_scripts_own_terms():
    plan = Plan(1.0, 1.0, (1.0, 1.0), (replace(proposed("data.workers", 2.0), parameters=GIVEN),), ("data.workers",))
    launched, alone = (fixes_of(plan, launched=kind)["input.fetch"] for kind in (True, False))

    assert "headway run --apply" in launched.text
    assert alone.text == "DataLoader(..., num_workers=8, prefetch_factor=2, persistent_workers=True)"
    assert alone.predicted_speedup == launched.predicted_speedup
    assert {*OF_REMEDY} >= {name for name in REMEDIES if causes_of(name)} - {"comm.order"}


def test_a_plan_of_a_run_without_a_launcher_ends_with_what_the_script_can_say():
    rows = [replace(proposed("data.workers", 2.0), parameters=GIVEN), proposed("comm.order", 1.2)]
    plan = {"proposals": [row.to_json() for row in rows], "chosen": [row.name for row in rows]}
    launched, alone = (
        render_plan({**plan, "in_script": terms}, apply="headway run --apply plan.json -- train.py", width=120)
        for terms in (None, chosen_terms(rows, plan["chosen"]))
    )

    assert "headway run --apply plan.json" in launched
    assert "Next, in the script  DataLoader(..., num_workers=8, prefetch_factor=2, persistent_workers=True)" in alone
    assert "--apply" not in alone


def test_the_plan_that_a_run_applied_stays_when_it_is_planned_anew(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(BEFORE, run)
    assert plan_verb(run, json=True) == 0
    facts, applied = json.loads((run / "run.json").read_text()), (run / "plan.json").read_text()
    (run / "run.json").write_text(json.dumps(facts | {"plan": "plan.json"}))
    (run / "plan.json").write_text(applied + " ")

    assert plan_verb(run, json=True) == 0
    assert (run / "plan.json").read_text() == applied + " "
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["path"] == str(run / "next-plan.json")


def refuse(*_, **__):
    raise BarMissedError("the replay misses by 6.2 %. Record a quieter run.")


def test_where_the_replay_misses_the_run_plan_says_what_to_do_without_predictions(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(BEFORE, run, ignore=shutil.ignore_patterns("plan.json"))

    monkeypatch.setattr("headway.why.explanation.Plan.of", refuse)
    assert plan_verb(run) == 3
    screen = capsys.readouterr().out
    assert plan_verb(run, json=True) == 3
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert "No predictions, and no plan: the replay misses by 6.2 %" in " ".join(screen.split())
    assert "edit   DataLoader(..., num_workers=" in screen
    assert answer["chosen"] == answer["proposals"] == []
    assert answer["hints"][0]["cause"] == "input.fetch"
    assert not (run / "plan.json").exists()


@pytest.mark.parametrize("predicts", [True, False])
def test_run_why_and_plan_name_one_next_command_where_nothing_applies(predicts, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests" / "golden" / "runs" / "after", run)

    if not predicts:
        monkeypatch.setattr("headway.why.explanation.Plan.of", refuse)
    explained = explain([run])
    answers = []
    for verb in (why_verb, plan_verb):
        verb(run)
        answers.append(" ".join(capsys.readouterr().out.split()).rpartition("Next ")[2])
        verb(run, json=True)
        answers.append(json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"]["command"])

    assert explained.plan is None or not explained.plan.chosen
    last = next_command(explained.to_json()["verdict"]["command"], explained.source)
    assert {*answers, last} == {f"headway report {run} -o report.html"}


@pytest.mark.parametrize(
    ("remedy", "message"),
    [
        (Remedy("data.wrokers", {}, 2.0), "unknown remedy 'data.wrokers'. Did you mean 'data.workers'?"),
        (
            Remedy("data.workers", {"num_workers": "two"}, 2.0),
            "num_workers of data.workers is 'two'; it must be a whole number from 1 upwards.",
        ),
    ],
)
def test_a_plan_with_an_unknown_remedy_or_another_kind_of_parameter_is_refused_before_the_run(
    remedy, message, tmp_path
):
    write_plan(PlanFile(remedies=(remedy,)), tmp_path / "plan.json")

    said = refusal("run", "--apply", tmp_path / "plan.json", "--out", tmp_path / "run", "--", "go.py")

    assert message in said
    assert not (tmp_path / "run").exists()


def test_a_plan_whose_run_is_gone_says_that_nothing_is_measured(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests" / "golden" / "runs" / "after", run)
    plan = PlanFile(remedies=(Remedy("data.workers", {}, 2.0),))

    tell(ExitReport(0, "ok", None, None, 1.0, run), plan, tmp_path / "gone", as_json=False)

    told = " ".join(capsys.readouterr().err.split())
    assert "of which the plan was made, is no run any more. --baseline RUN names another." in told


def test_an_exported_window_stands_beside_its_ideal(tmp_path):
    target = tmp_path / "window.json.gz"
    answer = headway_here("trace", "export", BEFORE, str(target), "--steps", "10:14", "--ideal")
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    titles = {event["args"]["name"] for event in events if event.get("name") == "process_name"}

    assert answer.returncode == 0, answer.stderr
    assert sorted(titles) == ["rank 0", "rank 0, ideal", "rank 1", "rank 1, ideal"]


def test_the_page_of_files_read_a_rank_at_a_time_is_that_of_the_trace_in_memory(tmp_path):
    made = RunMaker(ranks=3, steps=30, num_workers=2, gc_ns=lambda rank, step: 2_000_000 * (step % 7 == 3)).make()
    for rank in range(3):
        made.trace.select(ranks=[rank]).save(tmp_path / f"r{rank}.parquet")
    parts, steps = Parts.of_files(sorted(tmp_path.glob("*.parquet"))), [12, 13, 14]

    window = window_of(parts, steps)
    whole = parts.whole()

    assert len(window) < len(whole) / 4
    assert timeline(window, steps=steps).to_json() == timeline(whole, steps=steps).to_json()
    assert known_steps(parts).tolist() == list(range(30))
    ranks, step_s, own_s = step_durations(parts)
    rows = whole.where(whole.named("step")).events
    assert ranks == [0, 1, 2]
    assert step_s[rows["rank"], rows["step"]].tolist() == (rows["duration_ns"] / 1e9).tolist()
    assert (own_s < step_s).all()


def test_the_steps_of_a_device_last_as_long_as_its_own_work_whatever_the_host_has_launched_by_then():
    steps = np.arange(20)
    host, device = steps * 2_000_000, 5_000_000 + steps * 7_000_000
    trace = Trace.from_columns(
        {
            "rank": np.zeros(40), "step": np.tile(steps, 2), "name": np.repeat([0, 1], 20),
            "start_ns": np.concatenate([host, device]), "duration_ns": np.repeat([2_000_000, 7_000_000], 20),
        },
        names=["step", "device.work"],
    )  # fmt: skip

    _, step_s, own_s = step_durations(Parts.of(trace))

    assert step_s[0, 1:] == pytest.approx(0.007)
    assert own_s[0] == pytest.approx(0.002)


def test_the_timeline_of_a_long_run_lies_where_its_ideal_is_known(monkeypatch):
    monkeypatch.setattr("headway.sim.recorded.program.MAX_RANK_STEPS", 40)
    explanation = explain([Path(BEFORE)])

    recorded, ideal = timelines(explanation, None)
    _, beyond = timelines(explanation, "100:104")

    assert explanation.program.recording.num_steps == 20

    assert 7 <= recorded.steps[0][0] < 20
    assert len(ideal.rows) == 2
    assert beyond is None


def test_the_heat_map_shows_the_slow_rank_and_not_those_that_wait_for_it():
    made = RunMaker(ranks=3, steps=40, compute_ns=lambda rank, step: (15 if rank == 1 else 5) * 1_000_000).make()
    ranks, _, own_s = step_durations(Parts.of(made.trace))
    (heat,) = heat_maps(ranks, own_s)

    assert heat.values.shape == (3, 40)
    assert np.nanmedian(heat.values[1]) > 1.2
    assert np.nanmedian(heat.values[[0, 2]]) == pytest.approx(1.0, abs=0.05)


def test_what_to_type_next_names_every_part_of_a_run_by_several_hosts():
    chosen, none = (Plan(1.0, 1.0, (1.0, 1.0), chosen=names) for names in (("data.workers",), ()))
    saves = {"causes": [{"cause": "checkpoint.stall", "lost_device_s": 5.0, "fix": "save less often"}]}
    augmented = {"causes": [{"cause": "input.prep", "lost_device_s": 5.0, "predicted_speedup": 2.0, "fix": "workers",
                             "remedy": "data.workers", "allow": "same-distribution"}]}  # fmt: skip
    known = explain([Path(BEFORE)])

    def command(plan, *paths, **why):
        facts = {"devices": 1, "steps": 9, "wall_s": 10.0, **why}
        return replace(known, plan=plan, paths=tuple(map(Path, paths))).next_command(verdict(facts))

    assert command(chosen, "my runs/a") == "headway plan 'my runs/a'"
    assert command(chosen, "a", "b") == "headway report a b -o report.html"
    assert command(none, "a", **saves) == "headway ckpt advise a"
    assert command(none, "a", **augmented) == "headway plan a --allow same-distribution"


def test_why_promises_nothing_that_the_plan_leaves_out():
    rows = tuple(proposed(name, gain) for name, gain in (("data.workers", 1.9), ("data.cache", 2.1)))

    def fixes(*chosen):
        return {fix.remedy for fix in fixes_of(Plan(2.0, 1.0, (1.9, 2.1), rows, chosen)).values()}

    assert fixes("data.workers") == {"data.workers"}
    assert fixes("data.workers", "data.cache") >= {"data.cache"}
    assert fixes() == set()
    unclear = replace(proposed("data.cache", 1.2), interval=(0.9, 1.5))
    [script] = {fix.script for fix in fixes_of(Plan(2.0, 1.0, (1.9, 2.1), (unclear,), ())).values()}
    assert script == "headway.data.DataLoader(...)", "the rule's edit, workers, is not what may win"


def test_what_a_job_is_too_short_for_is_named_where_its_prediction_stands():
    """The rule of a cause of input advises workers: beside another remedy's figure it would promise what that wins."""
    for name, text in (("data.workers", ""), ("data.cache", "data.cache (in the script itself: this job is too short")):
        plan = Plan(1.0, 1.0, (1.0, 1.0), (proposed(name, 1.9),), (), left_out=(LeftOut(name, "short", ""),))
        found = fixes_of(plan)["input.fetch"]

        assert (found.text[: len(text) or None], found.predicted_speedup, found.remedy) == (text, 1.9, "")


def test_what_the_script_itself_surely_wins_is_promised_by_hand_where_headway_may_not_win_it():
    own = Gain(1.5, (1.2, 1.8))
    for row in (replace(proposed("data.workers", 1.3), interval=(0.9, 1.7)), proposed("data.workers", 1.9)):
        rows, short = (replace(row, by_hand=own),), (LeftOut("data.workers", "short", ""),) * row.clear
        found = fixes_of(Plan(1.0, 1.0, (1.0, 1.0), rows, (), left_out=short))["input.fetch"]

        assert (found.text, found.predicted_speedup, found.interval, found.remedy) == ("", 1.5, (1.2, 1.8), "")
        assert found.script.startswith("DataLoader(")


@pytest.mark.parametrize("folder", ["applied", "tables"])
@pytest.mark.parametrize("text", ["", '{"remedies": [', "[]", "{}"])
def test_a_damaged_file_of_a_rank_beside_its_events_costs_what_it_held_and_no_more(folder, text, tmp_path):
    shutil.copytree(ROOT / "tests" / "golden" / "runs" / "after", tmp_path / "run")
    whole = explain([tmp_path / "run"])
    for file in (tmp_path / "run" / folder).iterdir():
        file.write_text(text)

    damaged = explain([tmp_path / "run"])

    assert damaged.ledger.to_json()["ledger_ns"] == whole.ledger.to_json()["ledger_ns"]
    assert len(damaged.causes) == len(whole.causes)


def test_a_comparison_says_when_a_run_failed():
    ends = [RunExit(code=0, cls="ok"), RunExit(code=143, cls="preempted")]

    assert unfinished(*(SimpleNamespace(facts=RunFacts(exit=end)) for end in ends)) == [
        "the second run did not end well, its steps are those before that: "
        "The run was stopped from outside (exit code 143, signal 15)."
    ]
    assert unfinished(*(SimpleNamespace(facts=RunFacts()) for _ in ends)) == []
