"""Low-precision blocks: the error of one element, exact zeros, and numbers that cannot be encoded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UnknownNameError
from headway.runtime.quantize import FORMATS, LEAST_SCALE, decode, encode
from tests.refusals import refused

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
GRIDS = {"int8": torch.arange(-127.0, 128.0), "int4": torch.arange(-7.0, 8.0), "fp8": E4M3[E4M3.isfinite()].unique()}
"""Every number of each format, sorted."""

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", FORMATS)
@given(numbers=st.lists(finite, max_size=20), block=st.integers(1, 7), seed=st.none() | st.integers(0, 9))
def test_a_number_becomes_one_of_the_two_grid_points_round_it(name, numbers, block, seed):
    """Oracle: every number of the format is tried. To nearest, none is nearer; at random, none is between."""
    values = torch.tensor(numbers, dtype=torch.float32)
    answer = decode(encode(values, name, block=block, seed=seed))

    for first in range(0, len(numbers), block):
        one, other = values[first : first + block].double(), answer[first : first + block].double()
        scale = max(one.abs().max().item() / GRIDS[name][-1].item(), LEAST_SCALE)
        grid = GRIDS[name].double() * scale
        slack = 1e-5 * grid[-1].item()
        for x, found in zip(one.tolist(), other.tolist(), strict=True):
            distance = (grid - x).abs().min().item()
            if seed is None:
                assert abs(found - x) <= distance + slack
            else:
                between = (grid - x) * (grid - found) < 0
                assert not (between & ((grid - x).abs() > slack) & ((grid - found).abs() > slack)).any()


@pytest.mark.parametrize("name", FORMATS)
def test_the_variance_of_stochastic_rounding_is_a_sixth_of_the_step_squared(name):
    """10,000 draws in one step of the grid, [64, 65) of int8, [4, 5) of int4, [256, 288) of fp8."""
    low, step = {"int8": (64.0, 1.0), "int4": (4.0, 1.0), "fp8": (256.0, 32.0)}[name]
    numbers = low + step * (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    values = torch.cat([GRIDS[name][-1:].double(), numbers]).to(torch.float32)

    error = (decode(encode(values, name, block=values.numel(), seed=3)).double() - values.double())[1:]

    assert error.square().mean().item() == pytest.approx(step**2 / 6, rel=0.03)
    assert abs(error.mean().item()) < 4 * step / math.sqrt(6 * 10_000)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shape_type_and_zero_blocks_survive(name, dtype):
    values = torch.cat([torch.zeros(8), torch.linspace(-3, 3, 6), torch.zeros(1)]).to(dtype).view(3, 5).t()
    small = encode(values, name, block=4, seed=1)
    answer = decode(small)

    assert (answer.shape, answer.dtype) == (values.shape, values.dtype)
    assert not answer[values == 0].any()
    assert small.num_bytes == math.ceil(15 * FORMATS[name].bits / 8) + 4 * 4
    assert decode(encode(values[:0], name)).shape == (0, 3)


def test_a_seed_gives_its_codes_and_leaves_the_scripts_generator():
    values = torch.rand(1000)
    before = torch.get_rng_state()
    codes = [encode(values, "int4", seed=seed).codes for seed in (1, 1, 2)]

    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_number_stays_finite(name, dtype):
    values = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype)

    assert decode(encode(values, name)).isfinite().all()


test_what_has_no_code_is_refused = refused(
    ([1.0, math.nan], {}, "element 1 is nan; only finite"),
    ([-math.inf], {}, "element 0 is -inf; only finite"),
    ([1], {}, "dtype is torch.int64; only floating point"),
    ([1.0], {"block": 0}, "block is 0; it must be >= 1"),
    by=lambda values, options: encode(torch.tensor(values), **options),
)


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'int8'"):
        encode(torch.zeros(1), "int9")
