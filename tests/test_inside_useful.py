"""Causes inside useful time that a stack or the count of operations tells: Python loops, and cores left out."""

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from headway.compute.causes import causes as causes_by_hand
from headway.compute.torch_flops import counted
from headway.compute.torch_rehearsal import rehearse
from headway.core.machine.host_load import HostLoad
from headway.ledger.cause import SampledLine
from headway.runtime.script.batches import padding_share
from headway.runtime.script.compute_facts import model_facts
from headway.trace.rings.rank_tables import CallFlops, ComputeFacts, ModelFacts, OptimizerFacts, Rehearsed
from headway.why.explanation import explain
from tests.launching import headway, script
from tests.test_call_flops import counted as counted_in_child
from tests.test_call_flops import run_of

IN_LOOP, OUTSIDE = SampledLine("train.py:9", "sqrt", 6, 60), SampledLine("", "", 4, 40)


def found(*lines, flops=1000, backward_s=0.0, call=None, **facts):
    """Return the causes of a run of 100 ms steps by name, `flops` each on 2 threads."""
    ledger = run_of(CallFlops(name="Net", flops=flops, **(call or {})))
    sub_ns = {**ledger.sub_ns, "useful.backward": round(1e9 * backward_s)}
    ledger = replace(ledger, loop_lines=lines, sub_ns=sub_ns, facts=structs.replace(ledger.facts, **facts))
    return {cause.cause: cause for cause in causes_by_hand(ledger)}


def test_a_loop_that_holds_most_of_the_forwards_and_losses_is_a_cause_where_operators_are_small():
    cause = found(IN_LOOP, OUTSIDE)["compute.loop"]

    assert cause.where == "sqrt at train.py:9"
    assert "60 % of the samples" in cause.evidence
    assert cause.at_most
    assert cause.lost_device_s == pytest.approx(0.6 * 40 * 0.1, rel=0.1)


@pytest.mark.parametrize(
    ("lines", "changes"),
    [
        ((structs.replace(IN_LOOP, ns=3), OUTSIDE), {}),
        ((structs.replace(IN_LOOP, count=7),), {}),
        ((IN_LOOP, OUTSIDE), {"flops": 4 * 10**9}),
        ((IN_LOOP, OUTSIDE), {"flops": None}),
        ((structs.replace(IN_LOOP, calls_layer=True), OUTSIDE), {}),
    ],
    ids=["most is outside", "few samples", "operators compute", "nobody counted", "one layer after the other"],
)
def test_other_loops_are_none(lines, changes):
    assert "compute.loop" not in found(*lines, **changes)
    assert "compute.loop" in found(structs.replace(IN_LOOP, calls_layer=True), OUTSIDE, call={"repeats": 30})


LARGE = 10**11
"""Operations of a model that computes for most of its time."""


@pytest.mark.parametrize(
    ("loops", "flops", "is_told"),
    [
        ({"train.py:9": 10_000}, LARGE, True),
        ({"train.py:9": 1000}, LARGE, False),
        ({}, LARGE, False),
        ({"train.py:9": 1000}, 1000, False),
    ],
    ids=["calls", "operators that compute", "not counted", "operators that compute what is no product"],
)
def test_a_loop_beside_large_operators_is_told_by_the_calls_of_its_own_operators(loops, flops, is_told):
    causes = found(structs.replace(IN_LOOP, ns=3), structs.replace(OUTSIDE, ns=7), flops=flops, call={"loops": loops})
    most = found(IN_LOOP, OUTSIDE, flops=flops, call={"loops": loops})

    assert ("compute.loop" in causes, "compute.loop" in most) == (is_told, is_told)


@pytest.mark.parametrize(("count", "is_told"), [(150, False), (250, True)])
def test_a_short_forward_is_told_of_a_loop_that_calls_hundreds_of_operators(count, is_told):
    ledger = run_of(CallFlops(name="Net", flops=1000, loops={"train.py:9": count}))
    sub_ns = {**ledger.sub_ns, "useful.forward": 40 * 2_000_000, "useful.compute": 0}
    causes = causes_by_hand(replace(ledger, loop_lines=(IN_LOOP, OUTSIDE), sub_ns=sub_ns))

    assert ("compute.loop" in {cause.cause for cause in causes}) == is_told


def test_operators_in_loops_are_counted_at_their_lines():
    class Encoded(torch.nn.Module):
        def forward(self, x):
            y = x @ x
            for row in range(4):
                y[row] = x[row].exp() @ x
            return y

    loops = counted(Encoded(), (torch.ones(4, 4, requires_grad=True),), {}).loops
    [line] = loops

    assert line.startswith("test_inside_useful.py:")
    assert 4 * 5 <= loops[line] <= 4 * 10  # two rows, exp, a product, a copy, and views


class Sampled(torch.nn.Module):
    """Draws from a distribution, whose arguments torch checks by their numbers."""

    def __init__(self):
        super().__init__()
        self.ends = torch.nn.Linear(16, 8)

    def forward(self, x):
        mean, scale = self.ends(x).chunk(2, 1)
        return torch.distributions.Normal(mean, scale.exp()).rsample()


class Masked(torch.nn.Module):
    """A transformer whose mask torch looks at."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, x):
        return self.layers(x, x, tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


@pytest.mark.parametrize(("make", "x"), [(Sampled, torch.ones(4, 16)), (Masked, torch.ones(2, 5, 16))])
def test_what_torch_checks_by_its_numbers_is_counted(make, x):
    found = counted_in_child(make(), x)

    assert (found["reason"], found["flops"] > 0) == ("", True)


def test_the_layer_that_a_forward_calls_most_often_is_counted():
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.relu = torch.nn.Linear(4, 4), torch.nn.ReLU()

        def forward(self, x):
            for _ in range(5):
                x = self.relu(self.relu(self.cell(x)))
            return x

    assert counted(Recurrent(), (torch.ones(2, 4),), {}).repeats == 5


def test_rows_that_no_batch_looks_up_are_a_cause_where_their_updates_take_the_time():
    class Pairs(torch.nn.Module):
        def __init__(self, sparse, tied):
            super().__init__()
            self.rows = torch.nn.Embedding(1000, 8, sparse=sparse)
            self.out = torch.nn.Linear(8, 1000, bias=False)
            if tied:
                self.out.weight = self.rows.weight

        def forward(self, x):
            return self.out(self.rows(x))

    facts = model_facts(Pairs(sparse=False, tied=False), (torch.zeros(4, 5, dtype=torch.long),))
    assert (facts["num_dense_rows"], facts["num_dense_elements"], facts["num_lookups"]) == (1000, 8000, 20)
    for sparse, tied in ((True, False), (False, True)):
        assert model_facts(Pairs(sparse, tied), ())["num_dense_rows"] == 0
    model, adam = ModelFacts("Pairs", 16000, num_dense_rows=1000, num_dense_elements=8000), OptimizerFacts("Adam")
    by_lookups = {}
    for lookups in (20, 200):
        models = (structs.replace(model, num_lookups=lookups),)
        by_lookups[lookups] = found(backward_s=2.0, compute=ComputeFacts(models=models, optimizers=(adam,)))
    assert "SparseAdam" in by_lookups[20]["compute.embedding"].script
    assert "compute.embedding" not in by_lookups[200]


def test_a_step_is_rehearsed_without_anomaly_detection_where_that_is_on():
    with torch.autograd.set_detect_anomaly(True):
        edits = rehearse(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(9)]), (torch.ones(4, 8),), {})[
            "edits"
        ]
        low, mid, high = edits["unchecked"]

    assert 0 < low <= mid <= high < 1
    line = found(call={"rehearsed": Rehearsed(examples=4, edits={"unchecked": (0.2, 0.3, 0.4)})})["compute.anomaly"]
    assert line.script == "torch.autograd.set_detect_anomaly(False)"


def padded_rows(lengths, filler=0, left=False, size=64):
    """Return rows of token ids of such lengths, filled up."""
    rows = torch.full((len(lengths), size), filler)
    for row, length in zip(rows, lengths, strict=True):
        tokens = torch.randint(5, 500, (length,), generator=torch.Generator().manual_seed(length))
        row[slice(size - length, None) if left else slice(length)] = tokens
    return rows


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        (padded_rows([64, 16, 16, 32]), 0.5),
        (padded_rows([64, 16, 16, 32], filler=1, left=True), 0.5),
        ((padded_rows([64, 16, 48, 64]) > 0).int(), 0.25),
        (torch.ones(4, 64, dtype=torch.int64), 0.0),
        (padded_rows([64, 64, 64, 64]), 0.0),
        (padded_rows([64, 16, 16, 32]).float(), 0.0),
        (padded_rows([6, 2], size=7), 0.0),
        (padded_rows([64, 16]) + torch.tensor([[0], [3]]) * torch.arange(64), 0.0),
    ],
    ids=[
        "at the end",
        "at the begin",
        "a mask",
        "a full mask",
        "none",
        "numbers that are not whole",
        "short rows",
        "no filler",
    ],
)
def test_padding_is_what_fills_rows_of_whole_numbers_up(rows, share):
    assert padding_share([torch.ones(3, 3), rows]) == pytest.approx(share, abs=0.02)


def test_much_padding_is_a_cause_that_changes_batches():
    ledger = run_of(CallFlops(name="Net", flops=1000, padded=0.5))
    [cause] = [cause for cause in causes_by_hand(ledger) if cause.cause == "compute.padding"]

    assert cause.lost_device_s == pytest.approx(40 * 0.1 / 2, rel=0.1)
    assert not list(causes_by_hand(run_of(CallFlops(name="Net", flops=1000, padded=0.2))))


def test_padding_is_that_of_the_batches_that_were_watched():
    ledger = run_of(CallFlops(name="Net", flops=1000, padded=0.6))
    compute = structs.replace(ledger.facts.compute, padding=(0.3, 0.5, 0.4, 0.4))
    [cause] = [*causes_by_hand(replace(ledger, facts=structs.replace(ledger.facts, compute=compute)))]

    assert cause.lost_device_s == pytest.approx(40 * 0.1 * 0.4, rel=0.1)
    assert cause.evidence == "40 % of the positions of 4 batches of Net (30 % to 50 %) fill short examples up"


def test_cores_that_stay_free_are_a_cause_where_operators_are_large_enough_to_share():
    cause = found(flops=2 * 10**9, cores=4)["compute.threads"]

    assert cause.script == "torch.set_num_threads(4)"
    assert cause.lost_device_s == pytest.approx(
        40 * 0.1 * 0.8 / 2, rel=0.1
    )  # twice the cores, less what splitting costs


@pytest.mark.parametrize(
    "changes",
    [
        {"cores": 2},
        {"cores": 4, "host_load": HostLoad(cores=4, cores_available=4.0, other_cores=2.0, other_runnable=2.0)},
        {"cores": 4, "flops": 1000},
        {"cores": 4, "device_type": "A100"},
        {"cores": None},
    ],
    ids=["all have work", "others want them", "small operators", "a device", "not known"],
)
def test_other_cores_are_none(changes):
    assert "compute.threads" not in found(**{"flops": 2 * 10**9, **changes})


JOB = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)

def pairs(z):
    total = 0
    for i in range(len(z)):
        for j in range(len(z)):
            total = total + (z[i] - z[j]).square().sum()
    return total

def step(x):
    for k in range(2):
        pairs(net(x)).backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(20):
    step(torch.randn(40, 8))
"""


def test_a_loss_written_as_a_loop_is_named_with_its_line(tmp_path):
    job = script(tmp_path, JOB)
    assert headway("run", "--out", tmp_path / "run", "--", job).returncode == 0
    cause = next(cause for cause in explain([tmp_path / "run"]).causes if cause.cause == "compute.loop")

    line = 1 + JOB.splitlines().index("            total = total + (z[i] - z[j]).square().sum()")
    assert f"job.py:{line}" in cause.where
