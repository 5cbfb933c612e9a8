"""What checkpoints hold, and how two differ: over formats, layouts and numbers of ranks."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headway.core.errors import FormatError, InputError
from headway.storage.checks.contents import bits, contents
from headway.storage.checks.difference import difference
from headway.storage.commit import commit
from headway.storage.draft import open_draft
from headway.storage.manifest import METADATA
from tests.checkpoints import rows_of, some_state, write_checkpoint, write_rank


def written(folder: Path, form: str, state: dict[str, torch.Tensor]) -> Path:
    """Write a state in one of the known forms; return what to name."""
    if form.startswith("ours"):
        return write_checkpoint(folder, 1, state, world_size=int(form[-1]))
    if form == "dcp":
        dcp.save(dict(state), checkpoint_id=folder / "dcp")
        return folder / "dcp"
    if form == "safetensors":
        save_file(state, folder / "x.safetensors")
        return folder / "x.safetensors"
    torch.save(state, folder / "x.pt", _use_new_zipfile_serialization=form != "legacy")
    return folder / "x.pt"


FORMS = ["ours-1", "ours-3", "dcp", "torch.save", "legacy", "safetensors"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A state, and one with another element, each in every form."""
    state = some_state()
    other = {fqn: tensor.clone() for fqn, tensor in state.items()}
    other["model.weight"][17, 5] += 1
    return {
        (form, which): written(tmp_path_factory.mktemp(which), form, tensors)
        for form in FORMS
        for which, tensors in (("same", state), ("other", other))
    }


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_equal_states_are_equal_in_any_two_forms_and_one_changed_element_shows(stored, first, second):
    same = difference(contents(stored[first, "same"]), contents(stored[second, "same"]))
    found = difference(contents(stored[first, "same"]), contents(stored[second, "other"]))

    assert same.is_equal
    assert same.num_equal == len(some_state())
    assert [(c.name, c.what, c.num_elements) for c in found.changed] == [("model.weight", "content", 1)]


def test_checkpoints_of_ours_that_lie_alike_are_compared_by_digests_alone(tmp_path):
    first = write_checkpoint(tmp_path / "a", 1, some_state())
    second = write_checkpoint(tmp_path / "b", 2, some_state())

    found = difference(contents(first), contents(second))

    assert found.is_equal
    assert found.read_bytes == 0
    assert found.unread_bytes == contents(first).num_bytes


@settings(max_examples=20)
@given(elements=st.sets(st.integers(0, 40 * 33 - 1), min_size=1, max_size=9))
def test_the_elements_that_differ_are_counted(tmp_path_factory, elements):
    folder = tmp_path_factory.mktemp("count")
    state = {"w": torch.zeros(40, 33)}
    other = {"w": torch.zeros(40, 33)}
    other["w"].view(-1)[list(elements)] = 1.0
    first, second = folder / "a.pt", folder / "b.safetensors"
    torch.save(state, first)
    save_file(other, second)

    assert difference(contents(first), contents(second)).changed[0].num_elements == len(elements)


def test_names_dtypes_shapes_and_objects_that_differ_are_told_apart(tmp_path):
    first = {
        "gone": torch.zeros(2), "dtype": torch.zeros(2), "shape": torch.zeros(2), "nan": torch.tensor([float("nan")]),
    }  # fmt: skip
    second = {
        "new": torch.zeros(2), "dtype": torch.zeros(2).half(), "shape": torch.zeros(3), "nan": first["nan"].clone(),
    }  # fmt: skip
    a = write_checkpoint(tmp_path / "a", 1, first, objects={"lr": 0.1, "same": [1]})
    b = write_checkpoint(tmp_path / "b", 1, second, objects={"lr": 0.2, "same": [1]})

    found = difference(contents(a), contents(b))

    assert (found.added, found.removed) == (["new"], ["gone"])
    assert [(c.name, c.what, c.before, c.after) for c in found.changed] == [
        ("dtype", "dtype", "float32", "float16"), ("lr", "value", "0.1", "0.2"), ("shape", "shape", "[2]", "[3]"),
    ]  # fmt: skip
    assert found.num_equal == 2  # a NaN is bit-equal to itself


@pytest.mark.parametrize("second", ["torch.save", "legacy", "dcp", "ours-1"])
@pytest.mark.parametrize("first", ["torch.save", "dcp"])
def test_other_values_are_compared_in_any_two_forms(tmp_path, first, second):
    w = {"w": torch.zeros(2)}
    before = {"lr": 0.1, "cfg": {"a": [1, 2], "name": "x"}, "gone": 1, "kind": torch.zeros(1)}
    after = {"lr": 0.2, "cfg": {"a": [1, 2], "name": "x"}, "new": 1, "kind": 3}

    def path(folder: Path, form: str, others: dict) -> Path:
        folder.mkdir()
        if form.startswith("ours"):
            tensors = {name: one for name, one in others.items() if isinstance(one, torch.Tensor)}
            objects = {name: one for name, one in others.items() if name not in tensors}
            return write_checkpoint(folder, 1, w | tensors, objects=objects)
        return written(folder, form, w | others)

    a, b = path(tmp_path / "a", first, before), path(tmp_path / "b", second, after)
    found = difference(contents(a), contents(b))

    assert (found.added, found.removed, found.num_equal) == (["new"], ["gone"], 3)
    assert [(c.name, c.what, c.before, c.after) for c in found.changed] == [
        ("kind", "kind", "tensor", "value"), ("lr", "value", "0.1", "0.2"),
    ]  # fmt: skip


HIDDEN = {
    "a.b (2)": lambda one: {"a.b": torch.ones(2), "a": {"b": torch.full((2,), float(one))}},
    "q.quantizer.1": lambda one: {
        "q": torch._make_per_tensor_quantized_tensor(torch.ones(3, dtype=torch.int8), one / 4, 0)
    },
    "s": lambda one: {"s": torch.full((2,), float(one)).untyped_storage()},
    "i.0": lambda one: {"i": torch.eye(3).roll(one, 0).to_sparse()},
}
"""What differs -> a state that differs in it, by a number."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", HIDDEN)
def test_a_difference_shows_wherever_torch_keeps_it(tmp_path, name):
    for number in (1, 2):
        torch.save(HIDDEN[name](number), tmp_path / f"{number}.pt")
    first, second = contents(tmp_path / "1.pt"), contents(tmp_path / "2.pt")

    assert [change.name for change in difference(first, second).changed] == [name]
    assert difference(first, first).is_equal


def test_elements_of_an_unknown_dtype_are_refused_by_name(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    held = contents(tmp_path / "a.pt")
    tensor = replace(held.tensors["w"], dtype="float3")

    with pytest.raises(FormatError, match=r"a.pt has elements of dtype 'float3'"):
        bits(held, tensor, tensor.boxes[0])


def test_an_object_that_holds_a_tensor_is_compared_by_its_bytes(tmp_path):
    tensors = {"w": torch.zeros(2)}
    a, b, c = (
        write_checkpoint(tmp_path / name, 1, tensors, objects={"rng": {"state": torch.full((3,), value)}})
        for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0))
    )

    assert difference(contents(a), contents(b)).is_equal
    assert [(change.name, change.what) for change in difference(contents(a), contents(c)).changed] == [
        ("rng", "object")
    ]


def test_bits_of_strided_tensors_are_those_that_torch_has(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"turned": base.t(), "some": base[1:3, ::2]}, tmp_path / "x.pt")

    held = contents(tmp_path / "x.pt")

    for fqn, tensor in {"turned": base.t(), "some": base[1:3, ::2]}.items():
        stored = held.tensors[fqn]
        assert bits(held, stored, stored.boxes[0]).tobytes() == tensor.contiguous().numpy().tobytes()


def test_objects_that_each_rank_has_its_own_of_are_all_listed(tmp_path):
    for rank, parts in enumerate(rows_of(some_state(), 2)):
        draft = open_draft(tmp_path, 1, "a", rank=rank)
        write_rank(draft, rank, 2, parts, {"rng": rank, "lr": 0.1})
    commit(draft, world_size=2)

    assert sorted(contents(tmp_path).objects) == ["lr", "rng", "rng@rank1"]


def test_metadata_that_is_damaged_or_gone_is_read_from_what_is_whole(tmp_path):
    path = write_checkpoint(tmp_path, 1, some_state())
    before = contents(path)
    for content in (b"broken", None):
        (path / METADATA).unlink()
        if content is not None:
            (path / METADATA).write_bytes(content)
        assert difference(before, contents(path)).is_equal
    for rank in (0, 1):
        shutil.rmtree(path / f"rank-{rank}")
    with pytest.raises(FormatError, match=r"has lost its .metadata"):
        contents(path)


def test_what_holds_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no checkpoint"):
        contents(tmp_path)


@pytest.mark.parametrize("form", ["ours-1", "dcp", "torch.save", "safetensors"])
def test_what_is_cut_short_is_never_equal(stored, form, tmp_path):
    whole = stored[form, "same"]
    copied = tmp_path / whole.name
    shutil.copytree(whole, copied) if whole.is_dir() else shutil.copy(whole, copied)
    image = max((file for file in [copied, *copied.rglob("*")] if file.is_file()), key=lambda file: file.stat().st_size)
    image.write_bytes(image.read_bytes()[: -image.stat().st_size // 3])

    with pytest.raises(FormatError):
        difference(contents(whole), contents(copied))
