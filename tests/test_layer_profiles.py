"""Layer profiles: sizes are those of the published networks, times grow with batches, every network in the table."""

import pytest

from headway.cost.specs import shipped
from headway.cost.transformer import Transformer
from headway.sim.training.training_step import BACKWARD, FORWARD
from tests.made.layer_profiles import PROFILES, transformer

DEVICE = shipped().device("V100-SXM2-16GB")

PUBLISHED = {"resnet18": 11_689_512, "resnet50": 25_557_032, "vgg16": 138_357_544}
"""Parameters, as their authors' implementations count them."""


@pytest.mark.parametrize("name", PROFILES)
def test_twice_the_batch_takes_longer_but_less_than_twice_and_has_the_same_gradients(name: str) -> None:
    one, two = (PROFILES[name](DEVICE, batch=batch) for batch in (8, 16))

    assert (one.tensor_bytes == two.tensor_bytes).all()
    assert one.duration_ns.sum() < two.duration_ns.sum() < 2 * one.duration_ns.sum()
    assert two.activation_bytes.sum() == 2 * one.activation_bytes.sum()


@pytest.mark.parametrize("name", PROFILES)
def test_backward_takes_between_one_and_two_forwards(name: str) -> None:
    profile = PROFILES[name](DEVICE, batch=8)
    forward, backward = (profile.duration_ns[profile.kind == kind].sum() for kind in (FORWARD, BACKWARD))

    assert forward < backward <= 2 * forward + profile.kind.size


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_published_network_has_its_published_parameters(name: str, parameters: int) -> None:
    assert PROFILES[name](DEVICE, batch=1).tensor_bytes.sum() == 4 * parameters


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformer_has_the_parameters_of_its_shape(tied: bool) -> None:
    model = Transformer(3, 64, 4, sequence=32, vocabulary=100, tied=tied)

    assert transformer(model, DEVICE, batch=1).tensor_bytes.sum() == 4 * model.num_parameters


def test_equal_layers_are_of_one_kind() -> None:
    kinds = PROFILES["bert_large"](DEVICE, batch=1).block_kind

    assert len(set(kinds.tolist())) == 3
    assert (kinds[1:-1] == kinds[1]).all()
