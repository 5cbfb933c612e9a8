"""Names that share memory here: read once, and only where the checkpoint has the same elements under all of them."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import set_crc32_options

from headway.checkpoint import HeadwayReader, restore_into
from headway.core.errors import InputError
from headway.storage.commit import commit
from tests.checkpoints import unsynced
from tests.layouts_made import write, write_part
from tests.spawn import on_ranks

ROWS, WIDTH = 64, 16


def apart(second):
    """A state of two tensors of one shape, the second with an element of its own where it is `unlike`."""
    weight = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
    other = weight.clone()
    if second == "unlike":
        other[-1, -1] = -1
    return {"model": {"a": weight, "b": other}, "step": 3}


def stock(state, folder, *, summed=True):
    warnings.simplefilter("ignore")
    set_crc32_options(summed)
    try:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    finally:
        set_crc32_options(True)
    return folder


PLACES = {
    "ours": lambda state, folder: write(state, folder),
    "ours of three ranks": lambda state, folder: write_cut(state, folder),
    "stock": lambda state, folder: stock(state, folder / "s"),
    "stock without checksums": lambda state, folder: stock(state, folder / "s", summed=False),
}


def write_cut(state, folder):
    """Write the first tensor whole, and the second in rows of three ranks: pieces are not alike."""
    a, b = state["model"].values()
    for rank in range(3):
        mine = {"model": {"a": a, "b": b} if rank == 0 else {"b": b}, "step": 3}
        draft = write_part(mine, folder, 1, rank=rank, world_size=3, holders={"model.a": (0,)})
    commit(draft, world_size=3)
    return draft.target


def tied():
    weight = torch.zeros(ROWS, WIDTH)
    return {"model": {"a": weight, "b": weight}, "step": 0}


@pytest.fixture(autouse=True)
def quick():
    with unsynced():
        yield


@pytest.mark.parametrize("name", PLACES)
def test_equal_tensors_restore_into_one_that_is_tied(tmp_path, name):
    folder, mine = PLACES[name](apart("equal"), tmp_path), tied()

    report = restore_into(folder, mine, verify="off")

    assert torch.equal(mine["model"]["b"], apart("equal")["model"]["b"])
    assert report.overruled == ()
    bytes_once = ROWS * WIDTH * 4
    assert (report.read_bytes < 2 * bytes_once) == (name != "stock without checksums")  # checksums tell unread


@pytest.mark.parametrize("name", PLACES)
def test_unlike_tensors_are_refused_where_they_are_tied_and_nothing_is_changed(tmp_path, name):
    folder, mine = PLACES[name](apart("unlike"), tmp_path), tied()

    with pytest.raises(InputError, match=r"unlike values of what is tied here: 'model\.a' and 'model\.b'.*untied"):
        restore_into(folder, mine)

    assert (mine["step"], mine["model"]["a"].any().item()) == (0, False)


@pytest.mark.parametrize("name", PLACES)
def test_without_strict_the_first_is_taken_and_the_report_says_so(tmp_path, name):
    folder, mine = PLACES[name](apart("unlike"), tmp_path), tied()

    report = restore_into(folder, mine, strict=False)

    assert torch.equal(mine["model"]["b"], apart("unlike")["model"]["a"])
    assert report.overruled == ("model.b (has the values of model.a)",)


@pytest.mark.parametrize("name", PLACES)
def test_dcp_load_through_our_reader_refuses_the_same(tmp_path, name):
    warnings.simplefilter("ignore")
    for second in ("equal", "unlike"):
        folder, mine = PLACES[name](apart(second), tmp_path / second), tied()
        if second == "equal":
            dcp.load(mine, storage_reader=HeadwayReader(folder), no_dist=True)

            assert torch.equal(mine["model"]["b"], apart("equal")["model"]["b"])
        else:
            with pytest.raises(CheckpointException, match=r"'model\.a' and 'model\.b' are tied here") as caught:
                dcp.load(mine, storage_reader=HeadwayReader(folder), no_dist=True)

            assert "InputError" in str(caught.value)


def test_nan_is_equal_to_itself_and_zero_is_not_minus_zero(tmp_path):
    odd = torch.tensor([float("nan"), 0.0])
    for second, is_alike in ((odd.clone(), True), (torch.tensor([float("nan"), -0.0]), False)):
        folder = stock({"a": odd, "b": second}, tmp_path / str(is_alike), summed=False)
        one = torch.zeros(2)

        report = restore_into(folder, {"a": one, "b": one}, strict=False)

        assert (report.overruled == ()) == is_alike


def test_names_of_which_the_first_is_not_stored_are_read_once(tmp_path):
    state = apart("equal")["model"]
    folder = write({"model": {"b": state["a"], "c": state["b"]}}, tmp_path)
    one = torch.zeros(ROWS, WIDTH)

    report = restore_into(folder, {"model": {"a": one, "b": one, "c": one}}, strict=False, verify="off")

    assert torch.equal(one, state["a"])
    assert (report.missing, report.overruled) == (("model.a",), ())
    assert report.read_bytes < 2 * one.nbytes


class Shadow:
    """An object of its own that holds a tensor of the model, and looks at it when it is given its state."""

    def __init__(self, tensor):
        self.tensor, self.saw = tensor, None

    def state_dict(self):
        return {"w": self.tensor}

    def load_state_dict(self, state):
        self.saw = state["w"].clone()


def test_an_object_that_is_asked_first_sees_the_elements_of_what_it_shares_with_a_module(tmp_path):
    module = torch.nn.Linear(3, 3, bias=False)
    folder = write({"net": {"weight": torch.ones(3, 3)}, "shadow": {"w": torch.ones(3, 3)}}, tmp_path)
    shadow = Shadow(module.weight)

    restore_into(folder, {"net": module, "shadow": shadow})

    assert torch.equal(shadow.saw, torch.ones(3, 3))
    assert torch.equal(module.weight, torch.ones(3, 3))


def _load_tied(folder):
    mine = tied()
    try:
        restore_into(folder, mine, group=dist.group.WORLD)
    except InputError as error:
        return str(error), mine["model"]["a"].any().item()
    return "", mine["model"]["a"].any().item()


def test_ranks_that_read_together_all_refuse(tmp_path):
    folder = PLACES["ours"](apart("unlike"), tmp_path)

    for told, is_changed in on_ranks(_load_tied, 2, str(folder)):
        assert "'model.a' and 'model.b'" in told
        assert not is_changed
