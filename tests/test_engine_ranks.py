"""Checkpointer on several ranks: each writes its part, any number of ranks goes on, and disagreement is named."""

import shutil

import pytest
import torch
import torch.distributed as dist

import headway
from headway.core.errors import BackgroundError
from headway.storage import verify
from headway.verbs.stored.ckpt import diff
from headway.verbs.stored.ckpt_convert import reshard
from tests.spawn import on_ranks


def _network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.BatchNorm1d(100), torch.nn.Linear(100, 1))


def _bits(model, opt):
    state = opt.state_dict()["state"]
    held = [*model.state_dict().values(), *(state[key][name] for key in sorted(state) for name in sorted(state[key]))]
    return [value.tolist() for value in held]


def _train(root, steps, options):
    """Train data-parallel and save the last step; return this rank's state, as other ranks will find it."""
    model = _network()
    parallel = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    opt = torch.optim.Adam(parallel.parameters())
    with headway.Checkpointer(root, model=model, opt=opt, **options) as ckpt:
        report = ckpt.restore()
        before = _bits(model, opt)
        for step in range(report.step or 0, steps):
            opt.zero_grad()
            parallel(torch.randn(8, 300)).square().mean().backward()
            opt.step()
            ckpt.save(step + 1, block="durable")
    return report.step, before, _bits(model, opt)


@pytest.mark.slow
def test_what_two_ranks_saved_any_number_of_ranks_restores_alike(tmp_path):
    saved = on_ranks(_train, 2, str(tmp_path), 2, {})
    sizes = [(tmp_path / "step-2" / f"rank-{rank}" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]

    after = {world: on_ranks(_train, world, str(tmp_path), 2, {}) for world in (1, 2, 3)}

    assert max(sizes) < 1.3 * min(sizes)  # replicas are split
    for answers in after.values():
        assert all((step, bits) == (2, saved[0][2]) for step, bits, _ in answers)


def _draw(root, seeds):
    """Save with generators seeded by rank, or restore; return what this rank draws next."""
    import random

    import numpy as np

    with headway.Checkpointer(root, model=torch.nn.Linear(2, 2)) as ckpt:
        if seeds:
            seed = seeds[dist.get_rank() if dist.is_initialized() else 0]
            torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
            ckpt.save(1, block="durable")
        else:
            ckpt.restore()
        return torch.rand(1).item(), random.random(), np.random.rand()


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(1, 2), (3, 3)], ids=str)
def test_new_ranks_draw_numbers_of_their_own_unless_all_ranks_were_in_step(tmp_path, seeds):
    saved = on_ranks(_draw, len(seeds), str(tmp_path / "root"), seeds)
    grown = tmp_path / "again" / "step-1"
    grown.parent.mkdir()
    reshard(tmp_path / "root" / "step-1", world=4, out=grown)
    assert diff(tmp_path / "root" / "step-1", grown) == 0

    for root in ("root", "again"):
        restored = on_ranks(_draw, 4, str(tmp_path / root), ())

        assert restored[: len(seeds)] == saved
        for kind in zip(*restored, strict=True):  # torch's, Python's and numpy's generator
            assert len(set(kind)) == (1 if seeds == (3, 3) else 4)


@pytest.mark.slow
def test_the_loss_of_a_rank_directory_is_made_up_for_by_the_agents_parity(tmp_path):
    saved = on_ranks(_train, 3, str(tmp_path), 1, {"redundancy": "+1"})
    shutil.rmtree(tmp_path / "step-1" / "rank-1")

    damaged = verify(tmp_path / "step-1").status
    answers = on_ranks(_train, 2, str(tmp_path), 1, {})

    assert damaged == "repairable"
    assert all((step, bits) == (1, saved[0][2]) for step, bits, _ in answers)


class Own:
    """State that each rank has its own of."""

    def __init__(self):
        self.tensor = torch.full((3,), float(dist.get_rank()))

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def _save_own(root):
    ckpt = headway.Checkpointer(root, own=Own())
    try:
        ckpt.save(1, block="durable")
    except BackgroundError as error:
        return str(error)
    finally:
        ckpt.close()
    return ""


def test_tensors_that_are_taken_for_copies_and_differ_are_named_on_all_ranks(tmp_path):
    told = on_ranks(_save_own, 2, str(tmp_path))

    assert all("'own.tensor'" in text and "ranks 0 and 1 hold different values" in text for text in told)
    assert not (tmp_path / "step-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2])
def test_random_numbers_go_on_on_every_rank_by_itself(tmp_path, world):
    first, second = on_ranks(_draws, world, str(tmp_path)), on_ranks(_draws, world, str(tmp_path))

    assert [after for _, after in first] == [after for after, _ in second]
    assert first[0] != first[1]


def _draws(root):
    """Restore, draw, save, draw: what is drawn after a restore is what was drawn after the save."""
    with headway.Checkpointer(root, model=torch.nn.Linear(2, 2)) as ckpt:
        torch.manual_seed(dist.get_rank())
        ckpt.restore()
        before = torch.rand(2).tolist()
        ckpt.save(1, block="durable")
        return before, torch.rand(2).tolist()
