"""Random number generators go on where they were."""

import random

import numpy as np
import pytest
import torch

from headway.core.errors import FormatError
from headway.runtime.torch_state import RngStates


def draws():
    return torch.rand(4).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.normal()


def test_all_generators_go_on_where_they_were():
    random.gauss(0, 1), np.random.normal()  # each leaves a second number behind for the next call
    state = RngStates().state_dict()
    first = draws()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)

    RngStates().load_state_dict(state)

    assert draws() == first


@pytest.mark.parametrize("wrong", [{}, {"state": b"\xc1"}, {"state": 3}])
def test_what_is_no_state_is_refused(wrong):
    with pytest.raises(FormatError, match=r"no state of random number generators"):
        RngStates().load_state_dict(wrong)
