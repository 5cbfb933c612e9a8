"""Operations of a call that a recorded script made, and the MFU of its run."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from headway.compute import count_flops
from headway.compute.causes import causes as causes_by_hand
from headway.compute.torch_calls import count_call
from headway.core.machine.child import said
from headway.core.units import format_fraction
from headway.cost.specs import shipped
from headway.ledger.answers.ledger import Ledger
from headway.ledger.live_ledger import LiveLedger
from headway.ledger.live_mfu import LiveMfu
from headway.runtime.run_folder.live_feed import finalised
from headway.runtime.run_folder.status import RunStatus
from headway.trace.recording.run_facts import RankMemory, RunFacts
from headway.trace.rings.rank_tables import CallFlops, ComputeFacts, ModelFacts, Rehearsed
from headway.why.model_flops import dtype_in_use
from tests.launching import headway, headway_here, script
from tests.runs_made import MS, RunMaker
from tests.spawn import on_ranks
from tests.test_compute import MODELS, linear


def counted(module, *args, **kwargs) -> dict[str, object]:
    """Return what a forked child says, as a recording has it asked."""

    def work() -> bytes:
        torch.set_num_threads(1)
        return json.dumps(count_call(module, args, kwargs)).encode()

    return json.loads(said(work)[0])


LARGE = pytest.param("ResNet-50", marks=pytest.mark.slow)  # large: the others hold the law


@pytest.mark.parametrize("name", [LARGE if name == "ResNet-50" else name for name in MODELS])
def test_a_child_counts_what_a_copy_of_the_model_does(name):
    make, inputs, _ = MODELS[name]
    model = make()

    found = counted(model, *inputs)

    assert (found["flops"], found["reason"], found["autocast"]) == (count_flops(model, *inputs), "", None)


class Attends(torch.nn.Module):
    """A layer of attention, written out or by torch's call, that may be recomputed."""

    def __init__(self, *, by_hand: bool, again: bool) -> None:
        super().__init__()
        self.layer, self.by_hand, self.again = torch.nn.Linear(32, 32), by_hand, again

    def forward(self, x):
        x = checkpoint(self.layer, x, use_reentrant=False) if self.again else self.layer(x)
        if not self.by_hand:
            return functional.scaled_dot_product_attention(x, x, x)
        scores = x @ x.transpose(-2, -1)
        late = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(late, -1e9).softmax(-1) @ x


def test_forwards_that_run_again_and_scores_that_lie_in_memory_are_counted_apart():
    x = torch.randn(2, 3, 64, 32)
    plain, again = (counted(Attends(by_hand=True, again=row), x) for row in (False, True))
    fused = counted(Attends(by_hand=False, again=False), x)

    assert plain["flops"] == again["flops"]
    assert (plain["recomputed_flops"], again["recomputed_bytes"]) == (0, x.nbytes)
    assert (plain["scores"], plain["masked"], plain["longest"]) == (2 * 3 * 64 * 64, 2 * 3 * 64 * 64, 64)
    assert fused["scores"] == 0
    classes = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Softmax(-1))
    assert counted(classes, torch.randn(2, 64, 32))["scores"] == 0


class Checkpointed(torch.nn.Module):
    """Two layers in one checkpoint, with a function between them or behind them that saves its result."""

    def __init__(self, *, reentrant: bool, last: bool) -> None:
        super().__init__()
        first, second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)
        self.layers = torch.nn.Sequential(first, *([second, torch.nn.Tanh()] if last else [torch.nn.Tanh(), second]))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


FIRST, SECOND = 2 * 8 * 64 * 128, 2 * 8 * 128 * 32


@pytest.mark.parametrize(
    ("reentrant", "last", "early", "again"),
    [
        (True, False, True, FIRST + SECOND),
        (False, False, True, FIRST),  # the second layer has saved its input before it multiplies: it need not again
        (False, True, True, FIRST + SECOND),  # tanh saves its result
        (False, False, False, FIRST + SECOND),
    ],
)
def test_recomputation_ends_where_all_that_was_saved_is_there_again(reentrant, last, early, again):
    model, x = Checkpointed(reentrant=reentrant, last=last), torch.randn(8, 64, requires_grad=True)
    with set_checkpoint_early_stop(early):
        found = counted(model, x)

    assert found["recomputed_flops"] == again
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(early):
        loss = model(x)
        before = counter.get_total_flops()
        loss.sum().backward()
    assert counter.get_total_flops() - before - 2 * (FIRST + SECOND) == again  # what torch itself computes


LATE = torch.ones(64, 64, dtype=torch.bool).triu(1)
MASKS = {
    "added": lambda q, k: q @ k + torch.zeros(64, 64).masked_fill(LATE, -1e9),
    "added in place": lambda q, k: (q @ k).add_(torch.zeros(64, 64)),
    "by where": lambda q, k: torch.where(LATE, -1e9, q @ k),
    "in the product": lambda q, k: torch.baddbmm(torch.zeros(1, 64, 64), q.flatten(0, 1), k.flatten(0, 1)),
    "none, but a number": lambda q, k: q @ k + 1.0,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_all_forms_are_seen(name):
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)

        def forward(self, x):
            q = self.layer(x)
            return MASKS[name](q, q.transpose(-2, -1)).softmax(-1)

    found = counted(Masked(), torch.randn(2, 3, 64, 32))

    assert found["scores"] == 2 * 3 * 64 * 64
    assert found["masked"] == (0 if name.startswith("none") else found["scores"])


def run_of(call: CallFlops, *, free_gib: int = 64, steps: int = 40) -> Ledger:
    """Return the account of a run whose steps compute 100 ms, with a model of which that is known."""
    ledger = Ledger.of(RunMaker(ranks=1, steps=steps, compute_ns=100 * MS).make())
    facts = structs.replace(
        ledger.facts, compute=ComputeFacts(calls=(call,)), memory_available_bytes=free_gib << 30,
        memory={"0": RankMemory(peak_rss_bytes=1 << 30)}, threads={0: 2},
    )  # fmt: skip
    return replace(ledger, facts=facts)


def test_a_quarter_of_the_operations_done_twice_is_a_cause_where_memory_has_room():
    call = CallFlops(name="Net", flops=3000, recomputed_flops=1000, recomputed_bytes=8 << 30)
    ledger = run_of(call)
    [cause] = causes_by_hand(ledger)

    assert cause.cause == "compute.recompute"
    inside_ns = ledger.ledger_ns["useful"] - ledger.sub_ns["useful.optimizer"]
    assert cause.lost_device_s == pytest.approx(inside_ns / 4 / 1e9)
    assert list(causes_by_hand(run_of(call, free_gib=9))) == []
    assert list(causes_by_hand(run_of(structs.replace(call, recomputed_flops=0)))) == []


def test_a_device_that_waits_for_launches_beside_free_memory_is_told_of_larger_batches():
    ledger = run_of(CallFlops(name="Net", flops=3000))
    steps_ns = int(ledger.step_ns.sum())
    model = ModelFacts(name="Net", batch_size=8)
    memory = {"0": RankMemory(peak_rss_bytes=1 << 30, device_peak_bytes=10, device_total_bytes=100)}
    facts = structs.replace(ledger.facts, compute=ComputeFacts(models=(model,)), memory=memory, device_type="A100")
    waiting = replace(ledger, facts=facts, sub_ns={**ledger.sub_ns, "host.launch": steps_ns // 2})
    [cause] = causes_by_hand(waiting)

    assert (cause.cause, "batch_size=32" in cause.script) == ("compute.batch", True)
    assert cause.predicted_speedup == pytest.approx(1 / (1 - 0.5 * 0.75), rel=1e-6)  # 32 for the launches of 8
    low, high = cause.interval
    assert low < cause.predicted_speedup < high == pytest.approx(2)
    full = {"0": structs.replace(memory["0"], device_peak_bytes=60)}
    acting = ComputeFacts(models=(structs.replace(model, acts=True),))
    for changed in ({"memory": full}, {"compute": acting}):
        assert not list(causes_by_hand(replace(waiting, facts=structs.replace(facts, **changed))))


EDITS = {"bfloat16": (0.4, 0.5, 0.6), "channels_last": (0.9, 1.1, 1.2), "batch": (0.3, 0.4, 0.5)}


def test_edits_that_a_rehearsed_step_won_by_each_time_are_causes():
    rehearsed = Rehearsed(examples=4, edits=EDITS)
    ledger = run_of(CallFlops(name="Net", flops=3000, rehearsed=rehearsed))
    useful_ns, updates_ns = ledger.ledger_ns["useful"], ledger.sub_ns["useful.optimizer"]
    found = {cause.cause: cause for cause in causes_by_hand(ledger)}

    assert found.keys() == {"compute.precision", "compute.batch"}  # one of three rounds was slower channels last
    assert found["compute.precision"].lost_device_s == pytest.approx((useful_ns - updates_ns) * 0.5 / 1e9)
    per_example_ns = (useful_ns - updates_ns) * 0.6 + updates_ns * 0.75
    assert found["compute.batch"].lost_device_s == pytest.approx(per_example_ns / 1e9)
    assert "batch_size=16" in found["compute.batch"].script
    made_by_hand = replace(ledger, facts=structs.replace(ledger.facts, loaders={}))
    assert [cause.script for cause in causes_by_hand(made_by_hand) if cause.cause == "compute.batch"] == [""]


def test_a_step_is_rehearsed_on_examples_of_the_batch_and_what_the_model_does_not_bear_is_left_out():
    def viewing(x):
        return x.view(x.shape[0], -1)[:, :32]

    convolution = torch.nn.Conv2d(3, 8, 3, padding=1)
    model = torch.nn.Sequential(convolution, Scores(viewing).enter)
    before = convolution.weight.detach().clone()
    found = counted(model.double(), torch.randn(6, 3, 64, 64).double())["rehearsed"]

    assert found["examples"] in range(2, 7)
    assert {"float32"} <= set(found["edits"]) <= {"float32", "channels_last", "batch"}
    assert all(0 < low <= mid <= high for low, mid, high in found["edits"].values())
    assert torch.equal(convolution.weight, before.double())  # the child has a copy
    assert counted(Scores(), torch.zeros(8, 64), labels=None)["rehearsed"] is None  # it raises: the script's affair


@pytest.mark.parametrize(("longest_s", "is_timed"), [(60.0, True), (0.0, False)])
def test_a_step_of_the_whole_batch_is_timed_unless_it_takes_long(longest_s, is_timed, monkeypatch):
    monkeypatch.setattr("headway.compute.torch_rehearsal.STEP_S", 0.0)  # of so many examples as a step has at the least
    monkeypatch.setattr("headway.compute.torch_rehearsal.WHOLE_S", longest_s)
    found = counted(torch.nn.Linear(64, 64), torch.randn(32, 64))["rehearsed"]

    assert (found["examples"], found["batch"]) == (2, 32)
    assert (found["step_s"] is not None and found["step_s"] > 0) == is_timed


def test_attention_by_hand_is_a_cause_on_a_cpu_where_its_rows_are_long():
    call = CallFlops(name="Net", flops=3000, scores=4_000_000, masked=4_000_000, longest=1024)
    found = list(causes_by_hand(run_of(call)))

    assert [cause.cause for cause in found] == ["compute.attention"]
    assert "scaled_dot_product_attention" in found[0].script
    assert list(causes_by_hand(run_of(structs.replace(call, longest=256)))) == []


@pytest.mark.parametrize("asks", [True, False])
def test_torchs_attention_that_is_asked_for_its_weights_writes_scores(asks):
    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=asks)[0]

    found = counted(Asks(), torch.randn(2, 512, 32))
    [*causes] = causes_by_hand(run_of(CallFlops(name="Asks", flops=3000, **{
        name: found[name] for name in ("scores", "longest", "attentions")})))  # fmt: skip

    assert (found["attentions"], found["scores"]) == (1, 2 * 4 * 512 * 512 * asks)
    assert ["need_weights=False" in cause.script for cause in causes] == [True] * asks


def test_a_checkpointed_script_is_told_what_leaving_that_out_wins(tmp_path):
    code = """
        import torch
        from torch.utils.checkpoint import checkpoint
        layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8))
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers
            def forward(self, x):
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                return x
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(30):
            model(torch.randn(256, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    headway("run", "--quiet", "--out", tmp_path / "run", "--", script(tmp_path, code))
    why = json.loads(headway_here("why", "--json", tmp_path / "run").stdout)
    cause = next(row for row in why["causes"] if row["cause"] == "compute.recompute")

    assert cause["interval"][0] < cause["predicted_speedup"] < cause["interval"][1]
    assert cause["predicted_speedup"] > 1.05  # a quarter of the operations, and what it costs to save and to ask


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

    assert (found["flops"], found["reason"], found["autocast"]) == (COST, "", "bfloat16")


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
    live_mfu_is_that_of_the_line(tmp_path / "run")


def live_mfu_is_that_of_the_line(run: Path) -> None:
    """While the run goes on, calls are counted as they come: three a step here, from the same child's operations."""
    [path] = (run / "flops").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "device": "NVIDIA A100-SXM4-80GB"}))
    status, account = RunStatus(start_ns=0, world_size=1, run=run), LiveLedger(start_ns=0, world_size=1)
    for header, records in finalised(run, 0):
        status.add(header, records)
        account.add(header, records)
    figures = account.figures(10**18)

    used = LiveMfu(run).of(figures)
    assert used == pytest.approx(3 * A_CALL * figures.steps_per_s_then / 19.5e12, rel=1e-6)
    assert f" | MFU {format_fraction(used)} | goodput " in status.line(10**18)
    assert LiveMfu(run / "elsewhere").of(figures) is None
