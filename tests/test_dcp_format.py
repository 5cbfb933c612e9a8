"""DCP's metadata, both ways, held to stock torch.distributed.checkpoint."""

import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from headway.core.errors import FormatError
from headway.storage.formats.dcp import metadata_bytes, read_metadata
from headway.storage.manifest import METADATA, Piece, RankManifest, StoredObject
from tests.checkpoints import some_state, write_checkpoint
from tests.refusals import refused

STATE = {
    "model": {"w": torch.arange(60.0).reshape(6, 10), "b": torch.ones(3, dtype=torch.bfloat16), "s": torch.tensor(4)},
    "opt": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    "note": {"text": "hello"},
}


def stock_save(state: dict, path) -> None:
    dcp.save(state, checkpoint_id=path)


def stock_load(state: dict, path) -> None:
    dcp.load(state, checkpoint_id=path)


def test_stock_metadata_is_told_as_torch_reads_it(tmp_path):
    stock_save(STATE, tmp_path / "c")
    data = (tmp_path / "c" / METADATA).read_bytes()
    theirs = pickle.loads(data)

    ours = read_metadata(data)

    tensors = {fqn: t for fqn, t in theirs.state_dict_metadata.items() if hasattr(t, "size")}
    assert set(ours.tensors) == set(tensors)
    assert set(ours.objects) == set(theirs.state_dict_metadata) - set(tensors)
    for fqn, tensor in tensors.items():
        assert (ours.tensors[fqn].dtype, ours.tensors[fqn].shape) == (
            str(tensor.properties.dtype).removeprefix("torch."),
            tuple(tensor.size),
        )
    assert {(fqn, where.file, where.record_offset, where.record_bytes) for fqn, where in ours.records()} == {
        (index.fqn, at.relative_path, at.offset, at.length) for index, at in theirs.storage_data.items()
    }
    assert ours.paths == theirs.planner_data
    assert ours.version == theirs.version


def test_stock_dcp_loads_what_is_written_bit_for_bit(tmp_path):
    state = some_state()
    path = write_checkpoint(tmp_path, 3, state, world_size=3, objects={"lr": 0.25})
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()} | {"lr": 0.0}

    stock_load(target, path)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)

    assert target.pop("lr") == whole["lr"] == 0.25
    for fqn, tensor in state.items():
        first, last = fqn.split(".")
        assert torch.equal(target[fqn], tensor)
        assert torch.equal(whole[first][last], tensor)


def test_what_is_written_is_read_back_the_same(tmp_path):
    state = some_state()
    path = write_checkpoint(tmp_path, 3, state, world_size=2)

    told = read_metadata((path / METADATA).read_bytes())

    assert {fqn: (t.dtype, t.shape) for fqn, t in told.tensors.items()} == {
        fqn: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for fqn, t in state.items()
    }
    assert told.paths["model.weight"] == ("model", "weight")


def piece(fqn: str, offsets: tuple, lengths: tuple, shape: tuple = (4,), at: int = 0) -> Piece:
    return Piece(fqn, "float32", shape, offsets, lengths, "rank-0/__0_0.distcp", at, 100, at + 64, 16, 0)


def test_empty_pieces_do_not_hide_their_neighbours():
    manifest = RankManifest(1, "a", 0, 1, None, pieces=(piece("w", (0,), (0,), at=4096), piece("w", (0,), (4,))))

    told = read_metadata(metadata_bytes([manifest]))

    assert [chunk.lengths for chunk in told.tensors["w"].chunks] == [(4,)]


def test_objects_that_ranks_wrote_alike_are_one_and_others_show_the_lowest_ranks():
    manifests = [
        RankManifest(1, "a", rank, 2, None, objects=(
            StoredObject("same", rank, f"rank-{rank}/__{rank}_0.distcp", 0, 10, 77),
            StoredObject("own", rank, f"rank-{rank}/__{rank}_0.distcp", 4096, 10, rank),
        ))
        for rank in (1, 0)
    ]  # fmt: skip

    told = read_metadata(metadata_bytes(manifests))

    assert {fqn: where.file for fqn, where in told.objects.items()} == dict.fromkeys(
        ("same", "own"), "rank-0/__0_0.distcp"
    )


test_a_pickle_of_something_else_is_refused = refused(
    (lambda: read_metadata(pickle.dumps({"a": 1})), r"\.metadata is no metadata of a distributed checkpoint"),
    (lambda: read_metadata(b""), "is no whole pickle"),
    (lambda: read_metadata(b"cos\nsystem\n(S'true'\ntR."), r"calls .*system.*may be an attack"),
    error=FormatError,
)


def test_metadata_that_does_not_say_where_a_tensor_is_is_refused(tmp_path):
    stock_save({"w": torch.zeros(3)}, tmp_path / "c")
    whole = pickle.loads((tmp_path / "c" / METADATA).read_bytes())
    whole.storage_data = {}
    file = io.BytesIO()
    pickle.dump(whole, file)

    with pytest.raises(FormatError, match="does not say where 'w' is stored"):
        read_metadata(file.getvalue())


def test_metadata_of_older_torch_is_read_too(tmp_path):
    stock_save(STATE, tmp_path / "c")
    data = (tmp_path / "c" / METADATA).read_bytes()
    whole = pickle.loads(data)
    for attribute in ("version", "storage_meta"):  # torch 2.6 wrote neither, or None
        vars(whole).pop(attribute)
    whole.planner_data = None

    told = read_metadata(pickle.dumps(whole))

    assert (told.tensors, told.objects) == (read_metadata(data).tensors, read_metadata(data).objects)
    assert (told.paths, told.version) == ({}, None)


def test_records_that_an_extension_transformed_say_so(tmp_path):
    stock_save({"w": torch.zeros(3)}, tmp_path / "c")
    whole = pickle.loads((tmp_path / "c" / METADATA).read_bytes())
    for info in whole.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]

    told = read_metadata(pickle.dumps(whole))

    assert told.tensors["w"].chunks[0].transforms == ("stream.zstd",)
