"""What checkpoints hold, and how two differ: over formats, layouts and numbers of ranks."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headway.core.errors import FormatError, InputError
from headway.storage.contents import bits, contents
from headway.storage.difference import difference
from headway.storage.manifest import METADATA
from tests.checkpoints import some_state, write_checkpoint


def written(folder: Path, form: str, state: dict[str, torch.Tensor]) -> Path:
    """Write a state in one of the known forms; return what to name."""
    if form.startswith("ours"):
        return write_checkpoint(folder, 1, state, world_size=int(form[-1]))
    if form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
        "gone": torch.zeros(2),
        "dtype": torch.zeros(2),
        "shape": torch.zeros(2),
        "nan": torch.tensor([float("nan")]),
    }
    second = {
        "new": torch.zeros(2),
        "dtype": torch.zeros(2).half(),
        "shape": torch.zeros(3),
        "nan": first["nan"].clone(),
    }
    a = write_checkpoint(tmp_path / "a", 1, first, objects={"lr": 0.1, "same": [1]})
    b = write_checkpoint(tmp_path / "b", 1, second, objects={"lr": 0.2, "same": [1]})

    found = difference(contents(a), contents(b))

    assert (found.added, found.removed) == (["new"], ["gone"])
    assert [(c.name, c.what, c.before, c.after) for c in found.changed] == [
        ("dtype", "dtype", "float32", "float16"), ("lr", "object", "", ""), ("shape", "shape", "[2]", "[3]"),
    ]  # fmt: skip
    assert found.num_equal == 2  # a NaN is bit-equal to itself


def test_bits_of_strided_tensors_are_those_that_torch_has(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"turned": base.t(), "some": base[1:3, ::2]}, tmp_path / "x.pt")

    held = contents(tmp_path / "x.pt")

    for fqn, tensor in {"turned": base.t(), "some": base[1:3, ::2]}.items():
        stored = held.tensors[fqn]
        assert bits(held, stored, stored.boxes[0]).tobytes() == tensor.contiguous().numpy().tobytes()


def test_objects_that_each_rank_has_its_own_of_are_all_listed(tmp_path):
    from headway.storage.commit import commit
    from headway.storage.draft import open_draft
    from tests.checkpoints import rows_of, write_rank

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
