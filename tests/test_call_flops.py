"""Operations of a call that a recorded script made, and the MFU of its run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headway.compute import count_flops
from headway.compute.torch_calls import count_call
from headway.core.machine.child import said
from headway.cost.specs import shipped
from headway.trace.recording.run_facts import RunFacts
from headway.trace.rings.compute_facts import CallFlops, ComputeFacts
from headway.verbs.shared.run_flops import dtype_in_use
from tests.launching import headway_here
from tests.spawn import on_ranks
from tests.test_compute import MODELS, linear


def counted(module, *args, **kwargs) -> dict[str, object]:
    """Return what a forked child says, as a recording has it asked."""

    def work() -> bytes:
        torch.set_num_threads(1)
        return json.dumps(count_call(module, args, kwargs)).encode()

    return json.loads(said(work)[0])


@pytest.mark.parametrize("name", MODELS)
def test_a_child_counts_what_a_copy_of_the_model_does(name):
    make, inputs, _ = MODELS[name]
    model = make()

    assert counted(model, *inputs) == {"flops": count_flops(model, *inputs), "reason": "", "autocast": None}


class Doubled(torch.autograd.Function):
    """An autograd function of a script's own, with an argument that is no tensor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


@dataclass
class Answer:
    loss: torch.Tensor
    scores: torch.Tensor


class Scores(torch.nn.Module):
    """Two layers, called as libraries call theirs; what a test asks for besides is done between them."""

    def __init__(self, between=lambda x: x) -> None:
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(64, 32), torch.nn.Linear(32, 16)
        self.between = between
        self.offsets = [torch.zeros(32)]

    def forward(self, features=None, labels=None):
        scores = self.leave(self.between(self.enter(features) + self.offsets[0]))
        loss = functional.cross_entropy(scores.float(), labels)
        return Answer(loss, scores)


def in_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.relu(x)


COST = linear(8, 64, 32, first=True) + linear(8, 32, 16)

HELD = torch.ones(32)
BETWEEN = {
    "nothing": lambda x: x,
    "an autograd function of the script's own": lambda x: Doubled.apply(x, 2),
    "a tensor made on a device": lambda x: x + torch.arange(32, device="cuda:0", dtype=torch.bfloat16),
    "a tensor that the model does not own": lambda x: x * HELD,
    "a move and a cast": lambda x: x.to("cuda", torch.float16).cuda().half().to(torch.device("cuda", 0)).float(),
    "recomputation": lambda x: checkpoint(torch.relu, x, use_reentrant=False),
    "reentrant recomputation": lambda x: checkpoint(torch.relu, x, use_reentrant=True),
    "a view that is written to": lambda x: x.clone().mul_(2).view(-1, 2).flatten().view(8, 32),
    "a result that nobody uses": lambda x: x.split(16, 1)[0].repeat(1, 2),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_keyword_arguments_and_answers_with_fields_are_counted_with(name):
    labels = torch.zeros(8, dtype=torch.long)

    found = counted(Scores(BETWEEN[name]), features=torch.zeros(8, 64), labels=labels)

    assert (found["flops"], found["reason"]) == (COST, "")


def test_a_forward_that_casts_says_to_what_and_costs_as_much():
    found = counted(Scores(in_autocast), torch.zeros(8, 64), labels=torch.zeros(8, dtype=torch.long))

    assert found == {"flops": COST, "reason": "", "autocast": "bfloat16"}


def costs_of_wrappers() -> list[object]:
    """Count a model in its wrappers; on a rank: torch keeps a group of DTensors for as long as the thread lives."""
    model = Scores()
    given = torch.zeros(8, 64), torch.zeros(8, dtype=torch.long)
    in_place = Scores()
    in_place.compile(backend="eager")
    replica = torch.nn.parallel.DistributedDataParallel(model)
    split = Scores()
    fully_shard(split.leave)
    fully_shard(split)
    split(*given)  # its own layer stays gathered, the other is split again
    wrapped = [torch.compile(model, backend="eager"), in_place, replica, split]
    return [counted(each, *given)["flops"] for each in wrapped]


def test_wrappers_cost_what_they_hold():
    assert on_ranks(costs_of_wrappers, 1) == [[COST] * 4]


def two_places() -> torch.nn.Module:
    model = Scores()
    model.leave.to("meta")
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (two_places, "the parameters of Scores lie on cpu and meta"),
        (lambda: torch.nn.DataParallel(Scores()), "DataParallel holds parts of parameters, or shares its work"),
        (lambda: Scores(lambda x: x if x.sum() > 0 else -x), "RuntimeError: Tensor.item() cannot be called on meta"),
        (lambda: Scores(lambda x: x[:, :3]), "RuntimeError: a and b must have same reduction dim"),
    ],
)
def test_what_shapes_do_not_tell_has_a_reason(make, reason):
    found = counted(make(), torch.zeros(8, 64), labels=torch.zeros(8, dtype=torch.long))

    assert found["flops"] is None
    assert str(found["reason"]).startswith(reason)


A100, V100 = shipped().device("A100-SXM4-80GB"), shipped().device("V100-SXM2-16GB")
AUTOCAST = {"name": "compute.autocast", "applied": True, "facts": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("call", "facts", "device", "dtype"),
    [
        ({"dtype": "float32"}, {}, A100, "fp32"),
        ({"dtype": "float32"}, {"matmul_precision": "high"}, A100, "tf32"),
        ({"dtype": "float32"}, {"matmul_precision": "high"}, V100, "fp32"),
        ({"dtype": "float32", "has_convolutions": True}, {"cudnn_tf32": True}, A100, "tf32"),
        ({"dtype": "float32", "has_convolutions": True}, {"cudnn_tf32": False}, A100, "fp32"),
        ({"dtype": "bfloat16"}, {"matmul_precision": "high"}, A100, "bf16"),
        ({"dtype": "float32", "autocast": "float16"}, {}, A100, "fp16"),
        ({"dtype": "float32"}, {"applied": [AUTOCAST]}, A100, "bf16"),
    ],
)
def test_the_peak_is_that_of_the_dtype_in_use(call, facts, device, dtype):
    applied = facts.pop("applied", [])
    run = RunFacts.of({"applied": applied, "compute": dict(facts)})

    assert run.compute == ComputeFacts(**facts)
    assert dtype_in_use(CallFlops(**call), run, device) == dtype


SCRIPT = """
import torch

model = torch.compile(torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)),
                      fullgraph=True, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(24):
    for _ in range(3):
        x = torch.randn(32, 128)
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    model.eval()
    for _ in range(50):
        model(x)
"""
A_CALL = linear(32, 128, 256, first=True) + linear(32, 256, 8)


def test_the_mfu_of_a_recorded_run_is_hand_arithmetic(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = headway_here("run", "--json", "--out", tmp_path / "run", "--", tmp_path / "train.py")
    assert ran.returncode == 0, ran.stderr
    steps_per_s = json.loads(ran.stdout)["steps_per_s"]

    def why() -> SimpleNamespace:
        answer = json.loads(headway_here("why", tmp_path / "run", "--json").stdout)
        return SimpleNamespace(**{key: value for key, value in answer["compute"].items() if key != "facts"})

    on_host = why()
    assert (on_host.flops_per_step, on_host.mfu, on_host.peak_flops_per_s) == (3 * A_CALL, None, None)
    assert on_host.note == "no peak of fp32 is listed for cpu"
    assert on_host.flops_per_s == pytest.approx(3 * A_CALL * steps_per_s, rel=0.03)
    facts = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({**facts, "device_type": "NVIDIA A100-SXM4-80GB"}))
    on_device = why()
    assert on_device.mfu == pytest.approx(3 * A_CALL * steps_per_s / 19.5e12, rel=0.03)
    assert on_device.peak_flops_per_s == 19.5e12
    assert on_device.basis.startswith("the peak of fp32 on A100-SXM4-80GB; operations of a step of rank 0")
    screen = " ".join(headway_here("why", tmp_path / "run").stdout.split())
    assert "of the 19.5 TFLOP/s in fp32 of A100-SXM4-80GB; " in screen
    assert "of the 312 TFLOP/s that it has in bf16" in screen
