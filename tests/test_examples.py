"""Examples as bytes: every copy is equal to the last bit and its own, and `equal` sees every difference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.data.bytes.torch_examples import decode, encode, equal

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex64]

tensors = st.builds(
    lambda dtype, shape: (torch.arange(math.prod(shape)) % 7).to(dtype).reshape(shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
)
leaves = st.one_of(tensors, st.integers(), st.floats(), st.text(), st.binary(), st.booleans(), st.none())
examples = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(examples)
def test_a_copy_is_equal_and_an_example_equals_itself(example):
    assert equal(example, example)
    assert equal(decode(encode(example)), example)


def test_a_copy_keeps_the_strides_of_an_image_of_one_channel():
    image = torch.arange(784.0).reshape(28, 28, 1).permute(2, 0, 1).contiguous()  # as torchvision's ToTensor makes it
    assert image.stride() == (1, 28, 1)
    assert equal(decode(encode((image, 7))), (image, 7))
    assert equal(decode(encode(image[:, :0])), image[:, :0])


@given(tensors)
def test_a_copied_tensor_has_memory_of_its_own(tensor):
    copy = decode(encode(tensor))
    if tensor.numel():
        copy.view(-1).view(torch.uint8).bitwise_not_()

        assert not equal(copy, tensor)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)), (torch.zeros(2), torch.zeros(1, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)), (torch.zeros(2, 3), torch.zeros(3, 2).t()), (0.0, -0.0), (1, 1.0),
        (1, True), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (lambda: 1, lambda: 1),
    ],
)  # fmt: skip
def test_what_differs_in_type_order_or_bits_is_not_equal(left, right):
    assert not equal(left, right)


def test_nan_equals_itself():
    assert equal(math.nan, math.nan)
    assert equal(torch.tensor(math.nan), torch.tensor(math.nan))


@pytest.mark.parametrize(
    "example",
    [torch.zeros(3, requires_grad=True), torch.zeros(2, 3).t(), torch.eye(2).to_sparse(), np.asfortranarray(np.eye(3))],
    ids=["with gradient", "transposed", "sparse", "fortran order"],
)
def test_what_is_not_a_plain_tensor_still_comes_back_as_what_it_was(example):
    copy = decode(encode(example))

    assert type(copy) is type(example)
    if isinstance(example, torch.Tensor):
        assert (copy.layout, copy.requires_grad) == (example.layout, example.requires_grad)
        assert torch.equal(copy.detach().to_dense(), example.detach().to_dense())
    else:
        assert copy.flags.f_contiguous == example.flags.f_contiguous
