"""Room for what is stored: optimizers that took no step, objects with other keys, values in place, odd states."""

import copy

import pytest
import torch

from headway.checkpoint.restores.restore import restore_into
from headway.core.errors import InputError
from tests.layouts_made import write


def trained(make, *, steps=3, dtype=torch.float32):
    """A model and its optimizer after a few steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(dtype)
    optimizer = make(model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(20.0, dtype=model[0].weight.dtype).view(5, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "rprop": lambda parameters: torch.optim.Rprop(parameters),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


def equal(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_took_no_step_goes_on_bit_for_bit(tmp_path, name):
    model, optimizer = trained(OPTIMIZERS[name])
    folder = write({"model": model.state_dict(), "opt": optimizer.state_dict()}, tmp_path)
    new_model, new = trained(OPTIMIZERS[name], steps=0)
    with torch.no_grad():
        new_model[0].weight.fill_(7)

    restore_into(folder, {"model": new_model, "opt": new})

    assert equal(new.state_dict(), optimizer.state_dict())
    for pair in ((model, optimizer), (new_model, new)):
        step(*pair)
    assert equal(new_model.state_dict(), model.state_dict())


def test_room_is_made_without_a_step_a_gradient_or_a_random_number(tmp_path):
    _model, optimizer = trained(OPTIMIZERS["adam"])
    folder = write({"opt": optimizer.state_dict()}, tmp_path)
    other, new = trained(OPTIMIZERS["adam"], steps=0)
    before, rng = copy.deepcopy(other.state_dict()), torch.get_rng_state()

    restore_into(folder, {"opt": new})

    assert equal(other.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(parameter.grad is None for parameter in other.parameters())


def mixed_types(_, optimizer):
    for held in optimizer.state.values():
        held["exp_avg"] = torch.randn(held["exp_avg"].shape)  # float32, as mixed-precision recipes keep it


def part_frozen(model, optimizer):
    model[0].requires_grad_(False)
    step(model, optimizer)


@pytest.mark.parametrize(
    ("name", "change", "saved", "new"),
    [
        ("adam", mixed_types, {"dtype": torch.bfloat16}, {"steps": 0, "dtype": torch.bfloat16}),
        ("momentum", part_frozen, {"steps": 0}, {}),
        ("adam", lambda _, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3), {}, {"steps": 0}),
    ],
    ids=["state of another type than its parameter", "a parameter without saved state", "the rate of a schedule"],
)
def test_an_optimizer_gets_the_state_that_was_saved_bit_for_bit(tmp_path, name, change, saved, new):
    model, optimizer = trained(OPTIMIZERS[name], **saved)
    change(model, optimizer)
    folder = write({"opt": optimizer.state_dict()}, tmp_path)
    _, other = trained(OPTIMIZERS[name], **new)

    restore_into(folder, {"opt": other})

    assert equal(other.state_dict(), optimizer.state_dict())


def test_saved_state_of_a_parameter_that_is_not_there_is_refused(tmp_path):
    _, optimizer = trained(OPTIMIZERS["adam"])
    folder = write({"opt": optimizer.state_dict()}, tmp_path)
    fewer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(8, 4))])

    with pytest.raises(InputError, match=r"holds 'opt\.state\.[1-5]\.\w+', but the optimizer has 1 parameters"):
        restore_into(folder, {"opt": fewer})


class Counter:
    """Plain values whose keys come and go, some of them numbers."""

    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values = dict(state)


def test_an_object_gets_the_keys_that_were_saved(tmp_path):
    saved = Counter(epoch=3, seen={0: 5, 7: 9}, window=[1, 2], nested={"best": torch.ones(2)}, name="run")
    folder = write({"loader": saved.state_dict()}, tmp_path)
    new = Counter(epoch=0, seen={0: 0})

    restore_into(folder, {"loader": new})

    assert equal(new.values, saved.values)


SAVED = {"x": {"p": 1, "q": torch.ones(2)}, "l": [torch.ones(2), {"k": 3}], "e": []}


@pytest.mark.parametrize(
    "before",
    [
        None, {}, {"x": 5, "l": {"k": 1}, "e": [torch.zeros(1)]},
        {"x": [torch.zeros(2)], "l": [torch.zeros(2)], "e": None}, {"x": open, "l": torch.zeros(3), "e": {}},
    ],
)  # fmt: skip
def test_an_object_gets_the_form_that_was_saved_whatever_form_it_has(tmp_path, before):
    folder, thing = write({"thing": SAVED}, tmp_path), Counter()
    thing.values, thing.state_dict = before, lambda: thing.values

    restore_into(folder, {"thing": thing})

    assert equal(thing.values, SAVED)


def test_an_object_whose_state_is_none_gets_none(tmp_path):
    class Stateless:
        got = "nothing yet"

        def state_dict(self):
            return None

        def load_state_dict(self, state):
            self.got = state

    thing = Stateless()
    restore_into(write({"thing": None}, tmp_path), {"thing": thing})

    assert thing.got is None


def test_plain_values_and_tensors_are_filled_where_they_stand(tmp_path):
    folder = write({"model": {"w": torch.ones(3)}, "step": 5, "note": ("a", 1), "scale": torch.tensor(2.0)}, tmp_path)
    weight, scale = torch.zeros(3), torch.tensor(0.0)
    state = {"model": {"w": weight}, "step": 0, "note": None, "scale": scale}

    restore_into(folder, state)

    assert (weight.tolist(), scale.item()) == ([1, 1, 1], 2)
    assert (state["step"], state["note"]) == (5, ("a", 1))
    assert state["scale"] is scale


def test_groups_that_share_a_tensor_of_a_rate_get_the_rates_that_were_saved(tmp_path):
    def made(*rates):
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in rates]
        groups = [{"params": [one], "lr": lr} for one, lr in zip(parameters, rates, strict=True)]
        return torch.optim.Adam(groups, capturable=False, foreach=False)

    folder = write({"opt": made(torch.tensor(0.5), torch.tensor(0.25)).state_dict()}, tmp_path)
    rate = torch.tensor(1.0)
    new = made(rate, rate)

    restore_into(folder, {"opt": new})

    assert [group["lr"].item() for group in new.param_groups] == [0.5, 0.25]


def test_a_scheduler_keeps_its_function(tmp_path):
    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    optimizer, schedule = made()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    folder = write({"opt": optimizer.state_dict(), "sched": schedule.state_dict()}, tmp_path)
    other, new = made()

    restore_into(folder, {"sched": new, "opt": other})
    other.step()
    new.step()

    assert other.param_groups[0]["lr"] == 0.5**4


def test_a_frozen_parameter_is_filled_and_stays_frozen(tmp_path):
    model, _ = trained(OPTIMIZERS["sgd"])
    other, _ = trained(OPTIMIZERS["sgd"], steps=0)
    other[0].weight.requires_grad_(False)

    restore_into(write({"model": model.state_dict()}, tmp_path), {"model": other})

    assert torch.equal(other[0].weight, model[0].weight)
    assert [parameter.requires_grad for parameter in other.parameters()] == [False, *[True] * 5]


def test_what_cannot_be_filled_is_refused_with_what_to_do(tmp_path):
    folder = write({"model": {"w": torch.ones(3, 2)}}, tmp_path)

    for memory, rule in (
        (torch.zeros(3, 2, device="meta"), r"'model\.w' is on the meta device.*to_empty\(\)"),
        (torch.zeros(1, 2).expand(3, 2), r"several elements of model\.w share one place.*contiguous\(\)"),
        (torch.zeros(3, 2, dtype=torch.bfloat16), r"was saved as float32 \[3, 2\] and is bfloat16 \[3, 2\] here"),
    ):
        with pytest.raises(InputError, match=rule):
            restore_into(folder, {"model": {"w": memory}})


def test_a_checkpoint_without_tensors_and_names_that_differ_in_case_alone(tmp_path):
    folder = write({"Thing": {"n": 1}, "thing": {"n": 2}}, tmp_path)
    large, small = Counter(n=0), Counter(n=0)

    restore_into(folder, {"Thing": large, "thing": small})

    assert (large.values, small.values) == ({"n": 1}, {"n": 2})
    with pytest.raises(InputError, match=r"'THING\.n' \(nearest: 'thing\.n'"):
        restore_into(folder, {"THING": Counter(n=0)})


def test_what_has_no_state_is_refused(tmp_path):
    folder = write({"model": {"w": torch.ones(3)}}, tmp_path)

    with pytest.raises(InputError, match="'model' is a object, which has no state_dict and load_state_dict"):
        restore_into(folder, {"model": object()})
