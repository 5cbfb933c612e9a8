"""Operators and steps that nobody measured: laws, traced graphs, a calibration that goes on, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from headway.cli import main
from headway.core.errors import FormatError, InputError
from headway.cost.learned.cost_table import Host, read_table, step_costs
from headway.cost.learned.operators import Operator, OperatorModel
from headway.cost.runtime.graph import graph_of

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
    with pytest.raises(InputError, match=r"operator 'mn' was never measured\. Did you mean 'mm'"):
        model.seconds([replace(PRODUCT, name="mn")])
    with pytest.raises(InputError, match="the graph is empty"):
        model.seconds([])
    with pytest.raises(InputError, match="not above 0"):
        OperatorModel([PRODUCT], np.array([0.0]))


def test_a_traced_step_has_the_products_of_forward_and_backward():
    graph = graph_of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(32, 8),))
    products = [op.flops for op in graph.operators if op.flops]

    # Forward, gradient of both weights, gradient of the hidden layer: 2 m n k each.
    assert sorted(products) == sorted([2 * 32 * 8 * 16] * 2 + [2 * 32 * 16 * 4] * 3)
    assert all(source < target for source, target in zip(graph.src, graph.dst, strict=True))
    with pytest.raises(InputError, match="no parameter to train"):
        graph_of(nn.ReLU(), (torch.randn(2),))


def verb(capsys, *words):
    """Return the exit code of the command, and its answer or error."""
    with pytest.raises(SystemExit) as leaving:
        main(["cost", *words])
    printed = capsys.readouterr()
    return leaving.value.code, json.loads(printed.out) if leaving.value.code == 0 else printed.err


def test_a_calibration_goes_on_and_predicts_a_step(tmp_path, capsys, monkeypatch):
    path = str(tmp_path / "costs.jsonl")
    (tmp_path / "some_model.py").write_text(
        "import torch\ndef build(batch):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), torch.randn(batch, 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = str(torch.get_num_threads())
    assert verb(capsys, "calibrate", "-o", path, "--models", "4", "--threads", threads, "--json")[0] == 0
    whole = (tmp_path / "costs.jsonl").read_bytes()
    (tmp_path / "costs.jsonl").write_bytes(whole[:-20])  # killed while it wrote the last model
    code, again = verb(capsys, "calibrate", "-o", path, "--models", "4", "--threads", threads, "--json")
    assert (code, again["models"], again["measured_now"]) == (0, 4, 1)

    words = ["predict", "some_model:build", "--costs", path, "--threads", threads]
    code, small = verb(capsys, *words, "--batch", "8", "--json")
    _, large = verb(capsys, *words, "--batch", "512", "--json")

    assert code == 0
    assert small["interval"][0] <= small["step_s"] <= small["interval"][1]
    assert 0 < small["step_s"] < large["step_s"]
    assert {"addmm", "gelu_backward"} <= {row["name"] for row in small["operators"]}
    for more, message in [
        (["--batch", "0"], "--batch is 0"),
        (["--batch", "1", "--device", "cuda"], "unknown device 'cuda'"),
        (["--batch", "x"], "int"),
    ]:
        code, error = verb(capsys, *words, *more)
        assert code == 2
        assert message in error


def test_tables_of_other_hosts_and_damaged_ones_are_refused(tmp_path, capsys):
    path = tmp_path / "costs.jsonl"
    path.write_bytes(msgspec.json.encode(Host("elsewhere", "1.0", 1)) + b"\n")
    code, error = verb(capsys, "predict", "a:b", "--batch", "1", "--costs", str(path))
    assert code == 2
    assert "was measured with host 'elsewhere'" in error
    with pytest.raises(InputError, match="the table has 0 models"):
        step_costs(read_table(path)[1])
    path.write_bytes(path.read_bytes() + b'{"model": 1}\n')
    with pytest.raises(FormatError, match="line 2: Object missing required field `step_s`"):
        read_table(path)
