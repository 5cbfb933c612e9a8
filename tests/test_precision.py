"""Precision per operator and rank: indicator against Monte Carlo, allocator against every choice."""

import itertools
import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.catalog import RECORDS
from headway.core.errors import InputError
from headway.model import allocate
from headway.model.precision import allocation
from headway.model.precision.apply import int8_product, lower
from headway.model.precision.apply import precision as precision_remedy
from headway.model.precision.proposal import (
    NO_LINK,
    OperatorStatistics,
    OperatorTimes,
    PhaseOfRank,
    RankStep,
    TensorStatistics,
    omega_of,
    omega_table,
    operator_seconds,
    operator_times,
    planned,
    replayed_step_s,
    rest_of,
    rounding_variance,
)
from headway.model.remedies import PRECISIONS
from headway.sim.ddp.ddp_link import CollectiveLink
from tests.launching import headway
from tests.refusals import refused
from tests.remedy_context import applied
from tests.spawn import on_ranks


def statistics_of(values):
    return TensorStatistics(values.numel(), float(values.square().sum()), float(values.abs().max()))


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_the_variance_of_a_rounded_number_is_that_of_a_monte_carlo(precision):
    generator = torch.Generator().manual_seed(1)
    # Within one binade, where all numbers have the neighbours of the rms.
    values = 1 + 0.999 * torch.rand(400, generator=generator, dtype=torch.float64)
    step = float(values.max()) / 127 if precision == "int8" else 2.0**-7
    whole = values[:, None] / step
    rounded = torch.floor(whole + torch.rand(400, 10_000, generator=generator, dtype=torch.float64)) * step

    variance = (rounded - values[:, None]).square().mean()
    assert float(variance) == pytest.approx(rounding_variance(statistics_of(values), precision), rel=0.03)


@given(st.floats(1e-3, 1e3), st.integers(1, 5), st.integers(0, 99))
def test_the_indicator_falls_with_bits_and_grows_with_the_square_of_the_input(scale, depth, seed):
    generator = torch.Generator().manual_seed(seed)
    v, w, g = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (60, 80, 40))
    scale = 2.0 ** round(math.log2(scale))  # so that exponents move with the norms

    def operator(factor):
        return OperatorStatistics(statistics_of(v * factor), statistics_of(w), statistics_of(g), depth)

    low, middle, high = (omega_of(operator(1.0), precision, 5) for precision in PRECISIONS)
    assert low > middle > high == 0.0
    assert omega_of(operator(scale), "int8", 5) == pytest.approx(scale**2 * low, rel=1e-9)
    assert omega_table([operator(1.0)])[0][-1] == 0.0


def instance(seed, operators=None):
    """Return an indicator, a step over two unlike ranks with casts between neighbours, and a bound."""
    rng = np.random.default_rng(seed)
    n = operators or int(rng.integers(2, 9))
    omega = np.sort(rng.lognormal(0, 2, (n, 3)), axis=1)[:, ::-1] * [1, 0.1, 0]
    times = np.sort(rng.uniform(0.2, 2.0, (n, 3)), axis=1) * 1e-3
    chain = [OperatorTimes(str(i), tuple(times[i]), tuple(2 * times[i])) for i in range(n)]
    cast_s = rng.uniform(1e-5, 1e-4)  # what neighbours in two precisions cost: times do not add up
    other = ([1e-3] * n, [2e-3] * n)
    link = CollectiveLink(2e5, 1e9, 0.0)
    buckets = [list(range(n // 2, n)), list(range(n // 2))]

    def step_s(choice):
        forward, backward = operator_seconds(chain, choice)
        forward[0] += cast_s * sum(a != b for a, b in itertools.pairwise(choice))
        seconds = [other, (forward, backward)]
        return replayed_step_s([RankStep(1e-3, 1e-3, 1e-3)] * 2, seconds, buckets, [1 << 18, 1 << 19], link)

    low, high = step_s([0] * n), step_s([2] * n)
    return omega.tolist(), step_s, max(low, low + float(rng.uniform(0, 1)) * (high - low))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["few", "many"])
@pytest.mark.parametrize("seed", range(50))
def test_what_is_chosen_holds_bound_and_memory_and_loses_hardly_more_than_the_optimum(seed, way, monkeypatch):
    if way == "many":
        monkeypatch.setattr(allocation, "MOST_ENUMERATED", 0)
    omega, step_s, bound_s = instance(seed, operators=None if way == "few" else 12)
    room = (len(omega) * 3) // 2 if seed % 3 == 0 else 3 * len(omega)

    def fits(choice):
        return sum(choice) <= room

    choice = allocate(omega, step_s, bound_s=bound_s, fits=fits)

    def lost(picked):
        return sum(row[column] for row, column in zip(omega, picked, strict=True))

    rivals = itertools.product(range(3), repeat=len(omega)) if way == "few" else ([c] * len(omega) for c in range(3))
    better = [list(rival) for rival in rivals if 1.02 * lost(rival) < lost(choice) and fits(rival)]
    assert step_s(choice) <= bound_s
    assert fits(choice)
    assert all(step_s(rival) > bound_s for rival in better)


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_where_times_add_up_many_operators_are_solved_exactly(seed):
    rng = np.random.default_rng(seed)
    n = 14
    omega = (np.sort(rng.integers(0, 50, (n, 2)), axis=1)[:, ::-1]).astype(float)
    cost = rng.integers(1, 10, n).astype(float)
    bound = float(rng.integers(1, int(cost.sum()) + 1)) + 1.0

    choice = allocate(omega.tolist(), lambda picked: 1.0 + float(cost @ picked), bound_s=bound)

    best = np.full(int(bound), np.inf)  # a knapsack: least indicator at each time
    best[0] = 0.0
    for low, high, seconds in zip(omega[:, 0], omega[:, 1], cost.astype(int), strict=True):
        taken = np.full_like(best, np.inf)
        taken[seconds:] = best[: best.size - seconds] + high if seconds < best.size else np.inf
        best = np.minimum(best + low, taken)
    assert 1.0 + float(cost @ choice) <= bound
    assert sum(omega[i][column] for i, column in enumerate(choice)) <= 1.02 * best.min() + 1e-9


@pytest.mark.parametrize("column", range(3))
def test_all_operators_in_one_precision_cost_what_that_uniform_run_did(column):
    chain = [OperatorTimes(str(i), (0.1 * i, 0.2, 0.31), (0.4, 0.5 / 3, 0.6)) for i in range(6)]

    forward, backward = operator_seconds(chain, [column] * 6)

    assert forward == [operator.forward_s[column] for operator in chain]
    assert backward == [operator.backward_s[column] for operator in chain]


def test_the_slow_rank_decides_the_step_and_a_bucket_waits_for_both():
    link = CollectiveLink(1e6, 1e9, 0.0)  # 1 ms and 1 ms for 1 MB
    step = [RankStep(0.0, 0.0, 0.001)] * 2
    seconds = [([0.001], [0.002]), ([0.004], [0.002])]

    assert replayed_step_s(step, seconds, [[0]], [1_000_000], link) == pytest.approx(0.004 + 0.002 + 0.002 + 0.001)
    assert replayed_step_s(step, seconds, [], [], link) == pytest.approx(0.007)


test_bad_input_is_one_clear_error = refused(
    (lambda: allocate([[1.0, 2.0]], sum, bound_s=1.0), r"omega\[0\] is \[1.0, 2.0\]; it must not rise"),
    (lambda: allocate([[2.0, 1.0]], lambda choice: 3.0, bound_s=1.0), "no choice holds 1 s: .* takes 3 s"),
    (lambda: allocate([[2.0, 1.0]] * 14, lambda choice: 3.0, bound_s=1.0), "no choice holds 1 s"),
    (lambda: allocate([[2.0]], lambda choice: math.nan, bound_s=1.0), "step_s returned nan"),
    (lambda: allocate([[2.0]], sum, bound_s=-1.0), "bound_s is -1.0"),
    (lambda: allocate([[2.0]], lambda choice: 0.5, bound_s=1.0, fits=lambda choice: False), "no choice fits"),
    (lambda: operator_seconds([OperatorTimes("a", (math.inf,), (1.0,))], [0]), "has no int8 for a"),
    (lambda: TensorStatistics(4, math.nan, 1.0), "of no tensor with finite numbers"),
)


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 32),
        torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 8),
    )  # fmt: skip


@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_the_int8_linear_errs_at_most_six_tenths_of_torchs_dynamic_one(tail):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(256, 128, generator=generator)
    x = x if tail == "normal" else x * torch.randn(256, 128, generator=generator).abs().pow(2) * 2
    linear = torch.nn.Linear(128, 96, bias=False)
    with torch.no_grad():
        exact = linear(x)
        ours = (int8_product(x, linear.weight) - exact).square().mean().sqrt()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dynamic = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(linear), {torch.nn.Linear})
        theirs_error = (dynamic(x) - exact).square().mean().sqrt()

    assert ours <= 0.6 * theirs_error


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_gradients_of_a_lowered_linear_are_those_of_float32_to_a_few_bits(precision):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(48, 40), torch.randn(64, 48, requires_grad=True)
    linear(x).square().sum().backward()
    plain = [tensor.grad.clone() for tensor in (x, linear.weight, linear.bias)]
    for tensor in (x, linear.weight, linear.bias):
        tensor.grad = None
    undo = lower(linear, precision)
    linear(x).square().sum().backward()
    undo()

    for tensor, gradient in zip((x, linear.weight, linear.bias), plain, strict=True):
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad - gradient).norm() <= 0.03 * gradient.norm()


def test_products_of_any_other_module_are_lowered_in_its_own_forward():
    class Scores(torch.nn.Module):
        def forward(self, q, k):
            return torch.matmul(q, k.transpose(-1, -2)) @ k

    scores, q, k = Scores(), torch.randn(2, 3, 16, 32), torch.randn(2, 1, 16, 32)
    plain = scores(q, k)
    for precision in ("bf16", "int8"):
        undo = lower(scores, precision)
        error = (scores(q, k) - plain).norm() / plain.norm()
        undo()
        assert 0 < error < 0.05
    assert torch.equal(scores(q, k), plain)


def test_applied_and_taken_back_leaves_no_trace_and_keeps_the_state_dict():
    model, x = model_of(), torch.randn(16, 1, 4, 4)
    plain, names, attributes = model(x), list(model.state_dict()), [set(vars(m)) for m in model.modules()]
    model.load_state_dict(model_of().state_dict())
    plan = {"operators": {"0": {"0": "bf16", "3": "int8", "5": "bf16"}}}
    with applied(precision_remedy, plan, allow="lossy") as context:
        lowered = model(x)

        assert not torch.equal(lowered, plain)
        assert context.outcomes[-1].facts["operators"] == {"bf16": 2, "int8": 1}
        assert list(model.state_dict()) == names
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    model.load_state_dict(model_of().state_dict())
    assert torch.equal(model(x), plain)
    assert [set(vars(m)) for m in model.modules()] == attributes


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ({"0": {"33": "bf16"}}, "has no operator '33': the plan is for another model"),
        ({"0": {"4": "bf16"}}, "4 in bf16: BatchNorm1d is never lowered"),
        ({"0": {"0": "int8"}}, "0 in int8: convolutions"),
        ({"0": {}, "1": {"3": "bf16"}}, "names rank 1, and the job has 1"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_changes_nothing(operators, message):
    model, x = model_of(), torch.randn(16, 1, 4, 4)
    plain = model(x)
    model.load_state_dict(model_of().state_dict())
    with applied(precision_remedy, {"operators": operators}, allow="lossy") as context:
        same = model(x)

    assert torch.equal(same, plain)
    assert message in context.outcomes[-1].reason


@pytest.mark.parametrize(
    ("operators", "message"),
    [({"one": {}}, "names rank 'one'"), ({"0": {"a": "bf15"}}, "unknown precision of operator 'a' 'bf15'")],
)
def test_a_plan_says_ranks_and_precisions(operators, message):
    with pytest.raises(InputError, match=message):
        RECORDS["model.precision"].read({"operators": operators})
    assert RECORDS["model.precision"].allow == "lossy"


def train_on_ranks(operators):
    """Train a model under a plan on this rank; return what was said and the parameters."""
    model = torch.nn.parallel.DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(16, 1, 4, 4, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    with applied(precision_remedy, {"operators": operators}, allow="lossy") as context:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    said_last = context.outcomes[-1]
    return getattr(said_last, "reason", ""), torch.cat([p.detach().ravel() for p in model.parameters()]).tolist()


@pytest.mark.slow
def test_ranks_of_unlike_precision_train_together_and_refuse_together():
    mixed = on_ranks(train_on_ranks, 2, {"0": {"3": "float32"}, "1": {"3": "int8", "5": "bf16"}})
    refused = on_ranks(train_on_ranks, 2, {"0": {"3": "bf16"}, "1": {"nowhere": "int8"}})
    plain = on_ranks(train_on_ranks, 2, {})

    assert [reason for reason, _ in mixed] == ["", ""]
    assert mixed[0][1] == mixed[1][1] != plain[0][1]
    assert all("rank 1: " in reason and "'nowhere'" in reason for reason, _ in refused)
    assert refused[0][1] == refused[1][1] == plain[0][1]


def phases_of(speeds, slow_lowered=0.4):
    """Return phases of ranks whose steps take `speeds` times as long, with six operators; fewer bits are faster."""
    names = [f"layer{i}" for i in range(4)]
    factors = {"float32": 1.0, "bf16": slow_lowered, "int8": slow_lowered / 2}
    row = [(100, 50.0, 3.0)]
    tables = {name: {"input": row, "weight": row, "gradient": row} for name in names}

    def phase(precision, rank, slow):
        forward, backward = (dict.fromkeys(names, slow * base_s * factors[precision]) for base_s in (1e-3, 2e-3))
        step = [sum(forward.values()) + 1e-3 * slow, sum(backward.values()) + 1e-3 * slow, 1e-3 * slow]
        of_float32 = precision == "float32"
        return PhaseOfRank(
            rank, names, {}, forward, backward, dict.fromkeys(names, 1000), tables if of_float32 else {}, step,
            sum(step) if of_float32 else None, [(1 << 14, 1e-4), (1 << 22, 1e-3)],
        )  # fmt: skip

    return {p: {rank: phase(p, rank, slow) for rank, slow in enumerate(speeds)} for p in PRECISIONS}


def test_only_the_slow_rank_is_lowered_and_in_fewer_operators_than_a_uniform_plan():
    choice = planned(phases_of([1.0, 1.6]))
    lowered = [(row["rank"], row["name"]) for row in choice.operators if row["precision"] != "float32"]
    even = planned(phases_of([1.0, 1.0], slow_lowered=2.5))

    assert lowered
    assert {rank for rank, _ in lowered} == {1}
    assert choice.step_s < choice.base_step_s
    assert choice.interval[0] < choice.step_s < choice.interval[1]
    assert choice.omega == choice.omega_bound > 0
    assert len(lowered) < len(choice.operators) // 2 or {row["precision"] for row in choice.operators[4:]} != {"int8"}
    assert all(row["precision"] == "float32" for row in even.operators)
    assert (even.omega, even.step_s) == (0.0, even.base_step_s)


@pytest.mark.parametrize("column", range(3))
def test_operators_of_phases_add_up_to_each_ranks_uniform_step(column):
    phases = phases_of([1.0, 1.6])
    names = phases["float32"][1].names
    times, rest = operator_times(phases, 1, names), rest_of(phases["float32"][1], names)

    seconds = operator_seconds(times, [column] * len(names))
    step_s = replayed_step_s([rest], [seconds], [], [], NO_LINK)

    assert step_s == pytest.approx(sum(phases[PRECISIONS[column]][1].step_s), rel=1e-6)


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(32, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_the_command_measures_a_script_and_its_plan_is_applied_by_a_run(tmp_path):
    script, plan_path, lowered = tmp_path / "train.py", tmp_path / "plan.json", tmp_path / "lowered.json"
    script.write_text(SCRIPT)
    measured = ("--out", tmp_path / "phases", "-o", plan_path, "--json", "--", script)
    done = headway("model", "precision", *measured)
    answer = json.loads(done.stdout)
    plan = json.loads(plan_path.read_text())
    remedy = {"name": "model.precision", "parameters": {"operators": {"0": {"2": "bf16"}}}, "allow": "lossy"}
    lowered.write_text(json.dumps(plan | {"remedies": [remedy]}))
    run = headway("run", "--apply", lowered, "--out", tmp_path / "run", "--quiet", "--", script)

    assert done.returncode == 0, done.stderr
    assert answer["schema"] == "headway.model-precision/1"
    assert [(row["rank"], row["name"]) for row in answer["operators"]] == [(0, "0"), (0, "2")]
    assert answer["interval"][0] <= answer["step_s"] <= answer["interval"][1]
    assert answer["omega_bound"] <= answer["omega"]
    assert run.returncode == 0, run.stderr
    applied_rows = json.loads((tmp_path / "run" / "applied" / "r0.json").read_text())
    assert '"bf16": 1' in json.dumps(applied_rows)
