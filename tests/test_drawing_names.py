"""Every function of the libraries that draws is known by its name, and no name that other things have as well."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest
import torch
from torch import nn

from headway.runtime.drawing_code import names_draws
from headway.runtime.drawing_names import LOOKING, SETTING, drawing_names, names_of_methods

HOLDERS = {random: random.__all__, np.random.Generator: dir(np.random.Generator),
           np.random.RandomState: dir(np.random.RandomState), np.random: np.random.__all__}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__)
def test_the_methods_of_generators_are_all_known(holder):
    public = {name for name in HOLDERS[holder] if not name.startswith("_")}
    functions = {name for name in public if callable(value := getattr(holder, name)) and not isinstance(value, type)}

    assert functions <= names_of_methods() | LOOKING | SETTING


def test_methods_of_tensors_that_move_the_generator_are_known():
    found = set()
    for name in dir(torch.Tensor):
        operator = getattr(torch.ops.aten, name, None) if name.endswith("_") and not name.startswith("_") else None
        tags = [getattr(operator, overload).tags for overload in (operator.overloads() if operator else ())]
        found |= {name} if torch.Tag.nondeterministic_seeded in {tag for some in tags for tag in some} else set()

    assert {"normal_", "exponential_", "log_normal_"} <= found
    assert found <= drawing_names()


def test_functions_made_of_those_are_known_and_common_names_are_not():
    made = {name for name in dir(nn.functional) if "dropout" in name and name[0] != "_"} | {"gumbel_softmax", "rrelu"}
    started = {name for name in dir(nn.init) if name.endswith(("uniform_", "normal_")) and name[0] != "_"}
    sampled = {"sample", "rsample", "sample_n"}
    of_the_system = {*secrets.__all__, "urandom", "uuid4", "uuid1"} - LOOKING

    assert made | started | sampled | of_the_system <= drawing_names()
    assert not drawing_names() & {"bytes", "gamma", "power", "f", "sparse", "uuid5", "relu", "default_rng", "get_state"}


def test_common_names_count_where_a_generator_is_in_sight_and_layers_by_what_they_are():
    own, layer = random.Random(1), nn.Dropout(0.5)

    assert "'gamma'" in names_draws(lambda: (own, np.asarray(0).gamma))
    assert names_draws(lambda: np.asarray(0).gamma) is None
    assert "'Dropout'" in names_draws(lambda x: layer(x))
    assert "'rsample'" in names_draws(lambda x: torch.distributions.Beta(x, x).rsample())
