"""Tuning inside a run: branches leave no trace, trials are judged by their losses, a killed search goes on."""

import math
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from headway import Checkpointer
from headway.core.errors import InputError
from headway.data import DataLoader
from headway.model import Choice, Range, Tuner, summarise
from headway.model.tuning.apply import ReplayedPasses
from headway.model.tuning.search import MOST_CONFIRMED, Search
from headway.model.tuning.space import SEARCHERS
from tests.datasets import Sized
from tests.launching import code_and_json, refusal
from tests.made.pool import RankFailedError
from tests.refusals import refused
from tests.spawn import on_ranks

LR = {"lr": Range(1e-4, 1.0, log=True)}


class Job:
    """A small classifier with dropout and batch norm, its optimizer, schedule and loader."""

    def __init__(self, batch_size: int = 16) -> None:
        torch.manual_seed(1)
        x = torch.randn(512, 6)
        y = (x[:, 0] > 0).long()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 400)
        self.loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True, seed=5)
        self.losses: list[float] = []

    @property
    def state(self):
        return [self.model, self.optimizer, self.schedule]

    def train(self, batch) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(float(loss.detach()))
        return self.losses[-1]

    def bits(self):
        """All that training changes, as exact values."""
        moments = [each["momentum_buffer"].tolist() for each in self.optimizer.state.values()]
        weights = {name: value.tolist() for name, value in self.model.state_dict().items()}
        return weights, moments, self.schedule.state_dict(), torch.get_rng_state().tolist(), self.loader.state_dict()


def tuned(job: Job, tuner: Tuner, epochs: int = 4) -> Tuner:
    for batch in tuner.steps(job.loader, epochs=epochs):
        tuner.report(job.train(batch))
    return tuner


def test_white_noise_is_called_converging_in_less_than_one_trace_of_a_thousand():
    rng, calls = np.random.default_rng(0), {1: 20_000, 20: 5_000}
    for width, traces in calls.items():
        noise, times = rng.normal(3.0, 1.0, (traces, 10 * width + 1)), np.arange(10 * width + 1)

        assert sum(summarise(row, times).label == "converging" for row in noise) <= 1e-3 * traces


@pytest.mark.parametrize("factor", [1e-3, 1.0, 50.0])
def test_scaling_losses_keeps_the_label_and_scales_the_slope_and_shifting_keeps_the_slope(factor):
    rng, times = np.random.default_rng(1), 0.5 * np.arange(61)
    falling = 4 * np.exp(-times / 6) + rng.normal(1, 0.01, 61)
    for trace in (falling, falling[::-1], rng.normal(5, 1, 61), np.exp(times)):
        plain, scaled, shifted = (summarise(each, times) for each in (trace, factor * trace, trace + factor))

        assert scaled.label == plain.label
        assert scaled.slope == pytest.approx(factor * plain.slope)
        assert shifted.slope == pytest.approx(plain.slope, rel=1e-6, abs=1e-9)
    assert summarise(falling, times).label == "converging"
    assert summarise(np.exp(times), times).label == "diverged"
    assert summarise([1.0] * 10 + [math.nan], range(11)).label == "diverged"


def test_slope_is_the_fall_less_the_largest_rise_over_the_time():
    found = summarise([10, 6, 6, 7, 7, 4, 4], [0, 1, 2, 3, 4, 5, 6], windows=3)  # windows 6, 7, 4

    assert (found.slope, found.noise, found.label) == ((4 - 10 + 1) / 6, 1.0, "converging")


def test_with_one_setting_the_loop_is_the_plain_one_to_the_bit():
    plain = Job()
    for group in plain.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.1
    plain.schedule.base_lrs = [0.1]
    for _ in range(3):
        for batch in plain.loader:
            plain.train(batch)
    expected, job = plain.bits(), Job()
    tuned(job, Tuner({"lr": Choice([0.1])}, state=job.state), epochs=3)

    assert job.bits() == expected
    assert job.losses == plain.losses


def test_a_fork_that_wins_is_the_plain_run_with_its_setting_and_the_losers_leave_no_trace():
    job = Job()
    pointers = [each.data_ptr() for each in job.model.parameters()]
    tuner, copies = Tuner(LR, state=job.state, trials=8, plateau=0), []
    for batch in tuner.steps(job.loader, epochs=3):
        tuner.report(job.train(batch))
        copies.append(tuner.num_copies <= tuner.num_live + 1)
    found, plain = job.bits(), Job()
    lr = tuner.setting["lr"]
    tuned(plain, Tuner({"lr": Choice([lr])}, state=plain.state), epochs=3)

    assert len(tuner.history) >= 5
    assert all(copies)
    assert tuner.num_copies == 0
    assert found == plain.bits()
    assert job.losses[-1] == plain.losses[-1]
    assert [each.data_ptr() for each in job.model.parameters()] == pointers
    assert tuner.num_steps == 3 * 32 + sum(len(each.losses) for each in tuner.history if each.setting["lr"] != lr)


def test_where_no_trial_makes_progress_the_parent_goes_on_unchanged():
    job = Job()
    tuner = Tuner({"lr": Range(0.5, 1.0)}, state=job.state, metric="max", trials=3)
    for batch in tuner.steps(job.loader, epochs=1):
        job.train(batch)
        tuner.report(1.0)
    found, plain = job.bits(), Job()
    for batch in plain.loader:
        plain.train(batch)

    assert tuner.label == "unstable"
    assert found == plain.bits()


@pytest.mark.parametrize("name", ["tpe", "random"])
def test_searchers_stay_in_the_space_repeat_themselves_and_tpe_finds_the_better_half(name):
    space = {"lr": Range(1e-4, 1.0, log=True), "batch": Choice([16, 64])}
    trials = []
    for _ in range(40):
        setting = SEARCHERS[name](space, trials, 3)
        assert setting == SEARCHERS[name](space, trials, 3)
        assert 1e-4 <= setting["lr"] <= 1
        assert setting["batch"] in (16, 64)
        trials.append((setting, abs(math.log10(setting["lr"]) + 1) + (setting["batch"] == 16)))

    late = [score for _, score in trials[20:]]
    assert name == "random" or np.median(late) < 0.5 < np.median([score for _, score in trials[:6]])


@pytest.mark.parametrize(
    ("loss", "rates"),
    [
        (lambda rate, step: rate + (2 - rate) * (1 - 0.2 * rate) ** step, [1.0, 0.3, 0.09]),  # the rate is the floor
        (lambda rate, step: 2 * (1 - 0.05 * rate) ** step, [1.0, 0.3]),  # lower rates are slower, and no more
        (lambda rate, step: 2 * (1 - 0.05 * rate) ** step if step < 11 else math.inf, [1.0, 0.3]),
    ],
)
def test_the_best_of_short_trials_wins_only_if_it_is_ahead_of_lower_rates_in_longer_ones(loss, rates):
    space = {"lr": Range(0.001, 1.0, log=True)}
    search = Search(space, most_steps=200, most_trials=1, seed=0, first=[{"lr": 1.0}])
    while (run := search.next_run()) is not None:
        run.losses.append(loss(run.setting["lr"], len(run.losses)))

    assert [trial.setting["lr"] for trial in search.trials] == pytest.approx(rates)
    assert max(len(trial.losses) for trial in search.trials) <= MOST_CONFIRMED * search.compared_at
    if math.isfinite(loss(1.0, 50)):
        assert search.winner.setting["lr"] == pytest.approx({0.09: 0.3, 0.3: 1.0}[rates[-1]])
    else:
        assert search.winner is None


def test_a_trial_that_raises_or_runs_out_of_memory_counts_as_diverged_and_is_freed():
    job = Job()
    tuner = Tuner(LR, state=job.state, trials=8, plateau=0)
    raised = 0
    for batch in tuner.steps(job.loader, epochs=2):
        with tuner.guard():
            if tuner.searching and tuner.setting["lr"] < 0.05 and raised < 2:
                raised += 1
                raise torch.OutOfMemoryError("no room for activations")
            tuner.report(job.train(batch))

    failed = [each for each in tuner.history if each.reason]
    assert len(failed) == raised == 2
    assert all(each.summary.label == "diverged" and "no room" in each.reason for each in failed)
    assert tuner.num_copies == 0
    with pytest.raises(ValueError, match="of the script"), tuner.guard():
        raise ValueError("of the script's own")


def saved_and_killed(root: str, stop: int) -> list:
    """Train with a checkpoint in a trial; end without any clean-up at step `stop`, or say what was decided."""
    job = Job()
    tuner = Tuner({**LR, "momentum": Range(0.0, 0.95)}, state=job.state, trials=8)
    ckpt = Checkpointer(
        root, model=job.model, optimizer=job.optimizer, schedule=job.schedule, loader=job.loader, tuner=tuner
    )
    with ckpt:
        if stop < 0:
            ckpt.restore()
        for batch in tuner.steps(job.loader, epochs=2):
            tuner.report(job.train(batch))
            if tuner.num_steps == stop:
                assert tuner.searching
                ckpt.save(stop, block="durable")
                os.kill(os.getpid(), signal.SIGKILL)
    return [[each.setting, each.losses, each.live] for each in tuner.history] + [job.bits(), tuner.num_steps]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [30, 61, 160])
def test_a_search_that_is_killed_in_a_trial_goes_on_with_the_same_decisions(tmp_path, stop):
    with pytest.raises(RankFailedError, match="-9"):
        on_ranks(saved_and_killed, 1, str(tmp_path / "run"), stop)

    whole = saved_and_killed(str(tmp_path / "whole"), 1 << 30)
    assert saved_and_killed(str(tmp_path / "run"), -1) == whole


test_what_cannot_be_tuned_is_one_clear_error = refused(
    (lambda job: Tuner({}, state=job.state), r"nothing to tune"),
    (lambda job: Tuner(LR), r"state=\[\] leaves nothing to branch"),
    (lambda job: Tuner({"lrr": Range(0, 1)}, state=job.state), r"nobody can set .*'lrr'.*Did you mean 'lr'"),
    (lambda job: Tuner({"lr": Range(0, 1, log=True)}, state=job.state), r"a logarithm needs low > 0"),
    (lambda job: Tuner({"lr": Range(1, 0)}, state=job.state), r"empty or infinite"),
    (lambda job: Tuner({"lr": Choice([])}, state=job.state), r"no values to choose from"),
    (lambda job: Tuner(LR, state=job.state, metric="least"), r"unknown metric 'least'"),
    (lambda job: Tuner(LR, state=job.state, searcher="tpee"), r"unknown searcher 'tpee'.*'tpe'"),
    (lambda job: list(Tuner(LR, state=job.state).steps(job.loader)), r"10 batches brought no metric"),
    (lambda job: next(Tuner(LR, state=job.state).steps([1, 2])), r"list has no state_dict and no load_state_dict"),
    (lambda job: next(Tuner(LR, state=job.state).steps(Job(64).loader)), r"8 batches are left; a trial needs 11"),
    (lambda job: summarise([1.0] * 5, range(5)), r"5 values do not fill 10 windows"),
    (lambda job: summarise([1.0] * 11, [0] * 11), r"the times do not increase"),
    by=lambda arguments: arguments(Job()),
)  # fmt: skip


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(640, 6)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.{optimizer}
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16, shuffle=True)
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(a), b)
        {backward}
        optimizer.step()
"""


def script_tuned(tmp_path, *, optimizer="SGD(model.parameters(), lr=1e-5)", backward="loss.backward()"):
    """Run `headway tune` on a script; return its exit code and answer."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(optimizer=optimizer, backward=backward))
    words = ("--setting", "lr=1e-5:1:log", "--trials", "6", "--out", tmp_path / "run", "--json", "--", path)
    return code_and_json("tune", *words)


@pytest.mark.slow
def test_an_unmodified_script_is_tuned(tmp_path):
    code, answer = script_tuned(tmp_path)

    assert code == 0
    assert answer["schema"] == "headway.tune/1"
    assert {"setting", "metric", "steps", "trials", "label", "path"} <= answer.keys()
    assert answer["setting"]["lr"] > 1e-3
    assert answer["metric"] < 0.5
    assert answer["steps"] > 3 * 40


@pytest.mark.slow
def test_a_script_whose_loss_is_not_found_trains_as_it_would_have_and_says_why(tmp_path):
    by_hand = "model.weight.grad, model.bias.grad = torch.autograd.grad(loss, [model.weight, model.bias])"
    code, answer = script_tuned(tmp_path, backward=by_hand)

    assert code == 3
    assert "`backward` of a scalar" in answer["reason_not_tuned"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [("lr=0:1:log", "a logarithm needs low > 0"), ("lr", "is no tunable"), ("lr=1:2:lin", "is no tunable")],
)
def test_an_option_that_writes_no_tunable_is_refused_before_the_script_starts(setting, message):
    assert message in refusal("tune", "--setting", setting, "--", "train.py")


def test_a_loop_that_is_broken_off_in_a_search_leaves_the_parent_and_the_next_one_searches_again():
    job = Job()
    before = {name: value.tolist() for name, value in job.model.state_dict().items()}
    tuner = Tuner(LR, state=job.state, trials=8)
    for batch in tuner.steps(job.loader):
        tuner.report(job.train(batch))
        if tuner.num_steps == 5:
            break

    assert not tuner.searching
    assert {name: value.tolist() for name, value in job.model.state_dict().items()} == before
    assert tuned(job, tuner, epochs=1).num_trials > 4


def test_a_batch_that_is_none_does_not_end_the_pass():
    passes = ReplayedPasses(lambda: iter([1, None, 3]), 3)
    assert list(passes) == [1, None, 3]
    passes.load_state_dict({"position": 1})
    assert list(passes) == [None, 3]


class Counted(Sized):
    size = 80

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def test_a_pass_that_is_broken_off_takes_nothing_from_the_next_ones():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tuner, seen = Tuner({"lr": Range(1e-6, 1e-4, log=True)}, state=[model, optimizer], trials=2, plateau=0), []
    for _ in range(5):
        trained = 0
        for batch in tuner.steps(DataLoader(Counted(), 1)):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            tuner.report(loss)
            trained += not tuner.searching
            if trained == 45:
                break
        seen.append(trained)

    assert seen[1:] == [45] * 4


@pytest.mark.parametrize(
    ("space", "state", "said"),
    [
        ({"lr": (1e-5, 1)}, "model", "Pass a Range or a Choice"),
        ({"lr": Range(0, 1)}, "optimizer alone", "Pass the model beside the optimizer"),
        ({"betas": Range(0, 1)}, "adam", "nobody can set the tunable 'betas'"),
    ],
)
def test_what_no_branch_could_set_or_put_back_is_refused(space, state, said):
    model = nn.Linear(4, 1)
    kind = torch.optim.Adam if state == "adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-3)
    with pytest.raises(InputError, match=said):
        Tuner(space, state=[optimizer] if state == "optimizer alone" else [model, optimizer])
