"""Gradients that no update uses, and calls from which nothing learns: told from what a script does, and only then."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader, TensorDataset

from headway.compute import count_flops
from headway.compute.causes import causes as causes_by_hand
from headway.trace.events.loader_facts import LoaderFacts
from headway.trace.rings.rank_tables import CallFlops, ComputeFacts, FrozenCalls, GradientUse, Rehearsed, Repeats
from tests.launching import headway, headway_here, script
from tests.recorded import recording
from tests.test_call_flops import counted, run_of

BATCHES = [torch.randn(4, 8) for _ in range(120)]


def linear():
    """Return a model and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), 0.01)


def adversarial(*, clears: bool = True, set_to_none: bool = True):
    """One of two models learns from the other's gradients, and gets some itself."""
    (maker, of_maker), (critic, of_critic) = linear(), linear()
    for x in BATCHES[:50]:
        made = maker(x)
        if clears:
            of_critic.zero_grad(set_to_none)
        (critic(x).mean() - critic(made.detach()).mean()).backward()
        of_critic.step()
        of_maker.zero_grad(set_to_none)
        critic(made).square().mean().backward()
        of_maker.step()


def undetached():
    """The critic's backward goes on into the maker, whose gradients are then cleared."""
    (maker, of_maker), (critic, of_critic) = linear(), linear()
    for x in BATCHES[:50]:
        of_critic.zero_grad()
        (critic(x).mean() - critic(maker(x)).mean()).backward()
        of_critic.step()
        of_maker.zero_grad()
        maker(x).square().mean().backward()
        of_maker.step()


def transfer(update=lambda backbone: None):
    """Only the head has an optimizer; `update` may do the rest."""
    (backbone, _), (head, optimizer) = linear(), linear()
    for x in BATCHES:
        optimizer.zero_grad()
        backbone.zero_grad()
        head(backbone(x)).square().mean().backward()
        optimizer.step()
        update(backbone)


def by_data(backbone):
    """Update by hand where torch counts no version."""
    for parameter in backbone.parameters():
        parameter.data -= 0.01 * parameter.grad


def several_tasks():
    """The gradients of each loss are put aside by the script, and an update takes what it makes of them."""
    model, optimizer = linear()
    for x in BATCHES:
        aside = []
        for task in range(3):
            optimizer.zero_grad()
            model(x)[:, task].square().mean().backward()
            aside.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *aside, strict=True):
            parameter.grad = sum(gradients)
        optimizer.step()


def perturbed():
    """The first of two backwards moves the weights, the second updates them from where they were."""
    (model, optimizer), (other, of_other) = linear(), linear()
    for x in BATCHES:
        for parameter in [*model.parameters(), *other.parameters()]:
            parameter.grad = None
        (model(x) + other(x)).square().mean().backward()
        of_other.step()
        moves = [0.05 * parameter.grad for parameter in model.parameters()]
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(sign * move)
            if sign > 0:
                optimizer.zero_grad()
                model(x).square().mean().backward()
        optimizer.step()


def test_gradients_that_no_update_uses_are_told_with_their_calls(tmp_path):
    for number, (loop, expected) in enumerate(
        [
            (adversarial, (3, 1, 1)),  # of three calls of the critic one, whose input needs its gradient
            (lambda: adversarial(set_to_none=False), (3, 1, 1)),
            (undetached, (2, 1, 0)),
            (transfer, (1, 1, 0)),
        ]
    ):
        [row] = [row for row in uses_of(loop, tmp_path / str(number)) if row["unused"]]
        calls, unused, given = expected
        assert row["unused"] == pytest.approx(row["calls"] * unused / calls, abs=2)
        assert row["given"] == (row["unused"] if given else 0)
        assert (row["optimizer"] == -1) == (loop is transfer)


def uses_of(loop, folder):
    """Return what is told of the gradients of a recorded loop."""
    with recording(folder) as session:
        loop()
        rows = session.probes.tables["compute"]["gradient_uses"]
    assert all(row["calls"] for row in rows)
    return rows


def stepped_inside():
    """An optimizer steps in a hook of the backward, which frees its gradients."""
    (trunk, of_trunk), (head, of_head) = linear(), linear()
    parameters = list(trunk.parameters())
    left = []

    def learn(parameter):
        left.append(parameter)
        if len(left) == len(parameters):
            of_trunk.step()
            left.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(learn)
    for x in BATCHES:
        trunk.zero_grad()
        of_head.zero_grad()
        head(trunk(x)).square().mean().backward()
        of_head.step()


def tasks_with_heads():
    """Heads are updated at once, the trunk by gradients that were put aside."""
    (trunk, of_trunk), (head, of_head) = linear(), linear()
    for x in BATCHES:
        aside = []
        for task in range(2):
            head(trunk(x))[:, task].square().mean().backward()
            of_head.step()
            of_head.zero_grad()
            aside.append([parameter.grad.clone() for parameter in trunk.parameters()])
            of_trunk.zero_grad()
        for parameter, *gradients in zip(trunk.parameters(), *aside, strict=True):
            parameter.grad = sum(gradients)
        of_trunk.step()
        of_trunk.zero_grad()


def with_norms():
    """A backbone that is updated by hand, whose smallest parameter never moves: a bias before a norm."""
    backbone = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4, affine=False), torch.nn.Linear(4, 8))
    with torch.no_grad():
        backbone[0].bias.zero_()
    head, optimizer = linear()
    for x in BATCHES:
        head(backbone(x)).square().mean().backward()
        optimizer.step()
        for parameter in backbone.parameters():
            parameter.data -= 0.01 * parameter.grad * (parameter is not backbone[0].bias)
            parameter.grad = None
        optimizer.zero_grad()


def hooked(backbone_hook=lambda gradient: None):
    """The script looks at the gradients of what no optimizer has."""
    (backbone, _), (head, optimizer) = linear(), linear()
    for parameter in backbone.parameters():
        parameter.register_hook(backbone_hook)
    for x in BATCHES:
        optimizer.zero_grad()
        backbone.zero_grad()
        head(backbone(x)).square().mean().backward()
        optimizer.step()


def joined_late():
    """The backbone gets into the optimizer behind the watch."""
    backbone = torch.nn.Linear(8, 8)
    head, optimizer = linear()
    for number in range(300):
        if number == 100:
            optimizer.add_param_group({"params": backbone.parameters()})
        optimizer.zero_grad()
        backbone.zero_grad()
        head(backbone(BATCHES[number % 100])).square().mean().backward()
        optimizer.step()


USED = {
    "both losses add up": lambda: adversarial(clears=False),
    "updated by hand": lambda: transfer(by_data),
    "several tasks": several_tasks,
    "perturbed weights": perturbed,
    "several tasks with heads": tasks_with_heads,
    "updated by hand, but for its smallest parameter": with_norms,
    "looked at in hooks": hooked,
    "trained from later on": joined_late,
}


def test_an_optimizer_that_steps_within_a_backward_ends_the_watch(tmp_path):
    with recording(tmp_path) as session:
        stepped_inside()
        assert "gradient_uses" not in session.probes.tables["compute"]


@pytest.mark.parametrize("name", USED)
def test_gradients_that_a_script_uses_in_its_way_are_left_alone(name, tmp_path):
    assert not any(row["unused"] for row in uses_of(USED[name], tmp_path))


def trained(after):
    """Train, and call `after` with the model, the batch and the next one behind each update."""
    model = Conditioned(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, later in itertools.pairwise(BATCHES):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        after(model, x, later)


class Conditioned(torch.nn.Linear):
    """A layer with a second input."""

    def forward(self, x, condition=None):
        return super().forward(x) + (0 if condition is None else condition)


def without_gradients(model, x, _):
    """Look at the outputs again, without gradients."""
    with torch.no_grad():
        model(x)


REPEATS = {
    "again": (lambda model, x, _: model(x), True),
    "again, without gradients": (without_gradients, True),
    "another batch": (lambda model, _, later: model(later), False),
    "learns from it": (lambda model, x, _: model(x).sum().backward(), False),
    "on another condition": (lambda model, x, _: model(x, torch.zeros(8)), False),
    "learns by autograd.grad": (
        lambda model, x, _: torch.autograd.grad(model(x).sum(), list(model.parameters())),
        False,
    ),
    "changed in place": (lambda model, x, _: model(x.add_(1)), False),
}


@pytest.mark.parametrize("name", REPEATS)
def test_calls_on_the_same_batch_from_which_nothing_learns_are_counted(name, tmp_path):
    after, is_repeated = REPEATS[name]
    with recording(tmp_path) as session:
        trained(after)
        row = session.probes.tables["compute"]["repeats"]

    assert row["repeated"] == pytest.approx(row["calls"] / 2, abs=2) if is_repeated else row["repeated"] == 0
    assert (0 < row["repeated_ns"] < row["watched_ns"]) == is_repeated


@pytest.mark.parametrize(("batches", "has_larger"), [(BATCHES, True), ([BATCHES[0]] * 120, False)])
def test_a_batch_that_is_all_the_data_of_a_job_has_no_larger_one(batches, has_larger, tmp_path):
    with recording(tmp_path) as session:
        model, optimizer = linear()
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        row = session.probes.tables["compute"]["repeats"]

    assert ComputeFacts(repeats=Repeats(**row)).has_larger_batches == has_larger


class Average(torch.nn.Linear):
    """A layer that learns nothing by itself: at each call it may move, as an average of a trained model does."""

    moves = 0.0

    def forward(self, x):
        self.bias.data.add_(self.moves)
        return super().forward(x)


def on_features(frozen, *, change=lambda x: x, mode=False):
    """Train a layer on the outputs of another one for two passes over a loader."""
    frozen.requires_grad_(False).train(mode)
    head, optimizer = linear()
    for _ in range(2):
        for (x,) in DataLoader(TensorDataset(torch.cat(BATCHES)), batch_size=8):
            head(frozen(change(x))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


FROZEN = {
    "frozen": (lambda: on_features(torch.nn.Linear(8, 8)), True),
    "an average": (lambda: on_features(averaging()), False),
    "not of the batch": (lambda: on_features(torch.nn.Linear(8, 8), change=torch.rand_like), False),
    "drops out": (lambda: on_features(torch.nn.Linear(8, 8), mode=True), False),
}


def averaging():
    """Return a layer that moves."""
    layer = Average(8, 8)
    layer.moves = 0.01
    return layer


@pytest.mark.parametrize("name", FROZEN)
def test_modules_that_compute_the_same_in_each_pass_are_told(name, tmp_path):
    loop, is_frozen = FROZEN[name]
    with recording(tmp_path) as session:
        loop()
        rows = session.probes.tables["compute"]["frozen"]

    assert [(row["name"], row["calls"] > 50, row["ns"] > 0) for row in rows] == [("Linear", True, True)] * is_frozen


def test_what_is_the_same_in_each_pass_may_be_computed_once_where_the_examples_stay():
    ledger = run_of(CallFlops(name="Net", flops=3000))
    loader = LoaderFacts(batch_size=4, dataset_size=40, draws=(), changes="")

    def told(**facts):
        compute = ComputeFacts(frozen=(FrozenCalls("Net", 60, 4),), repeats=Repeats(watched_ns=5))
        loaders = {"0": structs.replace(loader, **facts)}
        return list(causes_by_hand(replace(ledger, facts=structs.replace(ledger.facts, compute=compute,
                                                                         loaders=loaders))))  # fmt: skip

    [cause] = told()
    passes = ledger.steps * 4 / 40
    assert (cause.cause, cause.at_most) == ("compute.frozen", True)
    assert cause.predicted_speedup == pytest.approx(1 / (1 - 0.8 * (1 - 1 / passes)))
    for facts in ({"draws": ("torch",)}, {"draws": None}, {"changes": None}, {"dataset_size": 4000}):
        assert told(**facts) == []


def test_a_child_counts_and_times_a_call_without_gradients_that_no_optimizer_needs():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    head = torch.optim.SGD(model[2].parameters(), 0.1)
    found = counted(model, torch.randn(32, 8))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)

    assert (found["frozen_elements"], found["frozen_flops"]) == (72, count_flops(model, torch.randn(32, 8)))
    assert "frozen" in found["rehearsed"]["edits"]
    del head


def told(call, **use):
    """Return the causes of a run with a model of which that is known."""
    ledger = run_of(call)
    compute = ComputeFacts(
        calls=(call,), gradient_uses=(GradientUse(**{"model": 0, "elements": 72, "calls": 60, **use}),)
    )
    ledger = replace(ledger, facts=structs.replace(ledger.facts, compute=compute))
    return ledger, list(causes_by_hand(ledger))


@pytest.mark.parametrize(
    ("use", "share"),
    [
        ({"unused": 60}, 0.5),  # no optimizer has them: by what a step took without
        ({"optimizer": 0, "unused": 20, "given": 20}, 0.25 / 3),  # one call of three
        ({"optimizer": 0, "unused": 30}, 0.5 / 2),  # nothing before them learns
        ({"optimizer": 0, "unused": 5}, 0),
        ({"optimizer": 0, "unused": 0, "calls": 0}, 0),
    ],
)
def test_what_is_said_of_unused_gradients_is_their_part_of_the_calls(use, share):
    timed = Rehearsed(examples=4, batch=4, edits={"frozen": (0.4, 0.5, 0.6), "given": (0.7, 0.75, 0.8)})
    ledger, found = told(CallFlops(model=0, name="Net", flops=3000, frozen_elements=72, rehearsed=timed), **use)

    inside_s = (ledger.ledger_ns["useful"] - ledger.sub_ns["useful.optimizer"]) / 1e9
    assert [cause.cause for cause in found] == ["compute.unused"] * bool(share)
    assert [cause.lost_device_s for cause in found] == [pytest.approx(inside_s * share)] * bool(share)


def test_operations_tell_where_no_step_was_timed_and_another_set_of_parameters_tells_nothing():
    call = CallFlops(model=0, name="Net", flops=3000, frozen_elements=72, frozen_flops=1500)
    ledger, [cause] = told(call, unused=60)

    assert cause.lost_device_s == pytest.approx((ledger.ledger_ns["useful"] - ledger.sub_ns["useful.optimizer"]) / 2e9)
    assert told(structs.replace(call, frozen_elements=70), unused=60)[1] == []


def test_repeated_calls_cost_their_time():
    ledger = run_of(CallFlops(name="Net", flops=3000))
    repeats = Repeats(calls=120, repeated=60, repeated_ns=1, watched_ns=5)
    facts = structs.replace(ledger.facts, compute=ComputeFacts(repeats=repeats))
    [cause] = causes_by_hand(replace(ledger, facts=facts))

    assert (cause.cause, cause.at_most, cause.predicted_speedup) == ("compute.repeat", True, pytest.approx(1.25))


def test_a_recorded_script_is_told_of_its_backbone_and_its_accuracy(tmp_path):
    code = """
        import torch
        backbone = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
        model = torch.nn.Sequential(backbone, torch.nn.Linear(256, 8))
        optimizer = torch.optim.SGD(model[1].parameters(), 0.01)
        for step in range(120):
            x = torch.randn(64, 256)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            model(x).argmax(1)
    """
    headway("run", "--quiet", "--out", tmp_path / "run", "--", script(tmp_path, code))
    why = json.loads(headway_here("why", "--json", tmp_path / "run").stdout)
    found = {row["cause"]: row for row in why["causes"]}

    assert "197,376 parameters of Sequential" in found["compute.unused"]["evidence"]
    assert "no backward followed" in found["compute.repeat"]["evidence"]


class Counts(torch.overrides.TorchFunctionMode):
    """Counts what a mode of the script's is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls_of_steps():
    """Return how many calls a mode of torch's is asked about in each step."""
    calls = []
    with Counts() as counts:
        transfer(lambda _: calls.append(counts.calls))
    return [later - earlier for earlier, later in itertools.pairwise([0, *calls])]


def test_modes_of_the_script_see_nothing_of_it_and_what_cannot_be_looked_at_ends_it(tmp_path):
    plain = calls_of_steps()
    with recording(tmp_path / "seen"):
        assert calls_of_steps() == plain
    with torch.inference_mode():
        without_version = torch.randn(4, 8)
    with recording(tmp_path / "ends") as session:
        trained(lambda model, x, _: without_gradients(model, without_version, x))
        assert "repeats" not in session.probes.tables["compute"]
        assert session.probes.tables["patches"]["forward"] == "ok"
