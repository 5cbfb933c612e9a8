"""Checkpoints in other forms: other ranks' files, safetensors, torch.save, and back, bit for bit."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from headway.checkpoint import restore_into
from headway.checkpoint.torch_dcp.convert import export, rewrite
from headway.checkpoint.torch_dcp.sources import open_source
from headway.core.errors import DamageError, FormatError, InputError
from headway.storage import verify
from headway.storage.boxes import Box
from headway.storage.commit import committed
from tests.checkpoints import flip
from tests.launching import code_and_json
from tests.layouts_made import write, write_part


def state():
    torch.manual_seed(3)
    return {
        "model": {
            "w": torch.randn(700, 90), "half": torch.randn(33).bfloat16(), "n": torch.tensor(5),
            "none": torch.zeros(0, 2),
        },
        "opt": {"list": [{"m": torch.randn(9)}, {"m": torch.randn(8)}], "lr": 0.25},
        "step": 12,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return write(state(), tmp_path, 12)


def answer(*arguments):
    return code_and_json("ckpt", *arguments, "--json")


def equal(found, wanted):
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(equal(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(equal, found, wanted))
    return torch.equal(found, wanted) and found.dtype == wanted.dtype if torch.is_tensor(wanted) else found == wanted


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), most=st.integers(1, 60))
def test_files_hold_every_name_once_in_order_and_no_more_than_they_may(sizes, most, tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    torch.save({f"{k:02}": torch.zeros(size, dtype=torch.uint8) for k, size in enumerate(sizes)}, folder / "m.pt")
    done = export(folder / "m.pt", folder / "m.safetensors", file_bytes=most)
    files = [load_file(folder / name) for name in done.files if name.endswith(".safetensors")]

    assert [int(name) for file in files for name in sorted(file)] == list(range(len(sizes)))
    assert all(len(file) == 1 or sum(map(len, file.values())) <= most for file in files)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_resharded_checkpoint_is_bit_equal_for_stock_and_own_readers(tmp_path, folder, world):
    out = tmp_path / "step-13"
    code, told = answer("reshard", folder, "--world", world, "-o", out)

    assert (code, told["schema"], told["world_size"], told["step"]) == (0, "headway.ckpt.reshard/1", world, 13)
    assert sorted(path.name for path in out.glob("rank-*")) == [f"rank-{rank}" for rank in range(world)]
    assert verify(out).status == "good"
    empty = {"model": {name: torch.zeros_like(t) for name, t in state()["model"].items()}, "opt": {
        "list": [{"m": torch.zeros(9)}, {"m": torch.zeros(8)}], "lr": 0.0}, "step": 0}  # fmt: skip
    restore_into(out, empty)
    assert equal(empty, state())
    dcp_to_torch_save(out, tmp_path / "stock.pt")
    assert equal(torch.load(tmp_path / "stock.pt"), state())


def test_stock_checkpoints_are_imported_and_every_rank_writes_an_even_share(tmp_path):
    warnings.simplefilter("ignore")
    dcp.save(state(), checkpoint_id=tmp_path / "stock")
    code, told = answer("import", tmp_path / "stock", "-o", tmp_path / "step-1", "--world", 3, "--redundancy", "+1")

    assert (code, told["schema"], told["redundancy"]) == (0, "headway.ckpt.import/1", "+1")
    sizes = [(tmp_path / "step-1" / f"rank-{rank}" / f"__{rank}_0.distcp").stat().st_size for rank in range(3)]
    assert max(sizes) < 1.4 * sum(sizes) / 3
    assert (tmp_path / "step-1" / "rank-2" / "parity.json").exists()
    assert verify(tmp_path / "step-1").status == "good"


def test_safetensors_hold_what_was_saved_and_come_back(tmp_path, folder):
    code, told = answer("export", folder, "-o", tmp_path / "m.safetensors", "--prefix", "model.")

    assert (code, told["tensors"], told["left_out"]) == (0, 4, ["opt.list.0.m", "opt.list.1.m", "opt.lr", "step"])
    assert equal(load_file(tmp_path / "m.safetensors"), state()["model"])
    with safe_open(tmp_path / "m.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    rewrite(tmp_path / "m.safetensors", tmp_path / "step-0", world_size=2, prefix="model.")
    found = {"model": {name: torch.ones_like(tensor) for name, tensor in state()["model"].items()}}
    restore_into(tmp_path / "step-0", found)
    assert equal(found["model"], state()["model"])
    assert [entry.step for entry in committed(tmp_path)] == [0, 12]


def test_a_large_state_becomes_files_under_an_index_that_is_read_back(tmp_path, folder):
    done = export(folder, tmp_path / "m.safetensors", prefix="model.", dtype="bf16", file_bytes=100_000)

    assert done.files == ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "m.safetensors.index.json")
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.num_bytes
    with open_source(tmp_path / "m.safetensors.index.json") as source:
        w = source.tensor("w")
        assert torch.equal(w, state()["model"]["w"].bfloat16())
        assert torch.equal(source.tensor("w", Box((3, 1), (5, 7))), w[3:8, 1:8])
        assert source.tensors["n"] == ((), "int64")  # only floating-point tensors are cast


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_torch_file_is_nested_as_saved_or_flat_below_a_prefix_and_comes_back(tmp_path, folder, prefix):
    export(folder, tmp_path / "m.pt", prefix=prefix)
    found = torch.load(tmp_path / "m.pt", weights_only=True)

    assert equal(found, state()["model"] if prefix else state())
    record = rewrite(tmp_path / "m.pt", tmp_path / "step-1", prefix=prefix)
    assert record.step == 1
    export(tmp_path / "step-1", tmp_path / "again.pt", prefix=prefix)
    assert equal(torch.load(tmp_path / "again.pt"), found)


def test_objects_of_single_ranks_are_kept_refused_or_left_out(tmp_path):
    for rank in range(2):
        draft = write_part({"w": torch.ones(3), "who": {"rank": [rank]}}, tmp_path, 4, rank=rank, world_size=2)
    from headway.storage.commit import commit

    commit(draft, world_size=2)
    with pytest.raises(InputError, match=r"'who.rank' was saved by each of 2 ranks.*--without who"):
        rewrite(tmp_path / "step-4", tmp_path / "step-5", world_size=3)
    rewrite(tmp_path / "step-4", tmp_path / "step-5", world_size=3, without=["who"])
    rewrite(tmp_path / "step-4", tmp_path / "step-6", world_size=2)

    with open_source(tmp_path / "step-5") as five, open_source(tmp_path / "step-6") as six:
        assert (five.objects, six.objects) == ([], ["who.rank"])
        assert sorted(six.records("who.rank", 2)) == [0, 1]


def test_damage_stops_a_conversion_and_leaves_nothing(tmp_path, folder):
    flip(folder / "rank-0" / "__0_0.distcp", 20_000, 4)

    with pytest.raises(DamageError, match=r"in model.w"):
        rewrite(folder, tmp_path / "step-13")
    with pytest.raises(DamageError, match=r"in model.w"):
        export(folder, tmp_path / "m.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12"]


@pytest.mark.parametrize(
    ("call", "error", "rule"),
    [
        (lambda f, t: export(f, t / "m.onnx"), InputError, r"m.onnx has a suffix that says no format"),
        (lambda f, t: export(f, t / "m.pt", dtype="int8"), InputError, r"unknown dtype 'int8'"),
        (
            lambda f, t: export(f, t / "m.pt", prefix="modle."),
            InputError,
            r"begins with 'modle.'. Did you mean 'model.'",
        ),
        (lambda f, t: export(f, f), InputError, "suffix"),
        (lambda f, t: export(f, t / "no" / "m.pt"), InputError, "does not exist. Create it first"),
        (lambda f, t: rewrite(f, f), InputError, "exists already"),
        (lambda f, t: rewrite(f, t / "step-1", world_size=0), InputError, "at least one rank"),
        (lambda f, t: rewrite(f, t / "step-1", world_size=2, redundancy="9"), InputError, "9"),
        (lambda f, t: open_source(t / "none.pt"), InputError, "does not exist"),
        (lambda f, t: open_source(t), FormatError, "is no checkpoint"),
        (lambda f, t: open_source(made(t / "a.txt", b"")), FormatError, "suffix that says no format"),
        (lambda f, t: open_source(made(t / "a.pt", b"no zip")), (FormatError, InputError), "a.pt"),
        (lambda f, t: open_source(made(t / "a.safetensors", b"short")), FormatError, "cannot be read"),
        (lambda f, t: open_source(made(t / "a.safetensors.index.json", b"{}")), FormatError, "no index"),
    ],
)
def test_odd_input_is_told_with_its_rule(tmp_path, folder, call, error, rule):
    with pytest.raises(error, match=rule):
        call(folder, tmp_path)


def made(path, data):
    path.write_bytes(data)
    return path


def test_what_the_formats_cannot_hold_or_may_not_run_is_refused(tmp_path):
    place = write({"z": torch.ones(2, dtype=torch.complex128)}, tmp_path, 1)
    with pytest.raises(InputError, match=r"'z' is complex128, which safetensors cannot hold"):
        export(place, tmp_path / "m.safetensors")
    torch.save({"f": torch.nn.Linear(1, 1)}, tmp_path / "code.pt")
    with pytest.raises(InputError, match="may run code"):
        rewrite(tmp_path / "code.pt", tmp_path / "step-2")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(FormatError, match="no mapping of names"):
        rewrite(tmp_path / "list.pt", tmp_path / "step-2")
    save_file({"w": torch.ones(1)}, tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="exists already"):
        export(place, tmp_path / "m.safetensors")
