"""Restoring into live objects: what is refused before anything changes, what is verified, whose objects."""

import itertools
import re
import warnings
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headway.checkpoint import FlatShard, restore_into
from headway.checkpoint.restores.restore import CheckpointReading
from headway.checkpoint.saves.image_file import host_bytes
from headway.checkpoint.state import states
from headway.checkpoint.state.shards import is_tensor, leaves
from headway.core.errors import DamageError, InputError
from headway.storage.commit import commit
from headway.storage.digests import block_bytes_for
from headway.storage.manifest import MANIFEST, RankManifest, read_record
from tests.checkpoints import MemoryFiles, flip
from tests.layouts_made import write, write_part
from tests.spawn import on_ranks


def model(seed=0, width=300):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))


@pytest.fixture
def folder(tmp_path):
    return write({"model": model(1).state_dict(), "step": 3}, tmp_path, 3)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def image_of(folder):
    return folder / "rank-0" / "__0_0.distcp"


def place_of(folder, fqn):
    manifest = read_record(folder / "rank-0" / MANIFEST, RankManifest)
    return next(piece for piece in manifest.pieces if piece.fqn == fqn)


def test_a_module_is_filled_in_place_and_the_report_says_from_what(folder):
    mine = model(2)
    memory, version = mine[0].weight.data_ptr(), mine[0].weight._version

    report = restore_into(folder, {"model": mine})

    assert equal(mine, model(1))
    assert (mine[0].weight.data_ptr(), report.source, report.step) == (memory, "local", 3)
    assert mine[0].weight._version > version
    assert report.hashed_bytes == report.read_bytes >= sum(p.nbytes for p in mine.parameters())
    assert (report.missing, report.unexpected, report.repaired) == ((), (), ())


@pytest.mark.parametrize("verify", ["off", "read", "full"])
def test_stock_and_own_checkpoints_restore_alike(tmp_path, folder, verify):
    warnings.simplefilter("ignore")
    dcp.save({"model": model(1).state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)

    for place in (folder, tmp_path / "stock"):
        mine = model(2)
        restore_into(place, {"model": mine}, verify=verify)

        assert equal(mine, model(1))


def test_missing_names_are_five_with_their_nearest_and_nothing_is_changed(folder):
    mine = torch.nn.ModuleDict({f"layer{n}": torch.nn.Linear(2, 2) for n in range(4)})
    state = {"model": {**mine.state_dict(), "0.weigth": torch.zeros(300, 300)}, "step": 0}

    with pytest.raises(InputError, match=r"lacks 9 of the values.*'model\.layer0\.weight'.* and 4 more"):
        restore_into(folder, state)
    with pytest.raises(InputError, match=r"'model\.0\.weigth' \(nearest: 'model\.0\.weight'\)"):
        restore_into(folder, {"model": {"0.weigth": torch.zeros(300, 300)}})

    assert state["step"] == 0
    report = restore_into(folder, state, strict=False)
    assert (state["step"], len(report.missing), report.unexpected) == (3, 9, tuple(sorted(
        f"model.{name}" for name in model().state_dict()
    )))  # fmt: skip


def test_shapes_and_types_that_differ_are_all_in_one_error_and_nothing_is_changed(folder):
    mine = model(2, width=200)

    with pytest.raises(InputError, match=r"saved as float32 \[300, 300\] and is float32 \[200, 200\] here; .*'mo"):
        restore_into(folder, {"model": mine})
    with pytest.raises(InputError, match=r"saved as float32 \[300, 300\] and is bfloat16 \[300, 300\] here"):
        restore_into(folder, {"model": model(2).to(torch.bfloat16)})

    assert equal(mine, model(2, width=200))


def test_what_a_module_lacks_is_refused_unless_it_is_to_be_left_out(folder):
    smaller = torch.nn.Sequential(torch.nn.Linear(300, 300))

    with pytest.raises(InputError, match=r"holds what the module lacks: model\.2\.bias, model\.2\.weight"):
        restore_into(folder, {"model": smaller})

    report = restore_into(folder, {"model": smaller}, strict=False)
    assert report.unexpected == ("model.2.bias", "model.2.weight")
    assert torch.equal(smaller[0].weight, model(1)[0].weight)


def test_a_flip_is_found_when_it_is_read_and_never_reaches_the_tensor(folder):
    piece = place_of(folder, "model.0.weight")
    flip(image_of(folder), piece.payload_offset + 200_000, 16)
    mine = model(2)

    with pytest.raises(DamageError, match=r"__0_0\.distcp is damaged at bytes \d+\.\.\d+, in model\.0\.weight"):
        restore_into(folder, {"model": mine})
    row = 200_000 // 4 // 300
    assert torch.equal(mine[0].weight[row], model(2)[0].weight[row])

    restore_into(folder, {"model": {"2.weight": torch.zeros(4, 300)}})
    restore_into(folder, {"model": mine}, verify="off")
    assert not equal(mine, model(1))


def test_full_verification_finds_what_is_not_read(folder):
    flip(image_of(folder), place_of(folder, "model.0.weight").payload_offset, 16)
    part = {"model": {"2.bias": torch.zeros(4)}}

    restore_into(folder, part)
    with pytest.raises(DamageError, match=r"is damaged: .*model\.0\.weight.*Restore an older step"):
        restore_into(folder, part, verify="full")


def test_a_part_of_a_tensor_is_verified_by_its_own_blocks(tmp_path):
    folder = write({"w": torch.arange(2_000_000, dtype=torch.float64)}, tmp_path)
    part = FlatShard(torch.zeros(100_000, dtype=torch.float64), (2_000_000,), 700_000, 800_000)

    report = restore_into(folder, {"w": part})

    assert torch.equal(part.tensor, torch.arange(700_000, 800_000, dtype=torch.float64))
    assert 800_000 <= report.hashed_bytes <= 800_000 + 2 * block_bytes_for(image_of(folder).stat().st_size)


class Held:
    """An object with a state of its own, which it may refuse to change."""

    def __init__(self, *, refuses=False, **values):
        self.values, self.refuses = values, refuses

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        epoch, self.values["epoch"] = self.values["epoch"], state["epoch"]
        if self.refuses and state["epoch"] != epoch:
            raise OSError("the shards of this epoch are gone")
        self.values["seen"] = state["seen"]


def stepped(net):
    """An optimizer over a model's parameters, with momentum."""
    optimizer = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[2].parameters()}], momentum=0.9)
    net(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    return optimizer


def everything(seed, **options):
    net = model(seed)
    return {
        "first": Held(epoch=seed, seen=torch.full((5,), float(seed))), "model": net, "opt": stepped(net),
        "plain": {"best": float(seed)}, "second": Held(epoch=seed, seen=torch.full((5,), float(seed)), **options),
    }  # fmt: skip


def frozen(objects):
    """All bits of some objects."""
    state = {name: thing.state_dict() if hasattr(thing, "state_dict") else thing for name, thing in objects.items()}
    values = {leaf.fqn: leaf.value for leaf in leaves(state)}
    return {fqn: bytes(host_bytes(value)) if is_tensor(value) else value for fqn, value in values.items()}


def saved(objects, root):
    state = {name: thing.state_dict() if hasattr(thing, "state_dict") else thing for name, thing in objects.items()}
    return write(state, root)


def test_an_object_that_refuses_is_named_and_all_others_are_as_they_were(tmp_path):
    source, mine = everything(1), everything(2, refuses=True)
    folder, before, seen = saved(source, tmp_path), frozen(mine), mine["first"].values["seen"]

    with pytest.raises(InputError, match=r"'second' refuses what is stored of it \(OSError: the shards.*leave it out"):
        restore_into(folder, mine)

    assert frozen(mine) == before
    assert mine["first"].values["seen"] is seen
    mine["second"].refuses = False
    restore_into(folder, mine)
    assert frozen(mine) == frozen(source)
    assert mine["first"].values["seen"] is seen  # in place


def test_an_object_that_refuses_even_the_state_it_had_is_said_to_be_in_none(tmp_path):
    folder, mine = saved(everything(1), tmp_path), everything(2)
    mine["second"].load_state_dict = lambda state: 1 / 0

    with pytest.raises(InputError, match=r"'second' refuses.*the state which it had before: it is in none now"):
        restore_into(folder, mine)

    assert mine["first"].values["epoch"] == 2


def test_parameter_groups_that_differ_are_refused_before_anything_is_changed(tmp_path):
    folder, mine = saved(everything(1), tmp_path), everything(2)
    parameters = [*mine["model"].parameters()]
    for sizes in ([4], [3, 1], [1, 1, 2]):
        cuts = [0, *itertools.accumulate(sizes)]
        groups = [{"params": parameters[start:stop]} for start, stop in itertools.pairwise(cuts)]
        mine["opt"] = torch.optim.SGD(groups, momentum=0.9)
        before = frozen(mine)

        rule = rf"lacks|saved with groups of \[2, 2\] parameters and has groups of {re.escape(str(sizes))}"
        with pytest.raises(InputError, match=rule):
            restore_into(folder, mine)

        assert frozen(mine) == before


@pytest.mark.parametrize("size", ["small", "large"])
def test_damage_that_is_met_while_tensors_are_filled_says_that_the_state_is_mixed(tmp_path, size, monkeypatch):
    monkeypatch.setattr(states, "KEPT_BYTES", 1 if size == "large" else states.KEPT_BYTES)
    folder, mine = saved(everything(1), tmp_path), everything(2)
    flip(image_of(folder), place_of(folder, "model.2.bias").payload_offset, 16)

    with pytest.raises(DamageError, match=r"model\.2\.bias.*The state is mixed now.*restore another step"):
        restore_into(folder, mine)

    assert mine["plain"] == {"best": 2.0}


def test_damage_of_what_is_asked_first_changes_nothing(tmp_path):
    folder, mine = saved(everything(1), tmp_path), everything(2)
    flip(image_of(folder), place_of(folder, "second.seen").payload_offset, 16)
    before = frozen(mine)

    with pytest.raises(DamageError, match=r"second\.seen") as caught:
        restore_into(folder, mine)

    assert "mixed" not in str(caught.value)
    assert frozen(mine) == before


def test_a_large_object_and_a_module_that_refuse_when_filled_say_that_the_state_is_mixed(tmp_path, monkeypatch):
    folder = saved(everything(1), tmp_path)
    mine = everything(2)
    mine["model"].register_load_state_dict_post_hook(lambda *_: 1 / 0)
    with pytest.raises(InputError, match=r"'model' refuses what .*ZeroDivisionError.*The state is mixed now"):
        restore_into(folder, mine)

    monkeypatch.setattr(states, "KEPT_BYTES", 1)
    with pytest.raises(InputError, match=r"'second' refuses what .*OSError.*The state is mixed now"):
        restore_into(folder, everything(2, refuses=True))


def test_an_error_that_is_not_ours_keeps_its_type_and_notes_that_the_state_is_mixed(folder, monkeypatch):
    def fails(_, shards):
        if shards:
            raise MemoryError("none left")

    monkeypatch.setattr(CheckpointReading, "_aim", fails)
    with pytest.raises(MemoryError) as caught:
        restore_into(folder, {"model": model(2)})

    assert any("The state is mixed now" in note for note in caught.value.__notes__)


def test_a_value_that_cannot_be_put_where_it_belongs_is_refused_before_anything_is_changed(folder):
    state = {"model": MappingProxyType(model(2).state_dict()), "step": 0}
    holder = write({"model": {"note": 1, "w": torch.ones(2)}}, folder.parent / "other")
    mine = {"model": MappingProxyType({"note": 0, "w": torch.zeros(2)})}

    with pytest.raises(InputError, match=r"'model\.note' lies in a mappingproxy, which cannot be filled"):
        restore_into(holder, mine)

    assert mine["model"]["w"].tolist() == [0, 0]
    restore_into(folder, state)
    assert torch.equal(state["model"]["0.weight"], model(1)[0].weight)


class Wild:
    """A value that only an unrestricted unpickler makes."""

    def __eq__(self, other):
        return isinstance(other, Wild)

    __hash__ = None


def test_a_wild_object_comes_from_a_verified_commit_of_ours_or_by_trust_only(tmp_path):
    warnings.simplefilter("ignore")
    state = {"thing": {"a": Wild()}, "w": torch.ones(2)}
    ours = write(state, tmp_path)
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)

    def loaded(place, **options):
        state = {"thing": {"a": None}, "w": torch.zeros(2)}
        restore_into(place, state, **options)
        return state["thing"]["a"]

    assert loaded(ours) == Wild()
    for place, options in ((ours, {"verify": "off"}), (tmp_path / "stock", {})):
        with pytest.raises(InputError, match=r"'thing\.a' of .* holds more than plain values.*trust_objects=True"):
            loaded(place, **options)
        assert loaded(place, **options, trust_objects=True) == Wild()


def _save_own(root: str, any_world: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    draft = write_part({"rng": {"seed": rank}, "n": 5}, root, 1, rank=rank, world_size=world, any_world=any_world)
    dist.barrier()
    if rank == 0:
        commit(draft, world_size=world)


def _load_own(root: str) -> object:
    state = {"rng": {"seed": -1}, "n": 0}
    try:
        restore_into(f"{root}/step-1", state)
    except InputError as error:
        return str(error)
    return state["rng"]["seed"], state["n"]


@pytest.mark.slow
def test_objects_that_differ_go_back_to_their_ranks_and_elsewhere_only_where_they_may(tmp_path):
    on_ranks(_save_own, 2, str(tmp_path / "own"), False)
    on_ranks(_save_own, 2, str(tmp_path / "any"), True)

    assert on_ranks(_load_own, 2, str(tmp_path / "own")) == [(0, 5), (1, 5)]
    assert on_ranks(_load_own, 4, str(tmp_path / "any")) == [(0, 5), (1, 5), (1, 5), (1, 5)]
    for told in on_ranks(_load_own, 4, str(tmp_path / "own")):
        assert "'rng.seed' was saved by each of 2 ranks for itself" in told
        assert "Restore on 2 ranks, or leave 'rng' out" in told


def test_tied_weights_are_read_once_and_stay_tied(tmp_path):
    weight = torch.nn.Parameter(torch.randn(50, 8))
    folder = write({"model": {"a": weight, "b": weight}}, tmp_path)
    fresh = torch.nn.Parameter(torch.zeros(50, 8))

    report = restore_into(folder, {"model": {"a": fresh, "b": fresh}}, verify="off")

    assert torch.equal(fresh, weight)
    assert report.read_bytes <= weight.nbytes + 64
    apart = {"a": torch.zeros(50, 8), "b": torch.zeros(50, 8)}
    restore_into(folder, {"model": apart})
    assert torch.equal(apart["a"], weight)
    assert torch.equal(apart["b"], weight)


def test_a_lazily_conjugated_tensor_is_filled_with_what_it_shows(tmp_path):
    folder = write({"w": torch.tensor([1 + 2j, 3 - 1j])}, tmp_path)
    held = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    for place in (folder, MemoryFiles(held)):
        shown = torch.zeros(2, dtype=torch.complex64).conj()
        report = restore_into(place, {"w": shown})

        assert shown.tolist() == [1 + 2j, 3 - 1j]
        assert report.source == ("local" if place is folder else "memory")


def _train(sharded: bool, root: str, load: bool) -> list[object]:
    """Train a little on this world; save at the end, or restore first; return what it ends with, whole."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    if sharded:
        fully_shard(net[0])
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if load:
        restore_into(f"{root}/step-1", {"model": net, "opt": optimizer})
    for _ in range(2):
        net(torch.arange(30.0).view(5, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not load:
        rank, world = dist.get_rank(), dist.get_world_size()
        state = {"model": net.state_dict(), "opt": optimizer.state_dict()}
        draft = write_part(state, root, 1, rank=rank, world_size=world)
        dist.barrier()
        if rank == 0:
            commit(draft, world_size=world)
    return _whole(net, optimizer)


def _whole(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    held = [*net.state_dict().values(), *(s[key] for s in optimizer.state.values() for key in sorted(s))]
    return [(value.full_tensor() if isinstance(value, DTensor) else value).tolist() for value in held]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"), [((False, 1), (True, 2)), ((True, 4), (True, 2)), ((True, 2), (False, 1))]
)
def test_fsdp_and_plain_training_go_on_from_each_others_checkpoints(tmp_path, saved, loaded):
    """The continued run ends where a plain one of twice the steps ends; sums of shards differ in their last bits."""
    on_ranks(_train, saved[1], saved[0], str(tmp_path), False)

    ended = on_ranks(_train, loaded[1], loaded[0], str(tmp_path), True)

    straight = _twice()
    for held in ended:
        assert len(held) == len(straight)
        for mine, other in zip(held, straight, strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(other), rtol=1e-4, atol=1e-6)


def _twice() -> list[object]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(4):
        net(torch.arange(30.0).view(5, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _whole(net, optimizer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand")
@pytest.mark.parametrize("verify", ["off", "read"])
def test_tensors_on_a_cuda_device_are_filled_through_pinned_memory(tmp_path, verify):
    state = {
        "w": torch.randn(3000, 1000), "t": torch.randn(40, 9).bfloat16(), "n": torch.tensor(7), "b": torch.ones(5) > 0,
    }  # fmt: skip
    folder = write(state, tmp_path)
    there = {name: torch.zeros_like(value, device="cuda") for name, value in state.items()}
    there["t"] = torch.zeros(9, 40, dtype=torch.bfloat16, device="cuda").t()

    restore_into(folder, there, verify=verify)

    assert all(torch.equal(there[name].cpu(), value) for name, value in state.items())
