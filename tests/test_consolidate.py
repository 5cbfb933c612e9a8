"""One state from copies of a job that trained apart."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.cluster import consolidate
from tests.refusals import refused

weights = st.lists(st.integers(1, 1000), min_size=1, max_size=5)
floats = st.floats(-1e6, 1e6, width=32)


def trained(seed: int, num_steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a small model with BatchNorm, and its Adam, after some steps on data of the seed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state(seed: int, num_steps: int) -> dict[str, object]:
    model, optimizer = trained(seed, num_steps)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@given(weights=weights, columns=st.data())
def test_elements_are_the_weighted_mean_of_the_copies(weights, columns):
    values = [columns.draw(st.lists(floats, min_size=3, max_size=3)) for _ in weights]

    mean = consolidate([{"w": torch.tensor(row)} for row in values], weights)["w"]

    oracle = [sum(w * row[i] for w, row in zip(weights, values, strict=True)) / sum(weights) for i in range(3)]
    torch.testing.assert_close(mean, torch.tensor(oracle), rtol=1e-6, atol=1e-2)


@given(weights=weights, value=st.floats(allow_nan=False), dtype=st.sampled_from([torch.float64, torch.bfloat16]))
def test_copies_that_agree_stay_as_they_are_bit_for_bit(weights, value, dtype):
    tensor = torch.tensor([value], dtype=dtype)

    mean = consolidate([{"w": tensor.clone()} for _ in weights], weights)["w"]

    assert torch.equal(mean, tensor)
    assert mean.dtype == dtype


def test_one_copy_comes_back_bit_for_bit_in_tensors_of_its_own():
    before = state(seed=1, num_steps=3)
    before["odd"] = torch.tensor([float("nan"), float("inf"), -0.0])

    after = consolidate([before], [7])

    assert repr(after) == repr(before)
    assert torch.equal(after["odd"].view(torch.int32), before["odd"].view(torch.int32))
    assert after["odd"].data_ptr() != before["odd"].data_ptr()


def test_a_model_and_its_adam_are_averaged_and_load_again():
    copies, kept = [state(1, num_steps=2), state(2, num_steps=6)], state(1, num_steps=2)

    mean = consolidate(copies, weights=[2, 6])

    assert repr(copies[0]) == repr(kept), "the copies stay as they were"
    for key in ("0.weight", "1.running_mean", "1.running_var"):
        expected = 0.25 * copies[0]["model"][key] + 0.75 * copies[1]["model"][key]
        torch.testing.assert_close(mean["model"][key], expected)
    for key in ("exp_avg", "exp_avg_sq"):
        first, second = (one["optimizer"]["state"][0][key] for one in copies)
        torch.testing.assert_close(mean["optimizer"]["state"][0][key], 0.25 * first + 0.75 * second)
    assert mean["optimizer"]["state"][0]["step"].item() == 5
    tracked = mean["model"]["1.num_batches_tracked"]
    assert tracked.item() == 5
    assert tracked.dtype == torch.int64
    model, optimizer = trained(3, 1)
    model.load_state_dict(mean["model"])
    optimizer.load_state_dict(mean["optimizer"])


def changed(key: str, value: object = None) -> dict[str, object]:
    other = copy.deepcopy(state(1, 1)["model"])
    other.pop(key, None)
    return other if value is None else other | {key: value}


test_what_has_no_mean_is_refused_by_its_key = refused(
    ([], [], "0 states and 0 weights"),
    ([{}], [1, 2], "1 states and 2 weights"),
    ([{}, {}], [1, 0], "weight of copy 1 is 0. Leave out"),
    ([{}, {}], [0, 0], "weight of copy 0 is 0"),
    ([{}], [float("nan")], "weight of copy 0 is nan"),
    ([changed("", None), changed("0.bias")], [1, 1], "'0.bias' of copy 1 is missing; copy 0 has it"),
    ([changed("0.bias"), changed("")], [1, 1], "'0.bias' of copy 0 is missing; copy 1 has it"),
    ([{"m": changed("")}, {"m": changed("0.bias", torch.ones(9))}], [1, 1], r"'m.0.bias' of copy 1 is float32 \[9\]"),
    ([changed(""), changed("0.bias", 3.0)], [1, 1], "'0.bias' of copy 1 is a float, not a Tensor"),
    ([{"l": [1]}, {"l": [1, 2]}], [1, 1], "'l' of copy 1 has 2 entries, not 1"),
    ([{"rng": torch.tensor([1], dtype=torch.uint8)}, {"rng": torch.tensor([2], dtype=torch.uint8)}], [1, 1], "'rng'"),
    ([{"mode": "a"}, {"mode": "b"}], [1, 1], "'mode' of copy 1 is 'b', not 'a'"),
    by=consolidate,
)
