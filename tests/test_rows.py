"""Rows: what comes out is what torch's default collate function returns, to the bit, type and stride."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from headway.data.bytes.torch_examples import SMALL_BYTES, SPARE, BatchMemory, BatchRows
from tests.test_views import equal

DTYPES = [torch.uint8, torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]


def leaf(kind, seed):
    """Return one part of an example."""
    made = torch.Generator().manual_seed(seed)
    if kind == "number":
        return seed / 3
    if kind == "text":
        return str(seed)
    if kind == "small":
        return torch.randint(0, 9, (3,), generator=made)
    if kind == "array":
        return np.random.default_rng(seed).random((8, 9, 10))
    if kind == "mirrored":
        return torch.randint(0, 99, (40, 30, 3), generator=made).permute(2, 0, 1)
    return torch.randint(0, 2, (60, 80), generator=made).to(DTYPES[kind])


leaves = st.sampled_from(["number", "text", "small", "array", "mirrored", *range(len(DTYPES))])
forms = st.recursive(leaves, lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(
    st.sampled_from("abc"), inner, min_size=1), max_leaves=5)  # fmt: skip


def example(form, seed):
    if isinstance(form, list):
        return tuple(example(part, seed + k) for k, part in enumerate(form))
    return {k: example(part, seed) for k, part in form.items()} if isinstance(form, dict) else leaf(form, seed)


def both(examples, order=None):
    rows, placed = BatchRows(len(examples), BatchMemory()), [None] * len(examples)
    for k in order or range(len(examples)):
        placed[k] = rows.placed(k, examples[k])
    return rows.collated(placed), default_collate(examples)


@given(form=forms, count=st.integers(1, 5), shuffled=st.randoms(use_true_random=False))
def test_batches_are_those_of_the_default_collate_function_whoever_comes_first(form, count, shuffled):
    order = list(range(count))
    shuffled.shuffle(order)

    ours, theirs = both([example(form, 7 * k) for k in range(count)], order)

    assert equal(ours, theirs)


def test_large_tensors_are_copied_once():
    examples = [torch.full((SMALL_BYTES,), k, dtype=torch.uint8) for k in range(3)]
    rows = BatchRows(3, BatchMemory())
    placed = [rows.placed(k, one) for k, one in enumerate(examples)]

    batch = rows.collated(placed)

    assert batch.data_ptr() == placed[0].data_ptr()
    examples[0].zero_()
    assert batch[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "examples",
    [
        [torch.zeros(5000), torch.zeros(5001)], [torch.zeros(5000), torch.zeros(5000, dtype=torch.float64)],
        [{"a": torch.zeros(5000)}, {"b": torch.zeros(5000)}], [torch.zeros(5000), 3], [object(), object()],
    ],
    ids=["shapes", "types", "keys", "kinds", "objects"],
)  # fmt: skip
def test_what_the_default_collate_function_makes_of_unlike_examples_is_left_to_it(examples):
    try:
        expected = default_collate(examples)
    except Exception as error:
        with pytest.raises(type(error)):
            both(examples)
    else:
        ours, _ = both(examples)
        assert equal(ours, expected)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.eye(2000).to_sparse(), lambda: torch.zeros(5000, device="meta"), lambda: torch.zeros(2, 5000).T],
    ids=["sparse", "meta", "transposed"],
)
def test_a_tensor_that_is_no_plain_row_of_memory_is_left_alone(make):
    tensor = make()

    assert BatchRows(2, BatchMemory()).placed(0, tensor) is tensor


def test_a_tensor_that_needs_its_gradient_keeps_its_history():
    weight = torch.ones(2000, requires_grad=True)

    rows = BatchRows(2, BatchMemory())

    batch = rows.collated([rows.placed(k, weight * k) for k in range(2)])

    batch.sum().backward()
    assert weight.grad is not None


def test_memory_comes_back_when_the_last_tensor_over_it_is_gone_and_never_before():
    memory, shape = BatchMemory(), (4, 5000)
    first = torch.from_numpy(memory.array(shape, np.dtype("f4")))
    place, part = first.data_ptr(), first[1, :10]

    del first
    other = memory.array(shape, np.dtype("f4"))
    assert other.ctypes.data != place
    part.fill_(7.0)
    array = part.numpy()
    del part
    assert memory.array(shape, np.dtype("f4")).ctypes.data != place
    assert array.tolist() == [7.0] * 10
    del array
    assert memory.array((2, 9000), np.dtype("f4")).ctypes.data == place  # a little smaller fits too


def test_little_memory_is_kept():
    memory = BatchMemory()
    arrays = [memory.array((100,), np.dtype("u1")) for _ in range(SPARE + 5)]

    del arrays

    assert len(memory._spare) == SPARE
