"""DCP's own calls with headway's parts: the same files, both ways, at any failure an older checkpoint stands."""

import os
import threading
import warnings
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import headway.checkpoint as ours
from headway.checkpoint import HeadwayPlanner, HeadwayReader, HeadwayStager, HeadwayWriter, restore_into
from headway.checkpoint.saves import image as images
from headway.checkpoint.torch_dcp import stager as stagers
from headway.core.errors import BackgroundError, DamageError, FormatError, InputError
from headway.storage import verify
from headway.storage.commit import committed
from tests.checkpoints import flip
from tests.spawn import on_ranks


def state(seed=0):
    torch.manual_seed(seed)
    made = torch.randn
    return {
        "model": {
            "w": made(70, 30), "b": made(5).to(torch.bfloat16), "none": torch.empty(0, 3), "n": torch.tensor(seed),
        },
        "view": made(40, 20).t(),
        "deep": [{"t": made(3)}, 4],
        "lr": 0.5 + seed,
    }  # fmt: skip


def flat(value, prefix=""):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        return {prefix: value}
    return {name: leaf for key, each in inner for name, leaf in flat(each, f"{prefix}.{key}").items()}


def same(a, b):
    a, b = flat(a), flat(b)
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) and v.dtype == b[k].dtype if torch.is_tensor(v) else v == b[k] for k, v in a.items()
    )


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=5), st.integers(1, 5))
@settings(max_examples=30)
def test_every_element_of_a_replicated_tensor_is_written_by_one_rank(shapes, world_size):
    planners = [HeadwayPlanner() for _ in range(world_size)]
    tensors = {f"t{index}": torch.zeros(shape) for index, shape in enumerate(shapes)}
    for planner in planners:
        planner.set_up_planner(tensors)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])

    count = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            chunk = item.tensor_data.chunk
            place = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            count[item.index.fqn][place] += 1
            assert planner.resolve_data(item).shape == chunk.sizes
    assert all(bool((each == 1).all()) for each in count.values())
    assert set(metadata.state_dict_metadata) == set(tensors)


@pytest.mark.parametrize("planner", [HeadwayPlanner, DefaultSavePlanner])
def test_stock_loads_what_the_writer_saved_and_the_reader_what_stock_saved(tmp_path, planner):
    dcp.save(state(1), storage_writer=HeadwayWriter(tmp_path / "step-7"), planner=planner())
    dcp.save(state(1), checkpoint_id=tmp_path / "stock")

    for place, reader in (
        ("step-7", dcp.FileSystemReader), ("stock", HeadwayReader), ("step-7", HeadwayReader)
    ):  # fmt: skip
        found = state(2)
        dcp.load(found, storage_reader=reader(tmp_path / place))
        assert same(found, state(1))
    assert verify(tmp_path / "step-7").status == "good"
    assert [entry.step for entry in committed(tmp_path)] == [7]


def test_what_the_writer_saved_is_restored_by_the_engine_and_cast_by_the_reader(tmp_path):
    model = torch.nn.Linear(30, 20)
    ours.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-3")

    mine, half = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20).bfloat16()
    restore_into(tmp_path / "step-3", {"model": mine})
    ours.load({"model": half}, checkpoint_id=tmp_path / "step-3")

    assert torch.equal(mine.weight, model.weight)
    assert torch.equal(half.weight, model.weight.bfloat16())


def test_tensors_that_are_no_dense_ones_are_stored_as_objects(tmp_path):
    sparse = torch.eye(3).to_sparse()
    ours.save({"s": sparse, "w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    found = {"s": None, "w": torch.zeros(2)}
    ours.load(found, checkpoint_id=tmp_path / "a")

    assert torch.equal(found["s"].to_dense(), torch.eye(3))
    with pytest.raises(CheckpointException, match=r"has no plain elements.*HeadwayPlanner"):
        dcp.save({"s": sparse}, storage_writer=HeadwayWriter(tmp_path / "b"))


def test_saving_again_changes_places_in_one_act_and_spares_every_other_folder(tmp_path):
    place = tmp_path / "latest"
    place.mkdir()
    for seed in (1, 2):
        ours.save(state(seed), checkpoint_id=place)
    found = state()
    ours.load(found, checkpoint_id=place)

    assert same(found, state(2))
    assert os.listdir(tmp_path) == ["latest"]
    with pytest.raises(InputError, match=r"is a checkpoint already.*overwrite=True"):
        ours.save(state(3), checkpoint_id=place, overwrite=False)
    (place / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'notes.txt'.*a folder of its own"):
        ours.save(state(3), checkpoint_id=place)
    assert (place / "notes.txt").exists()
    assert os.listdir(tmp_path) == ["latest"]


def test_a_flipped_bit_and_a_cut_file_are_errors_that_name_file_and_tensor(tmp_path):
    ours.save({"w": torch.ones(3000)}, checkpoint_id=tmp_path / "step-1")
    image = tmp_path / "step-1" / "rank-0" / "__0_0.distcp"
    flip(image, 8000)

    found = {"w": torch.zeros(3000)}
    with pytest.raises(DamageError, match=r"rank-0/__0_0\.distcp is damaged at bytes 4096\.\.8192, in w"):
        ours.load(found, checkpoint_id=tmp_path / "step-1")
    assert not found["w"].any()
    with pytest.raises(CheckpointException, match="is damaged at bytes 4096"):
        dcp.load(found, storage_reader=HeadwayReader(tmp_path / "step-1"))
    os.truncate(image, 9000)
    with pytest.raises(DamageError, match=r"rank-0/__0_0\.distcp (is damaged|ends) at byte"):
        ours.load(found, checkpoint_id=tmp_path / "step-1")


def test_a_plan_from_a_cache_is_refused_and_a_plan_that_is_out_of_date_too(tmp_path):
    with pytest.raises(CheckpointException, match=r"comes from a cache.*HeadwayPlanner"):
        dcp.save(state(), storage_writer=HeadwayWriter(tmp_path / "a"),
                 planner=DefaultSavePlanner(enable_plan_caching=True))  # fmt: skip

    class Casts(DefaultSavePlanner):
        def transform_object(self, item, found):
            return found.half() if torch.is_tensor(found) else super().transform_object(item, found)

    with pytest.raises(CheckpointException, match=r"planned as torch.float32 \[2\] and is torch.float16"):
        dcp.save({"w": torch.ones(2)}, storage_writer=HeadwayWriter(tmp_path / "a"), planner=Casts())
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda p: dcp.save({}, storage_writer=HeadwayWriter()), "there is no folder to save to"),
        (lambda p: HeadwayWriter("s3://bucket/a"), "is no folder. Save to one that all ranks share"),
        (lambda p: HeadwayWriter(p, redundancy="2x"), "2x"),
        (lambda p: dcp.save({}, storage_writer=HeadwayWriter(p / "a"), use_collectives=False), "use_collectives=False"),
        (lambda p: ours.load({}, checkpoint_id=p / "none"), "is no folder"),
        (lambda p: ours.load({}, checkpoint_id=p), "is no checkpoint"),
        (lambda p: dcp.load({}, storage_reader=HeadwayReader()), "there is no folder to load"),
    ],
)  # fmt: skip
def test_bad_input_is_told_with_its_rule(tmp_path, call, rule):
    with pytest.raises((InputError, FormatError, CheckpointException, AssertionError), match=rule):
        call(tmp_path)


def test_what_is_staged_is_the_state_of_that_moment_in_memory_that_is_used_again():
    stager, live = HeadwayStager(), state(1)
    live["tied"] = live["model"]["w"]
    staged = stager.stage(live)
    with torch.no_grad():
        live["model"]["w"].zero_()

    assert torch.equal(staged["model"]["w"], state(1)["model"]["w"])
    assert staged["tied"].data_ptr() == staged["model"]["w"].data_ptr()
    first = staged["model"]["w"].data_ptr()
    other = stager.stage(live)
    assert other["model"]["w"].data_ptr() != first
    del staged
    assert stager.stage(live)["model"]["w"].data_ptr() == first
    del other
    stager.close()


def test_a_save_behind_the_training_holds_the_state_of_its_call_and_tells_of_failures(tmp_path):
    stager, live = HeadwayStager(), state(1)
    future = ours.async_save(live, checkpoint_id=tmp_path / "step-1", stager=stager)
    live["model"]["w"].zero_()
    future.result(60)
    found = state(2)
    ours.load(found, checkpoint_id=tmp_path / "step-1")

    assert same(found, state(1))
    (tmp_path / "file").write_text("")
    told = ours.async_save(live, checkpoint_id=tmp_path / "file" / "step-2", stager=stager)
    with pytest.raises(NotADirectoryError):
        told.result(60)
    wait([ours.async_save(live, checkpoint_id=tmp_path / "file" / "step-2", stager=stager)], 60)
    with pytest.raises(BackgroundError, match="the save before was not written"):
        ours.async_save(live, checkpoint_id=tmp_path / "step-3", stager=stager)
    stock = dcp.async_save(
        live, storage_writer=HeadwayWriter(tmp_path / "step-4"), planner=HeadwayPlanner(), async_stager=stager
    )
    stock.result(60)
    stager.close()
    assert verify(tmp_path / "step-4").status == "good"


@pytest.fixture
def slow_device(monkeypatch):
    """Have states count as on a device whose copies arrive once the event is set."""
    gate = threading.Event()

    class Slow(stagers.Snapshot):
        def wait(self):
            assert gate.wait(20), "the caller waited for the copies"

    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: None)
    monkeypatch.setattr(images, "_CUDA", SimpleNamespace(device=nullcontext, cudart=lambda: cudart))
    monkeypatch.setattr(stagers, "Snapshot", Slow)
    monkeypatch.setattr(stagers, "cuda_device_of", lambda tensors: torch.device("cpu"))
    return gate


def test_staging_from_a_device_goes_on_behind_the_training_and_its_memory_is_used_again(slow_device, tmp_path):
    stager, live = HeadwayStager(), state(1)
    writer = HeadwayWriter(tmp_path / "step-1")
    answer = dcp.async_save(live, storage_writer=writer, planner=HeadwayPlanner(), async_stager=stager)
    future = ours.async_save(live, checkpoint_id=tmp_path / "step-2", stager=stager)

    assert not answer.staging_completion.done()
    assert not answer.upload_completion.done()
    slow_device.set()
    answer.staging_completion.result(60), answer.upload_completion.result(60), future.result(60)
    stager.synchronize_staging()
    assert {verify(tmp_path / f"step-{k}").status for k in (1, 2)} == {"good"}
    del answer, future
    for _ in range(6):  # more often than there are images
        assert same(stager.stage(live).result(), live)
    stager.close()


def test_a_copy_that_fails_is_the_error_of_the_save_and_of_no_later_one(slow_device, tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(stagers.Snapshot, "wait", fail)
    stager = HeadwayStager()
    with pytest.raises(RuntimeError, match="CUDA error"):
        ours.async_save(state(1), checkpoint_id=tmp_path / "step-1", stager=stager).result(60)
    stager.synchronize_staging()
    stager.close()

    assert committed(tmp_path) == []


def _four_ranks(root):
    warnings.simplefilter("ignore")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    full = torch.randn(90, 40)
    states = {
        "plain": torch.randn(600, 300),
        "rows": distribute_tensor(full, mesh, [Replicate(), Shard(0)]),
        "unlike": torch.full((300, 300), float(rank)),
        "who": rank,
    }
    ours.save(dict(states), checkpoint_id=root / "step-1")
    future = ours.async_save(dict(states), checkpoint_id=root / "step-2", redundancy="+1")
    for _ in range(20):  # what hangs where both share a group
        dist.all_reduce(torch.ones(4))
    future.result(60)
    found = {
        "plain": torch.zeros(600, 300),
        "rows": distribute_tensor(torch.zeros(90, 40), mesh, [Shard(1), Shard(0)]),
        "unlike": torch.full((300, 300), -1.0),
        "who": -1,
    }
    ours.load(found, checkpoint_id=root / "step-2")
    stock = {"plain": torch.zeros(600, 300), "unlike": torch.zeros(300, 300)}
    dcp.load(stock, checkpoint_id=root / "step-1")
    good = (
        torch.equal(found["plain"], states["plain"]) and torch.equal(stock["plain"], states["plain"])
        and torch.equal(found["rows"].full_tensor(), full)
    )  # fmt: skip
    return good, found["unlike"].unique().tolist(), stock["unlike"].unique().tolist(), found["who"]


@pytest.mark.slow
def test_four_ranks_share_the_writing_by_rows_and_any_layout_loads_it(tmp_path):
    assert on_ranks(_four_ranks, 4, tmp_path) == [(True, [0.0], [0.0], 0)] * 4
    sizes = [(tmp_path / "step-1" / f"rank-{rank}" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    shared = sum(sizes) - 300 * 300 * 4  # what differs between ranks is the first one's
    assert max(sizes[1:]) < 1.2 * shared / 4
    for step in (1, 2):
        assert verify(tmp_path / f"step-{step}").status == "good"
    assert (tmp_path / "step-2" / "rank-3" / "parity.json").exists()


def _one_fails(root):
    warnings.simplefilter("ignore")
    planned = {"w": torch.ones(8) if dist.get_rank() == 0 else torch.ones(9)}
    try:
        ours.save(planned, checkpoint_id=root / "step-5")
    except InputError as error:
        return str(error)
    return "saved"


def test_ranks_that_save_unlike_states_are_told_so_and_leave_nothing(tmp_path):
    first, second = on_ranks(_one_fails, 2, tmp_path)

    assert "ranks differ on 'w'" in first
    assert "ranks differ on 'w'" in second
    assert not list(Path(tmp_path).iterdir())
