"""The verdict: one sentence on where the time of a run went, how it ended, and what to do first."""

import json
import shutil
from pathlib import Path

import pytest

from headway.core.errors import HEADER
from headway.core.files.planfile import PlanFile, Remedy
from headway.ledger.cause import NOT_RESOLVED, RECORD_LONGER
from headway.runtime.run_folder.exit_class import RankEnd, failure_text
from headway.runtime.run_folder.recording import Exit
from headway.verbs.runs.why import next_command, summarise
from headway.why.explanation import explain
from headway.why.verdict import NOTHING_PAYS, verdict
from tests.paths import ROOT

FAILED = HEADER + '\n  File "train.py", line 3, in <module>\nValueError: x'
BEFORE = str(ROOT / "tests" / "golden" / "runs" / "before")


def test_a_start_up_that_dwarfs_the_first_cause_is_said_beside_it():
    cause = {"cause": "input.fetch", "lost_device_s": 0.4, "fix": "read ahead", "predicted_speedup": 4.0}
    why = {"devices": 1, "steps": 12, "wall_s": 10.0, "goodput": 0.1, "causes": [cause]}

    short = verdict({**why, "ledger": {"useful": 1.0, "input": 0.4, "startup": 7.3, "idle": 1.3}})
    long = verdict({**why, "ledger": {"useful": 1.0, "input": 6.4, "startup": 2.3, "idle": 0.3}})
    blind = verdict({**why, "causes": [], "ledger": {"useful": 1.0, "unknown": 9.0}})

    assert short.sentence == "4.0 % of 1 device x 10 s went to waiting for input; start-up took 73 %."
    assert long.sentence == "64 % of 1 device x 10 s went to waiting for input."
    assert blind.sentence == "10.0 % of 1 device x 10 s was useful work; time nobody recorded took 90 %."


def test_time_that_another_job_used_is_not_said_to_be_lost_to_bubbles():
    cause = {"cause": "bubble.p2p", "lost_device_s": 2.0, "fix": "more micro-batches", "predicted_speedup": 1.2}
    why = {"devices": 1, "steps": 12, "wall_s": 10.0, "goodput": 0.4, "sub": {"bubble.filled": 4.0}}
    why["ledger"] = {"useful": 4.0, "bubble": 6.0}

    assert verdict({**why, "causes": [cause]}).sentence.startswith("20 % of 1 device x 10 s went to pipeline bubbles")
    assert verdict({**why, "causes": []}).sentence.endswith("useful work; pipeline bubbles took 20 %.")


def test_a_run_that_a_hang_ended_is_told_so_before_anything_else():
    why = {"devices": 2, "wall_s": 10.0, "steps": 30, "goodput": 0.25, "ledger": {"useful": 5.0, "comm": 15.0}}
    why["causes"] = [{"cause": "comm.exposed", "lost_device_s": 15.0, "fix": "faster links", "predicted_speedup": 2.0}]
    hung, recovered = (verdict({**why, "hang": {"ended_the_run": ended}}) for ended in (True, False))

    assert hung.sentence.startswith("The run made no more progress after 30 steps and was ended: it hung. 25.0 %")
    assert "headway hang" in hung.fix
    place = "a.py:9: it has left the loop at a.py:6 after 30 steps: uneven inputs"
    assert place in verdict({**why, "hang": {"ended_the_run": True, "explained": {"0": place}}}).fix
    assert recovered == verdict(why)


@pytest.mark.parametrize(("still_s", "code", "told"), [(6.0, 143, True), (6.0, 0, False), (2.0, 143, False)])
def test_a_run_that_was_stopped_long_behind_its_last_record_may_have_hung(still_s, code, told):
    why = {"devices": 2, "wall_s": 10.0, "steps": 80, "goodput": 0.4, "sub": {"unknown.cut_short": 2 * still_s}}
    why |= {"ledger": {"useful": 8.0, "unknown": 2 * still_s}, "exit": {"code": code, "class": "preempted"}}

    assert (f"last {still_s:g} s: it may have hung" in verdict(why).sentence) == told


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ((1, "user", 0, FAILED), "Rank 0 failed after 7 steps (exit code 1): ValueError: x (train.py, line 3). "),
        ((137, "oom", 3, None), "Rank 3 ran out of memory after 7 steps (exit code 137, signal 9). "),
        ((143, "preempted", 0, None), "The run was stopped from outside after 7 steps (exit code 143, signal 15). "),
        ((130, "user", 0, FAILED), "The run was stopped by Ctrl-C after 7 steps. "),
        ((0, "ok", None, None), ""),
    ],
)
def test_a_run_that_did_not_end_well_says_so_before_anything_else(end, said):
    why = {"devices": 1, "wall_s": 10.0, "steps": 7, "goodput": 0.25, "ledger": {"useful": 2.5}}
    lost = [{"cause": "input.fetch", "lost_device_s": 5.0, "fix": "read ahead", "predicted_speedup": 2.0}]

    for known in (why, {**why, "causes": lost}):
        ended = dict(zip(("code", "class", "first_rank", "traceback"), end, strict=True))
        assert verdict({**known, "exit": ended}).sentence == said + verdict(known).sentence


def test_after_a_plan_was_applied_the_next_question_is_what_changed():
    explained = explain([Path(BEFORE)])
    command = explained.to_json()["verdict"]["command"]

    assert next_command(command, explained.source) == f"headway plan {BEFORE}"
    assert next_command(command, explained.source, Path("my runs/a")) == f"headway compare 'my runs/a' {BEFORE}"


def test_the_verdict_of_a_run_advises_no_remedy_that_the_run_found_unfit(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(BEFORE, run)
    plan = PlanFile(remedies=(Remedy("data.workers", {"num_workers": 2}, 2.0),), predicted_speedup=2.0)
    left = {"dataset": "TextBlocks", "reason_not_applied": "it changes", "about": "dataset"}
    outcome = {"name": "data.workers", "facts": {"loaders": [left]}, "reason_not_applied": "it changes"}
    (run / "applied").mkdir()
    (run / "applied" / "r0.json").write_text(json.dumps({"rank": 0, "remedies": [outcome]}))

    facts, explained = summarise(run, plan, None)
    later = explain([run])

    assert any(row.name.startswith("data.") for row in explain([Path(BEFORE)]).plan.proposals)
    for found in (explained, later):
        assert not any(row.name.startswith("data.") for row in found.plan.proposals)
        assert not any(cause.fix.startswith("data.") for cause in found.causes)
    assert facts["applied"][0]["parameters"] == {"num_workers": 2}


def test_a_plan_of_another_script_is_not_measured_against_it(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(BEFORE, run)
    meta = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**meta, "script": ["other.py"]}))
    plan = PlanFile(remedies=(Remedy("host.gc", {"every_steps": 9}, 1.1),), predicted_speedup=1.1)

    rows = summarise(run, plan, Path(BEFORE))[0]["applied"]

    assert {row["measured_speedup"] for row in rows} == {None}
    assert "a run of train.py, and this one of other.py" in rows[-1]["inconclusive"]


def test_the_last_words_repeat_no_traceback_and_blame_nobody_for_ctrl_c(tmp_path):
    traceback = HEADER + "\nValueError: x"
    first, end = RankEnd(0, 1, stderr=f"before\n{traceback}\n"), Exit(1, "user", 0, traceback)

    last = failure_text(first, end, tmp_path, interrupted=False, alone=True)
    assert last.startswith("headway: ValueError: x. Rank 0 failed first (exit code 1): ")
    assert HEADER not in last
    assert failure_text(first, end, tmp_path, interrupted=False, alone=False).endswith("ValueError: x\n")
    (tmp_path / "applied").mkdir()
    rows = [{"name": name, "facts": {}, "applied": name == "data.workers"} for name in ("data.workers", "host.gc")]
    (tmp_path / "applied" / "r0.json").write_text(json.dumps({"remedies": rows}))
    told = failure_text(first, end, tmp_path, interrupted=False, alone=True)
    assert "while data.workers changed how the script runs: run it once more without --apply" in told
    stopped = failure_text(first, end, tmp_path, interrupted=True, alone=True)
    assert stopped == f"headway: stopped by Ctrl-C. The run is in {tmp_path}\n"


def test_the_verdict_is_about_the_largest_loss_unless_a_remedy_wins_another():
    facts = {"devices": 1, "steps": 40, "wall_s": 10.0, "goodput": 0.1, "ledger": {"useful": 1.0, "eval": 5.0}}
    rows = [("eval", 5.0, None, False), ("host.script", 2.0, 1.4, True), ("host.logging", 1.0, 1.1, False)]
    eval_, script, logging = (
        {
            "cause": name, "lost_device_s": lost, "predicted_speedup": gain, "at_most": most, "fix": "x",
            "remedy": name if gain and not most else "",
        }
        for name, lost, gain, most in rows
    )  # fmt: skip

    assert verdict({**facts, "causes": [eval_, script, logging]}).cause == "host.logging"
    assert "evaluation took 50 %" in verdict({**facts, "causes": [eval_, script, logging]}).sentence
    assert verdict({**facts, "causes": [eval_, script]}).cause == "eval"
    assert verdict({**facts, "causes": [eval_, logging | {"predicted_speedup": 1.03}]}).cause == "eval"
    assert verdict({**facts, "causes": [eval_, logging | {"remedy": ""}]}).cause == "eval", "links are not headway's"
    unsure = script | {"fix": f"{NOT_RESOLVED}: data.workers may win 1.40x", "at_most": False}
    assert verdict({**facts, "causes": [unsure, logging]}).cause == "host.script", "what may be won leads as well"
    lost = eval_ | {"cause": "input.prep", "fix": f"{NOTHING_PAYS} (predicted: data.workers 1.02x)"}
    for other_s, leads in ((1.6, "input.prep"), (1.7, "host.script")):
        causes = [lost, script | {"lost_device_s": other_s, "at_most": True}]
        assert verdict({**facts, "causes": causes}).cause == leads, "far larger, if nothing is known that pays"
    for batch_s, leads in ((5.9, "host.script"), (6.1, "compute.batch")):
        batch = eval_ | {"cause": "compute.batch", "lost_device_s": batch_s}
        assert verdict({**facts, "causes": [batch, script]}).cause == leads, "more examples in a batch change training"
    saves = {"cause": "checkpoint.stall", "lost_device_s": 3.1, "predicted_speedup": 2.4, "at_most": True, "fix": "x"}
    for ends, leads in (({}, "host.logging"), ({"interval": [2.1, 2.7]}, "checkpoint.stall")):
        assert verdict({**facts, "causes": [saves | ends, logging]}).cause == leads, "far larger, where it is predicted"
    grows = {"cause": "memory.grow", "lost_device_s": 0.0, "fix": "detach"}
    assert verdict({**facts, "causes": [eval_, grows]}).sentence.endswith("; memory grows from step to step.")
    own = script | {
        "cause": "host.cpu_wait",
        "fix": f"{RECORD_LONGER}: headway's own processes read data",
        "lost_device_s": 9.0,
    }
    assert verdict({**facts, "causes": [own]}).cause == ""
    waits = {"causes": [own | {"fix": "x", "lost_device_s": 4.0}], "sub": {"host.cpu_wait": 7.0}}
    assert verdict({**facts, **waits}).sentence.startswith("70 % of"), "what the ledger has; a replay wins less"
    assert verdict({**facts, "causes": [own, script]}).cause == script["cause"]
    assert verdict({**facts, "causes": [script | {"lost_device_s": 0.1, "predicted_speedup": None}]}).cause == ""
