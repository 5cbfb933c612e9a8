"""`headway try`: candidates beside each other on the same batches from one state, the greedy set, the plan."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.compute.advise import WORTH, Tries, TryBranch, best_of, chosen, gain, quiet_s, rows_of, schedule
from headway.core.errors import UnknownNameError
from tests.launching import headway, headway_here, refusal, script

NAMES = ("compute.channels_last", "compute.fused_optimizer", "compute.compile")

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(.2), nn.Linear(256, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
images, labels = torch.randn(64, 3, 16, 16), torch.randint(0, 4, (64,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=8, shuffle=True)
for epoch in range(EPOCHS):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
print("the end")
"""


def measured(factors, names=NAMES, rounds=2):
    """Play a schedule in which each remedy divides the time of a step by its factor; return rows and the sets."""
    plan, branches = schedule(names, rounds), []
    remedies = next(plan)
    while True:
        step = 1.0
        for name in remedies:
            step /= factors[name] or 1.0
        refused = "it cannot" if any(factors[name] is None for name in remedies) else None
        branches.append(TryBranch(remedies, [] if refused else [step] * 4, loss=1.0 + len(remedies), refused=refused))
        try:
            remedies = plan.send(branches[-1])
        except StopIteration:
            return Tries(branches, ended=""), [branch.remedies for branch in branches]


@given(st.lists(st.sampled_from([None, 0.5, 1.0, 1.1, 1.7, 3.0]), min_size=3, max_size=3), st.integers(1, 3))
def test_the_best_set_is_that_of_all_that_win_each_measured_once_a_round(factors, rounds):
    table = dict(zip(NAMES, factors, strict=True))
    tries, sets = measured(table, rounds=rounds)
    best = best_of(rows_of(tries), ["result-equivalent"])
    winners = {name for name, factor in table.items() if factor is not None and factor >= WORTH}
    assert set(best.remedies if best else ()) == winners
    for name, factor in table.items():
        assert sets.count((name,)) >= (1 if factor is None else rounds)
        assert factor is not None or sum(name in remedies for remedies in sets) == 1  # refused once, tried no more


def test_what_is_not_granted_is_measured_and_stays_out_of_the_plan():
    tries, _ = measured({"compute.autocast": 3.0, "compute.compile": 1.5}, ("compute.autocast", "compute.compile"))
    rows = rows_of(tries)
    assert best_of(rows, ["result-equivalent"]).remedies == ("compute.compile",)
    assert best_of(rows, ["lossy", "result-equivalent"]).remedies == ("compute.autocast", "compute.compile")
    assert best_of(rows, []) is None


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=9), st.floats(0.0, 3.0), st.floats(0.5, 2.0))
def test_the_interval_holds_the_gains_beside_both_neighbours_and_waiting_makes_them_smaller(step_s, wait_s, drift):
    plain, fast = TryBranch(step_s=step_s), TryBranch(("x",), step_s=[value / 2 for value in step_s])
    behind = TryBranch(step_s=[value * drift for value in step_s])
    low, mid, high = gain([plain, fast, behind], ("x",), wait_s=wait_s)
    beside = [(quiet_s(base.step_s) + wait_s) / (quiet_s(fast.step_s) + wait_s) for base in (plain, behind)]
    assert low <= min(beside) <= mid + 1e-9 <= max(beside) + 2e-9 <= high + 3e-9
    assert max(beside) <= 2 * max(1.0, drift) + 1e-9
    assert gain([plain, TryBranch(("x",))], ("x",)) is None


def test_a_host_that_changes_its_pace_once_does_not_decide():
    slow, order = 1.0, []
    for number in range(5):
        slow = 2.0 if number == 2 else slow  # from here on all takes twice as long
        order += [TryBranch(step_s=[1.3] * 8 if slow == 1.0 else [2.6] * 8), TryBranch(("x",), step_s=[slow] * 8)]
    order[4].step_s = [1.3] * 8  # the change comes between a branch and the one beside it
    low, mid, high = gain([*order, TryBranch(step_s=[2.6] * 8)], ("x",))
    assert low == pytest.approx(1.3)
    assert mid == pytest.approx(1.3)
    assert high == pytest.approx(1.3)


def test_candidates_are_known_by_name():
    assert chosen(["fused_optimizer"]) == ["compute.fused_optimizer"]
    with pytest.raises(UnknownNameError, match="compile"):
        chosen(["compil"])


def tried(tmp_path, text, *options):
    """Run `headway try` on a script; return the process and its answer."""
    out = tmp_path / "out"
    options = ["--steps", 8, "--rounds", 2, "--plan", tmp_path / "plan.json", "--out", out, "--json", *options]
    process = headway("try", *options, "--", script(tmp_path, text))
    return process, json.loads(process.stdout) if process.returncode == 0 else process.stderr


def test_candidates_train_the_same_batches_and_the_plan_is_one_that_run_applies(tmp_path):
    options = ("--only", "channels_last", "--only", "fused_optimizer", "--only", "tf32")
    process, answer = tried(tmp_path, SCRIPT.replace("EPOCHS", "1000"), *options)
    assert process.returncode == 0, process.stderr
    assert answer["schema"] == "headway.try/1"
    assert answer["ended"] == ""
    assert "the end" not in process.stdout + process.stderr
    rows = {tuple(row["remedies"]): row for row in answer["rows"]}
    for name in NAMES[:2]:
        row = rows[name,]
        low, mid, high = row["measured"]
        assert low <= mid <= high
        assert row["noise"] == 0.0  # two trials of the script as it is: the same digits
        assert row["loss_difference"] < 1e-3
    assert "CUDA" in rows["compute.tf32",]["refused"]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [remedy["name"] for remedy in plan["remedies"]] == answer["best"]


def test_a_script_that_draws_its_batches_and_one_that_ends_early(tmp_path):
    drawn = SCRIPT.replace(
        "for x, y in loader:", "for _ in range(5):\n        x, y = torch.randn(8, 3, 16, 16), labels[:8]"
    )
    process, answer = tried(
        tmp_path, drawn.replace("EPOCHS", "6"), "--only", "channels_last", "--only", "fused_optimizer"
    )
    assert process.returncode == 0, process.stderr
    assert answer["ended"] == "the script ended before all was tried"
    assert "the end" in process.stderr  # its stdout goes there under --json
    first = answer["rows"][0]
    assert first["remedies"] == ["compute.channels_last"]
    assert first["loss_difference"] < 1e-3


BAD = {
    "ends before": ("print('nothing is trained')", "before its step 15, where the first trial would be over"),
    "too short": (SCRIPT.replace("EPOCHS", "0"), "before its step 15, where the first trial would be over"),
    "fails": ("raise SystemExit(4)", "exit code 4"),
}


@pytest.mark.parametrize(("text", "reason"), BAD.values(), ids=BAD)
def test_what_cannot_be_tried_is_one_sentence(text, reason, tmp_path):
    process, answer = tried(tmp_path, text)
    assert process.returncode == 2
    assert reason in answer
    assert "Traceback" not in answer


def test_options_that_cannot_be_are_refused_before_anything_starts(tmp_path):
    path = script(tmp_path, "open('started', 'w')")
    for options in (["--steps", 2], ["--only", "nonsense"], ["--allow", "all"], ["--apply", path]):
        refusal("try", *options, "--", path)
    refusal("try")
    assert "value for -o: nope/plan.json lies in" in refusal("try", "-o", "nope/plan.json", "--", "x.py")
    missing = headway_here("try", "--", tmp_path / "missing.py")
    assert missing.stderr.startswith("headway: the script")
    assert missing.stderr.count("\n") == 1
    assert not os.path.exists("started")
