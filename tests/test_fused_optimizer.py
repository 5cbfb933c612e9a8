"""The fused form of an optimizer as a remedy: found, predicted, applied; what the script holds and saves stays."""

import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from msgspec import convert
from torch import nn

from headway.compute.apply import fuse_optimizer
from headway.cost.fused import ADAPTIVE, OF_CALLS, fused_share
from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from headway.ledger.answers.script_causes import fused_share_of
from headway.ledger.cause import SampledLine
from headway.runtime.script.compute_facts import model_facts, optimizer_facts
from headway.trace.rings.rank_tables import ComputeFacts, ModelFacts, OptimizerFacts
from headway.why.explanation import explain
from tests.launching import headway, script
from tests.remedy_context import applied
from tests.test_causes import FAULTS

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(60)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(60):
    loss = model(torch.randn(4, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
"""

CLIPPED = SCRIPT.replace("    optimizer.step()\n", """    for parameter in model.parameters():
        parameter.grad.clamp_(-1, 1)
        time.sleep(0.0005)
    optimizer.step()
""").replace("import torch\n", "import time\nimport torch\n", 1)  # fmt: skip

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"))


def trained(make, steps=6, context=None, place="cpu"):
    """Train a small model; in mid-run its state is loaded anew. Return its parameters and the optimizer's state."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(place)
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8).to(place)).square().mean().backward()
        optimizer.step()
        if context is not None:
            context.after(steps=step + 1)
        if step == 3:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    return [parameter.detach() for parameter in model.parameters()], optimizer.state_dict()


def dtypes(row):
    return {name: value.dtype for name, value in row.items()}


@pytest.mark.parametrize("place", ["cpu", CUDA])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fused_updates_train_the_same_and_leave_what_the_script_saves_as_it_is(make, place):
    if make is OPTIMIZERS["Adagrad"] and place == "cuda":
        pytest.skip("torch has no fused Adagrad on a CUDA device")
    plain, state = trained(make, place=place)
    with applied(fuse_optimizer, {}, "result-equivalent") as context:
        fused, fused_state = trained(make, context=context, place=place)

    assert context.outcomes[-1].facts["updates"] == 6
    torch.testing.assert_close(fused, plain)
    assert fused_state["param_groups"] == state["param_groups"]
    assert fused_state["state"].keys() == state["state"].keys()
    for row, other in zip(fused_state["state"].values(), state["state"].values(), strict=True):
        assert row.keys() == other.keys()
        kinds = [{name: (value.dtype, value.device) for name, value in one.items()} for one in (row, other)]
        assert kinds[0] == kinds[1]
        assert row.get("step") == other.get("step")
    assert all(
        torch.equal(one, other) for one, other in zip(trained(make, place=place)[0], plain, strict=True)
    )  # undone


def chosen_by_the_script(params):
    return torch.optim.AdamW(params, lr=1e-3, foreach=True)


def without_a_fused_form(params):
    return torch.optim.RMSprop(params, lr=1e-3)


@pytest.mark.parametrize("make", [chosen_by_the_script, without_a_fused_form])
def test_where_there_is_nothing_to_fuse_the_remedy_says_so_and_results_are_equal_bit_for_bit(make):
    plain, _ = trained(make)
    with applied(fuse_optimizer, {}, "result-equivalent") as context:
        found, _ = trained(make, context=context)

    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert "leaves its form to torch" in context.outcomes[-1].json()["reason_not_applied"]


def test_a_parameter_that_learns_later_has_no_momentum_yet_and_its_update_is_left_to_the_loop():
    def unfrozen():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            model[0].requires_grad_(step >= 3)
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    plain = unfrozen()
    with applied(fuse_optimizer, {}, "result-equivalent"):
        torch.testing.assert_close(unfrozen(), plain)


@pytest.mark.parametrize("turned", ["parameter", "gradient", "state"])
def test_what_comes_to_lie_otherwise_behind_some_updates_is_looked_at_anew(turned):
    def turning():
        torch.manual_seed(5)
        layer = nn.Conv2d(3, 4, 2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            layer(torch.randn(2, 3, 5, 5)).square().mean().backward()
            weight = layer.weight
            if step == 3:
                part = {"parameter": weight.data, "gradient": weight.grad, "state": None}[turned]
                part = optimizer.state[weight]["exp_avg"] if part is None else part
                part.data = part.contiguous(memory_format=torch.channels_last)
                if turned == "parameter":
                    weight.data = part
            optimizer.step()
        return [parameter.detach().contiguous() for parameter in layer.parameters()]

    plain = turning()
    with applied(fuse_optimizer, {}, "result-equivalent"):
        torch.testing.assert_close(turning(), plain)


def test_sparse_gradients_are_left_to_the_loop():
    def make(params):
        return torch.optim.SGD(params, lr=0.1)

    def embedded():
        torch.manual_seed(1)
        table = nn.Embedding(9, 4, sparse=True)
        optimizer = make(table.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            table(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        return table.weight.detach()

    plain = embedded()
    with applied(fuse_optimizer, {}, "result-equivalent"):
        assert torch.equal(embedded(), plain)


@pytest.mark.parametrize("unlike", ["gradient", "state", "sliced"])
def test_what_lies_in_memory_unlike_its_parameter_is_left_to_the_loop(unlike):
    """Torch's fused update on a CPU would mix up its numbers."""

    def updated():
        torch.manual_seed(2)
        layout = torch.channels_last if unlike == "gradient" else torch.contiguous_format
        weight = torch.randn(4, 3, 2, 4)[..., :: 2 if unlike == "sliced" else 1].detach().requires_grad_()
        weight.grad = torch.randn(weight.shape).to(memory_format=layout)
        optimizer = torch.optim.Adam([weight], lr=0.1)
        optimizer.step()
        if unlike == "state":
            states = optimizer.state[weight]
            states["exp_avg"] = states["exp_avg"].to(memory_format=torch.channels_last)
        first = weight.detach().clone()
        optimizer.step()
        return first, weight.detach().clone()

    plain = updated()
    with applied(fuse_optimizer, {}, "result-equivalent"):
        torch.testing.assert_close(updated(), plain)


def test_facts_say_what_decides_the_cost_of_a_step():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).to(memory_format=torch.channels_last)
    images = torch.randn(5, 3, 6, 6)
    model(images).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.autocast("cpu", torch.bfloat16):
        facts = convert(model_facts(model, (images,)), ModelFacts)
    update = convert(optimizer_facts(optimizer), OptimizerFacts)

    assert (facts.num_elements, facts.parameter_dtypes) == (4 * 27 + 4 + 2 * 64 + 2, {"float32": 242})
    assert (facts.input_dtypes, facts.batch_size, facts.autocast) == (("float32",), 5, "bfloat16")
    assert (facts.num_convolution_weights, facts.num_channels_last, facts.is_compiled) == (1, 1, False)
    assert (update.name, update.num_tensors, update.num_elements, update.device_type) == ("SGD", 4, 242, "cpu")
    assert (update.is_fused, update.is_foreach, update.has_momentum, update.is_plain) == (None, None, True, True)
    words = ComputeFacts(models=(facts,), optimizers=(update,)).words()
    assert "autocast to bfloat16; eager; channels last; SGD, neither fused nor foreach" in words


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "AdamW", "device_type": "cuda"}, "in a few kernels"),
        ({"name": "AdamW", "device_type": "cpu", "is_fused": False}, "says itself"),
        ({"name": "Adam", "device_type": "cpu", "is_plain": False}, "unlike their gradients"),
        ({"name": "SGD", "device_type": "cpu", "num_tensors": 1, "num_elements": 1 << 20}, "no fused form"),
        ({"name": "lib.Lion", "device_type": "cpu"}, "lib.Lion has no fused form"),
    ],
)
def test_what_is_not_proposed_has_a_reason(given, said):
    assert said in fused_share_of(OptimizerFacts(**given))


def test_shares_are_ordered_and_below_one():
    for share in (*ADAPTIVE.values(), *OF_CALLS.values()):
        assert 0 < share.low < share.mid < share.high < 1
    assert fused_share("SGD", mean_elements=64) == OF_CALLS[False]


def test_a_run_names_the_optimizer_and_a_plan_predicts_applies_and_ends_the_cause(tmp_path):
    job = script(tmp_path, SCRIPT)
    for attempt in range(4):  # a host that stalls in the middle of 60 steps widens the interval, and nothing is planned
        assert headway("run", "--out", tmp_path / f"plain{attempt}", "--", job).returncode == 0
        found = explain([tmp_path / f"plain{attempt}"], allow=("result-equivalent",))
        if found.plan.chosen:
            break
    [cause] = [cause for cause in found.causes if cause.cause == "compute.optimizer"]
    [row] = [row for row in found.plan.proposals if row.name == "compute.fused_optimizer"]
    plan = tmp_path / "plan.json"
    found.plan.save(plan)
    assert headway("run", "--out", tmp_path / "fused", "--apply", plan, "--", job).returncode == 0
    after = explain([tmp_path / "fused"])

    assert cause.script == "torch.optim.AdamW(..., fused=True)"
    assert cause.predicted_speedup == row.predicted_speedup > 1.1
    assert row.interval[0] < row.predicted_speedup < row.interval[1]
    assert found.to_json()["compute"]["facts"]["optimizers"][0]["num_tensors"] == 120
    assert found.plan.chosen == ("compute.fused_optimizer",)
    assert after.run.facts.in_force["compute.fused_optimizer"]["updates"] == 60
    assert not [cause for cause in after.causes if cause.cause == "compute.optimizer"]


def test_a_loop_over_gradients_is_a_cause_of_its_own_and_no_part_of_the_update(tmp_path):
    job = script(tmp_path, CLIPPED)
    assert headway("run", "--out", tmp_path / "run", "--", job).returncode == 0
    causes = {cause.cause: cause for cause in explain([tmp_path / "run"]).causes}

    loop = causes["compute.gradients"]
    assert loop.lost_device_s > 60 * 120 * 0.0005
    assert re.search(r"sleep at job\.py:\d+|job\.py:\d+", loop.where)
    assert "between a backward and the update" in loop.evidence
    update = causes.get("compute.optimizer")
    assert update is None or update.lost_device_s < loop.lost_device_s / 2


def test_gradients_that_a_script_reduces_itself_are_communication_told_of_buckets():
    ledger = Ledger.of(FAULTS["comm.exposed"].make())
    wait = ledger.spans["comm.wait"]
    lines = (SampledLine("job.py:9", "all_reduce", 10**12, 90),)
    spans = {name: span for name, span in ledger.spans.items() if name != "comm.wait"}
    many = replace(wait, count=20 * ledger.steps * ledger.devices)
    by_hand = replace(ledger, spans={**spans, "comm.collective": many}, gradient_lines=lines)
    causes = {cause.cause: cause for cause in find_causes(by_hand)}

    assert "each step makes 20 of them" in causes["comm.exposed"].evidence
    assert "DistributedDataParallel" in causes["comm.exposed"].script
    assert "compute.gradients" not in causes
