"""What a server prepares: examples that come back as they were, the forms of each kind of dataset, and its identity."""

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from headway.core.errors import InputError
from headway.data import Pipeline, SyntheticJpeg, generator
from headway.data.bytes.packing import pack, unpack
from headway.data.bytes.torch_examples import equal
from headway.data.service.flights import PreparationTask
from headway.data.service.torch_preparers import base_of, identity, plain, preparer_of, restored
from tests.datasets import Sized
from tests.spawn import run_threads


def work(item, draw=5, start=None, payload=None, keep=()):
    return PreparationTask(1, item, start, payload, draw, keep)


def opened(payload):
    return unpack(payload, marked=restored)


@pytest.mark.parametrize(
    "example",
    [
        torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3).t(), torch.tensor(5),
        torch.tensor([1 + 2j]).conj(), torch.arange(3, dtype=torch.bfloat16), (torch.ones(2), 3, {"a": [np.zeros(2)]}),
        np.float32(2.5), "text", None, b"raw",
    ],
    ids=str,
)  # fmt: skip
def test_an_example_comes_back_as_it_was(example):
    back = opened(pack(plain(example)).to_bytes())

    # How a tensor says that it is conjugated is its own affair.
    assert equal(back, example.resolve_conj() if isinstance(example, torch.Tensor) else example)


def test_an_empty_tensor_keeps_type_and_shape():
    back = opened(pack(plain(torch.zeros(0, 3, dtype=torch.int16))).to_bytes())

    assert (back.shape, back.dtype) == ((0, 3), torch.int16)


@pytest.mark.parametrize("odd", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_a_tensor_that_is_not_in_plain_memory_is_refused(odd):
    with pytest.raises(InputError, match="Make it dense and move it to the CPU"):
        plain([odd])


def test_subsets_of_subsets_are_items_of_the_dataset_inside():
    data = list(range(100))
    base, items = base_of(Subset(Subset(data, range(10, 90)), [5, 0, 7]))

    assert base is data
    assert items.tolist() == [15, 10, 17]
    assert base_of(data) == (data, None)
    for chosen in ([1, 1], ["a"], [-1, 2]):
        odd = Subset(data, chosen)
        assert base_of(odd) == (odd, None)


class Rows(Sized):
    size = 6

    def __init__(self, how="pure", scale=1):
        self.how, self.scale, self.count = how, scale, 0

    def __getitem__(self, k):
        if self.how == "counts":
            self.count += 1
        noise = {"keyed": lambda: generator().random(), "numpy": lambda: np.random.rand()}
        return k * self.scale, noise.get(self.how, float)()


@pytest.mark.parametrize(
    ("how", "form", "note"),
    [
        ("pure", "decoded", None),
        ("keyed", "augmented", None),
        ("numpy", "augmented", "draws random numbers"),
        ("counts", "augmented", "changes attributes"),
    ],
)
def test_a_dataset_is_looked_at_for_what_it_needs(how, form, note):
    before = np.random.get_state()[1].tolist()
    preparer = preparer_of(Rows(how))

    assert preparer.forms == (form,)
    assert (note is None and preparer.notes == []) or note in preparer.notes[0]
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("how", ["keyed", "numpy"])
def test_equal_draws_give_equal_examples_in_whatever_thread(how):
    preparer, found = preparer_of(Rows(how)), {}

    def read(number):
        found[number] = [opened(preparer.prepare(work(3, draw))[0]["augmented"]) for draw in (5, 6, 5)]

    run_threads(read, [(k,) for k in range(4)])

    assert all(found[k] == found[0] for k in range(4))
    assert found[0][0] == found[0][2] != found[0][1]


def test_identity_is_the_name_the_length_and_what_is_inside():
    assert identity(Rows()) == identity(Rows())
    assert identity(Rows()).startswith("Rows[6] ")
    assert identity(Rows()) != identity(Rows(scale=2))


@pytest.mark.parametrize(
    ("ops", "forms"),
    [
        (lambda p: p.decode().resize(8, 8), ("encoded", "decoded")),
        (lambda p: p.decode().resize(8, 8).flip(), ("encoded", "decoded", "augmented")),
        (lambda p: p.map(lambda raw, rng: len(raw) + rng.random(), random=True), ("encoded", "augmented")),
        (lambda p: p, ("encoded", "decoded")),
    ],
)
def test_a_pipeline_goes_on_from_any_form_with_the_same_result(ops, forms):
    batches = ops(Pipeline(SyntheticJpeg(4, 24, 16))).batch(2).loader().dataset
    preparer = preparer_of(batches)
    whole, spent = preparer.prepare(work(2, keep=forms))

    assert preparer.forms == forms
    assert list(whole) == list(forms)
    assert spent.read_bytes > 0
    for form in forms[:-1]:
        again, _ = preparer.prepare(work(2, start=form, payload=whole[form]))
        assert list(again) == [forms[-1]]
        assert equal(opened(again[forms[-1]]), opened(whole[forms[-1]]))
    assert equal(opened(whole[forms[-1]]), batches.chain.run(2, 5))


def test_an_example_that_a_filter_takes_or_an_error_skips_is_left_out():
    pipeline = Pipeline(SyntheticJpeg(4, 24, 16))
    taken = preparer_of(pipeline.filter(lambda raw: False).loader().dataset)
    skipped = preparer_of(pipeline.map(lambda raw: 1 / 0).loader(on_error="skip").dataset)

    assert taken.prepare(work(1))[0] is None
    assert skipped.prepare(work(1))[0] is None
    with pytest.raises(ZeroDivisionError):
        preparer_of(pipeline.map(lambda raw: 1 / 0).loader().dataset).prepare(work(1))
