"""Operators and steps that nobody measured: laws, traced graphs, a calibration that goes on, what is refused."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from headway.core.errors import BarMissedError, FormatError, InputError
from headway.cost.cost_table import (
    CostTable,
    MeasuredHost,
    MeasuredModel,
    ObservedStep,
    Operator,
    OperatorModel,
    check_host,
    read_table,
    step_costs,
)
from headway.cost.torch_calibration import graph_of, here, made_model, measure, measured_now, quiet_s
from tests.launching import code_and_json
from tests.runs_made import MS, RunMaker, write_folder

PRODUCT = Operator("mm", "", 2e6, 8e4, 4e4, (100, 100, 1, 1, 100, 100))


def known(n=12, seed=0):
    """Return operators whose time is a power of their work, and the seconds."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.3, 3, n)
    operators = [replace(PRODUCT, flops=2e6 * k, read_bytes=8e4 * k, written_bytes=4e4 * k) for k in scale]
    return operators, 1e-4 * scale**0.9


def test_predictions_are_positive_follow_the_measurements_and_ignore_their_order():
    operators, seconds = known()
    model = OperatorModel(operators, seconds)
    found = model.seconds(operators)

    assert (found > 0).all()
    np.testing.assert_allclose(found, seconds, rtol=0.05)
    np.testing.assert_allclose(OperatorModel(operators[::-1], seconds[::-1]).seconds(operators), found, rtol=1e-6)


def test_extents_of_one_behind_the_others_change_nothing():
    operators, seconds = known()
    padded = [replace(op, extents=(*op.extents, 1, 1)) for op in operators]
    expected = OperatorModel(operators, seconds).seconds([PRODUCT])

    np.testing.assert_allclose(OperatorModel(padded, seconds).seconds([PRODUCT]), expected)


def test_a_pointwise_operator_without_measurements_is_predicted_by_its_kind_and_others_are_refused():
    model = OperatorModel([replace(PRODUCT, name="relu", kind="pointwise"), PRODUCT], np.array([1e-5, 1e-4]))

    assert model.seconds([replace(PRODUCT, name="tanh", kind="pointwise")])[0] == pytest.approx(1e-5)
    with pytest.raises(InputError, match=r"operator 'mn' in float32 was never measured\. Did you mean 'mm'"):
        model.seconds([replace(PRODUCT, name="mn")])
    with pytest.raises(InputError, match="the graph is empty"):
        model.seconds([])
    with pytest.raises(InputError, match="not above 0"):
        OperatorModel([PRODUCT], np.array([0.0]))


def test_precisions_are_not_mixed_and_one_that_was_not_measured_is_named():
    half = replace(PRODUCT, dtype="bfloat16")
    model = OperatorModel([PRODUCT, half], np.array([1e-4, 4e-4]))

    np.testing.assert_allclose(model.seconds([half, PRODUCT]), [4e-4, 1e-4])
    with pytest.raises(
        InputError, match=r"'mm' in float64 was never measured\. Measured are bfloat16, float32; .*float64"
    ):
        model.seconds([replace(PRODUCT, dtype="float64")])


def made_table(factor=1.2, call_s=3e-6, observed=()):
    """Return a table of models whose steps are `factor` of their operators and `call_s` more per call."""
    models = []
    for number in range(8):
        operators, seconds = known(6, number)
        calls = [1 + (number + k) % 3 for k in range(6)]
        step_s = factor * float(seconds @ np.array(calls)) + call_s * sum(calls)
        models.append(MeasuredModel(number, step_s, operators, seconds.tolist(), calls, 0))
    return CostTable(MeasuredHost("here", "1", 1, "x"), models, list(observed))


def test_steps_follow_their_operators_and_calls_and_what_was_observed_widens_the_interval():
    learned = step_costs(made_table(1.2, 100e-6 / 12))
    assert learned.step(1e-3, 40)[0] == pytest.approx(1.2e-3 + 40 * 100e-6 / 12, rel=0.05)
    step_s, (low, high) = learned.step(1e-3, 40)
    assert low <= step_s <= high

    seen = step_costs(made_table(1.2, 100e-6 / 12, [ObservedStep("a", 1.0, 2.0), ObservedStep("b", 1.0, 1.0)]))
    wide_s, (lowest, highest) = seen.step(1e-3, 40)

    assert (wide_s, lowest) == (step_s, low)
    assert highest == pytest.approx(2 * step_s)


def test_a_traced_step_has_the_products_of_forward_and_backward():
    graph = graph_of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(32, 8),))
    products = [op.flops for op in graph.operators if op.flops]

    # Forward, gradient of both weights, gradient of the hidden layer: 2 m n k each.
    assert sorted(products) == sorted([2 * 32 * 8 * 16] * 2 + [2 * 32 * 16 * 4] * 3)
    assert all(source < target for source, target in zip(graph.src, graph.dst, strict=True))
    with pytest.raises(InputError, match="no parameter to train"):
        graph_of(nn.ReLU(), (torch.randn(2),))


RECURRENT = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.drop = torch.nn.LSTM(16, 16, batch_first=True), torch.nn.Dropout(0.1)
    def forward(self, x):
        return self.drop(self.lstm(x[:, 1:])[0])
def build(batch):
    return Net(), torch.randn(batch, 9, 16)
"""


def test_what_a_table_lacks_is_timed_in_the_models_own_step_or_estimated_by_its_bytes():
    module, inputs = nn.Sequential(nn.Linear(32, 32), nn.AvgPool1d(2), nn.Dropout(0.5)), (torch.randn(64, 32),)
    graph = graph_of(module, inputs)
    relu = replace(PRODUCT, name="relu", kind="pointwise")
    learned = OperatorModel([relu, replace(relu, read_bytes=8e5, written_bytes=4e5)], np.array([1e-5, 1e-4]))
    lacking = learned.unmeasured(graph.operators)
    names = {op.name for op in lacking}

    assert {"addmm", "avg_pool2d"} <= names  # and not mul, which relu stands in for
    assert "mul" not in names
    measured = measured_now(module, inputs, graph, lacking)
    assert {op.name for op in measured} >= {"addmm", "avg_pool2d"}
    assert all(seconds > 0 for seconds in measured.values())
    assert measured_now(module, inputs, graph, lacking, 0.0) == {}
    whole = learned.with_more(lacking, learned.by_bytes(lacking))
    assert whole.unmeasured(graph.operators) == []
    assert (whole.seconds(graph.operators) > 0).all()
    small, large = learned.by_bytes([PRODUCT, replace(PRODUCT, read_bytes=8e5, written_bytes=4e5)])
    assert large > 3 * small


def verb(*words, room=("cost",)):
    """Return the exit code of the command, and its answer or error."""
    return code_and_json(*room, *words)


@pytest.mark.slow
def test_a_calibration_goes_on_and_predicts_a_step(tmp_path, monkeypatch):
    path = str(tmp_path / "costs.jsonl")
    (tmp_path / "some_model.py").write_text(
        "import torch\ndef build(batch):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), torch.randn(batch, 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = str(torch.get_num_threads())
    assert verb("calibrate", "-o", path, "--models", "4", "--threads", threads, "--json")[0] == 0
    whole = (tmp_path / "costs.jsonl").read_bytes()
    (tmp_path / "costs.jsonl").write_bytes(whole[:-20])  # killed while it wrote the last model
    code, again = verb("calibrate", "-o", path, "--models", "4", "--threads", threads, "--json")
    assert (code, again["models"], again["measured_now"]) == (0, 4, 1)

    words = ["predict", "some_model:build", "--costs", path, "--threads", threads]
    code, small = verb(*words, "--batch", "8", "--json")
    _, large = verb(*words, "--batch", "512", "--json")

    assert code == 0
    assert small["interval"][0] <= small["step_s"] <= small["interval"][1]
    assert 0 < small["step_s"] < large["step_s"]
    assert {"addmm", "gelu_backward"} <= {row["name"] for row in small["operators"]}
    (tmp_path / "recurrent.py").write_text(RECURRENT)
    code, found = verb("predict", "recurrent:build", "--costs", path, "--threads", threads, "--batch", "4", "--json")
    assert code == 0
    assert "measured now, since the table lacks them: " in found["basis"]
    assert "slice" in found["basis"]
    assert found["interval"][0] <= found["step_s"] <= found["interval"][1]
    for more, message in [
        (["--batch", "0"], "--batch is 0"),
        (["--batch", "1", "--device", "cuda"], "unknown device 'cuda'"),
        (["--batch", "x"], "int"),
    ]:
        code, error = verb(*words, *more)
        assert code == 2
        assert message in error


@pytest.mark.slow
def test_a_run_without_steps_is_planned_by_learned_times_and_the_next_run_judges_them(tmp_path, monkeypatch):
    (tmp_path / "learned_model.py").write_text(
        "import torch\ndef build(batch):\n    return torch.nn.Linear(64, 64), torch.randn(batch, 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = torch.get_num_threads()
    host = here(threads)
    models = [measure(number, *made_model(number)) for number in (0, 3, 6, 9)]
    table = tmp_path / "costs.jsonl"
    table.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (host, *models)))
    # The second run takes a second per step, which no interval of a small layer holds.
    short, long = (RunMaker(ranks=1, steps=steps, compute_ns=1000 * MS).make() for steps in (2, 12))
    runs = [str(write_folder(run, tmp_path / name)) for name, run in (("short", short), ("long", long))]
    for folder in map(Path, runs):
        facts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**facts, "host": host.host}))
    words = ["--model", "learned_model:build", "--batch", "64", "--costs", "costs.jsonl", "--threads", str(threads)]

    code, plan = verb("plan", runs[0], *words, "--json", room=())
    facts = json.loads((folder / "run.json").read_text())
    for change, reason in [
        ({"host": "elsewhere"}, "the run on elsewhere, cpu"),
        ({"loaders": {"0": {"batch_size": 8}}}, "the run's loaders have 8"),
        ({"env": {"OMP_NUM_THREADS": "63"}}, "the run had 63"),
        (
            {"host_load": {"cores": 2, "cores_available": 2, "other_cores": 1.9, "own_cores": 0.9, "readings": 9}},
            "beside",
        ),
    ]:
        (folder / "run.json").write_text(json.dumps(facts | change))
        _, compared = verb("compare", *runs, "--json", room=())
        assert compared["predicted"]["widened"].startswith("its table was not widened: ")
        assert reason in compared["predicted"]["widened"]
    assert not read_table(table).observed
    (folder / "run.json").write_text(json.dumps(facts))
    assert code == BarMissedError.exit_code
    assert "no recording has step times" in plan["note"]
    _, compared = verb("compare", *runs, "--json", room=())
    _, again = verb("compare", *runs, "--json", room=())
    found = compared["predicted"]
    assert found["predicted_s"] == plan["learned"]["step_s"]
    assert found["measured_s"] == pytest.approx(1.0, rel=0.01)
    assert found["widened"].endswith("is widened by it")
    assert again["predicted"]["widened"].endswith("by this run before")
    assert len(read_table(table).observed) == 1
    _, wider = verb("predict", "learned_model:build", *words[2:], "--json")
    assert wider["interval"][1] >= 0.9
    _, recorded = verb("plan", runs[1], *words, "--json", room=())
    assert "recorded" in recorded["note"]
    assert "learned" not in recorded


@pytest.mark.parametrize(
    ("field", "value"), [("host", "b"), ("torch", "0.1"), ("threads", 63), ("cpu", "Z80"), ("device", "cuda")]
)
def test_a_table_measured_elsewhere_is_refused_by_name(field, value, tmp_path):
    host = here(torch.get_num_threads())

    check_host(host, host, tmp_path)
    with pytest.raises(InputError, match=f"was measured with {field} {value!r}; here it is"):
        check_host(msgspec.structs.replace(host, **{field: value}), host, tmp_path)


def test_a_call_whose_times_differ_too_much_is_dropped_and_a_steady_one_is_not():
    turns = itertools.cycle([100, 100_000])

    assert quiet_s(lambda: sum(range(next(turns))), 0.01) is None
    assert quiet_s(lambda: sum(range(next(turns))), 0.01, limit=float("inf")) > 0


def test_tables_of_other_hosts_and_damaged_ones_are_refused(tmp_path):
    path = tmp_path / "costs.jsonl"
    path.write_bytes(msgspec.json.encode(MeasuredHost("elsewhere", "1.0", 1, "x")) + b"\n")
    code, error = verb("predict", "a:b", "--batch", "1", "--costs", str(path))
    assert code == 2
    assert "was measured with host 'elsewhere'" in error
    with pytest.raises(InputError, match="the table has 0 models"):
        step_costs(read_table(path))
    path.write_bytes(b'{"host": "a", "torch": "1.0"}\n')
    with pytest.raises(FormatError, match="line 1: Object missing required field `threads`"):
        read_table(path)
    for line, message in [
        (b'{"kind": "model", "model": 1}', "line 2: Object missing required field `step_s`"),
        (msgspec.json.encode(MeasuredModel(1, 1e-3, [PRODUCT], [0.0], [1], 0)), "line 2: a time is not above 0"),
        (msgspec.json.encode(MeasuredModel(1, 1e-3, [PRODUCT], [], [1], 0)), "line 2: its lists differ in length"),
        (msgspec.json.encode(ObservedStep("a", -1.0, 1.0)), "line 2: a time is not above 0"),
    ]:
        path.write_bytes(msgspec.json.encode(MeasuredHost("elsewhere", "1.0", 1, "x")) + b"\n" + line + b"\n")
        with pytest.raises(FormatError, match=message):
            read_table(path)
