"""Which checkpoint is restored, and from where its bytes come."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import headway
from headway.checkpoint.agent.link import ask
from headway.checkpoint.layout.fetch import Files, LocalFiles, RangeFetcher, fetch
from headway.checkpoint.layout.reads import Shard, plan_reads
from headway.checkpoint.restores.restore import CheckpointReading
from headway.checkpoint.restores.restoring import HeldFiles, step_order
from headway.core.errors import DamageError, HeadwayError, InputError
from headway.storage.boxes import Box
from headway.storage.commit import committed
from headway.storage.digests import digest_of
from headway.storage.manifest import MANIFEST, Piece, RankManifest, read_record
from tests.checkpoints import flip, unsynced
from tests.layouts_made import write
from tests.spawn import on_ranks


def damaged_file(root):
    flip(root / "step-2" / "rank-0" / "__0_0.distcp", 700)


def overwritten_memory(root):
    held, file = ask(str(root), 0, 2)
    os.pwrite(file, b"\xff" * held.num_bytes, 0)
    os.close(file)


@pytest.mark.parametrize(("damage", "source"), [(damaged_file, "memory"), (overwritten_memory, "local")])
def test_the_newest_image_comes_from_the_agents_memory_or_its_file_whichever_is_whole(tmp_path, damage, source):
    model = torch.nn.Linear(50, 50)
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        ckpt.save(1, block="durable")
        ckpt.save(2, block="durable")
        kept = model.weight.detach().clone()
        damage(tmp_path)
        model.weight.data.zero_()

        report = ckpt.restore()

        assert (report.step, report.source, torch.equal(model.weight, kept)) == (2, source, True)


def test_a_state_that_does_not_fit_is_the_callers_mistake_and_no_older_step_is_tried(tmp_path):
    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(3, 3)) as ckpt:
        ckpt.save(1, block="durable")

    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(4, 3)) as ckpt, pytest.raises(InputError, match="weight"):
        ckpt.restore()


class Picky:
    """A counter that one rank may refuse to restore."""

    def __init__(self, epoch, *, refuses=False):
        self.epoch, self.refuses = epoch, refuses

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        if self.refuses and state["epoch"] > 1:
            raise RuntimeError("not that epoch")
        self.epoch = state["epoch"]


def net(value):
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, value)
    return model


@pytest.fixture
def two_steps(tmp_path):
    for step in (1, 2):
        with unsynced():
            write({"counter": {"epoch": step}, "model": net(step).state_dict()}, tmp_path, step)
    return str(tmp_path)


def _restored(root, step, refuses, fails_filling):
    """Restore where rank 1 may refuse, or fail to read step 2; what this rank was told, and what it holds after."""
    is_last = dist.get_rank() == 1
    counter, model = Picky(0, refuses=refuses and is_last), net(0)
    if fails_filling and is_last:
        read_shards = CheckpointReading.read

        def fails(reading, shards, num_threads):
            read_shards(reading, shards, num_threads)
            if shards and (reading.stored.step == 2 or fails_filling == "always"):
                raise DamageError("a disk broke. Run: headway ckpt repair")

        CheckpointReading.read = fails
    with headway.Checkpointer(root, counter=counter, model=model) as ckpt:
        try:
            report = ckpt.restore(step)
            told = "", report.step, len(report.skipped)
        except HeadwayError as error:
            told = str(error), type(error).__name__, 0
    return told, (counter.epoch, model.weight.mean().item())


def test_a_rank_that_refuses_keeps_all_ranks_as_they_were(two_steps):
    (told, held), (own, own_held) = on_ranks(_restored, 2, two_steps, "latest", True, "")

    assert (held, own_held) == ((0, 0.0), (0, 0.0))
    assert (told[1], own[1]) == ("HeadwayError", "InputError")
    assert "rank 1: InputError: 'counter' refuses what is stored of it (RuntimeError: not that epoch)" in told[0]
    assert "mixed" not in told[0] + own[0]


def test_a_rank_that_fails_while_its_tensors_are_filled_takes_all_to_the_step_before(two_steps):
    answers = on_ranks(_restored, 2, two_steps, "latest", False, "once")
    assert answers == [(("", 1, 1), (1, 1.0))] * 2

    for told, _ in on_ranks(_restored, 2, two_steps, 2, False, "once"):
        assert "a disk broke" in told[0]
        assert "The state is mixed now" in told[0]
    for told, _ in on_ranks(_restored, 2, two_steps, "latest", False, "always"):
        assert told[1] == "DamageError"
        assert "none of the 2 checkpoints" in told[0]
        assert told[0].count("The state is mixed now") == 1


def _together(root):
    counter, model = Picky(0), net(0)
    with headway.Checkpointer(root, counter=counter, model=model, replicated=dist.group.WORLD) as ckpt:
        report = ckpt.restore()
    return report.step, counter.epoch, model.weight.mean().item()


def test_damage_that_ranks_meet_while_they_read_together_takes_all_to_the_step_before(two_steps):
    image = Path(two_steps) / "step-2" / "rank-0" / "__0_0.distcp"
    piece = read_record(image.parent / MANIFEST, RankManifest).pieces[0]
    flip(image, piece.payload_offset)

    assert on_ranks(_together, 2, two_steps) == [(1, 1, 1.0)] * 2


def test_an_object_that_refuses_is_no_damage_and_no_older_step_is_tried(two_steps):
    counter, model, draws = Picky(0, refuses=True), net(0), torch.get_rng_state()

    ckpt = headway.Checkpointer(two_steps, counter=counter, model=model)
    with ckpt, pytest.raises(InputError, match=r"'counter' refuses what is stored of it"):
        ckpt.restore()

    assert (counter.epoch, model.weight.any().item()) == (0, False)
    assert torch.equal(torch.get_rng_state(), draws)


def test_files_that_are_held_are_read_from_memory_and_others_from_the_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"disk a")
    (tmp_path / "b").write_bytes(b"disk b")
    files = HeldFiles(LocalFiles(tmp_path), {"a": b"held a"})

    assert isinstance(files, Files)
    assert (bytes(files.read("a", 0, 4)), bytes(files.read("b", 0, 4))) == (b"held", b"disk")
    assert (bytes(files.span("a", 5, 6, None)), files.is_from_memory) == (b"a", True)
    with pytest.raises(DamageError, match=r"a in memory ends at byte 6"):
        files.span("a", 5, 9, None)


def test_a_file_that_memory_holds_wrongly_is_read_from_the_folder_by_all_threads(tmp_path):
    content = np.random.default_rng(0).bytes(5_000_000)
    (tmp_path / "a").write_bytes(content)
    wrong = bytearray(content)
    wrong[3_000_000] ^= 1
    files, written = HeldFiles(LocalFiles(tmp_path), {"a": wrong}), digest_of(content)
    piece = Piece("w", "uint8", (5000, 1000), (0, 0), (5000, 1000), "a", 0, 5_000_000, 0, 5_000_000, 0)
    plan = plan_reads([Shard("w", (5000, 1000), "uint8", Box((0, 10), (5000, 900)))], {"w": [piece]}, gap_bytes=0)
    found = np.zeros((5000, 900), np.uint8)

    def place(transfer, elements):
        found[transfer.box.offsets[0] : transfer.box.stops[0]] = elements

    fetcher = RangeFetcher(files, lambda _: written)
    fetch(plan.reads, fetcher, place, num_threads=4)

    assert (found == np.frombuffer(content, np.uint8).reshape(5000, 1000)[:, 10:910]).all()
    assert (files.is_from_memory, fetcher.total.mended) == (False, [])


def test_steps_are_tried_newest_first_or_the_one_that_was_asked_for_with_a_warning_of_newer_ones(tmp_path):
    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(3, 3)) as ckpt:
        for step in (3, 20):
            ckpt.save(step, block="durable")
        with pytest.warns(UserWarning, match=r"step 20 is newer and still there.*remove: step-20"):
            ckpt.restore(3)

    known = [entry.step for entry in committed(tmp_path)]
    assert (step_order(known, "latest"), step_order(known, 3)) == ([20, 3], [3])
    with pytest.raises(InputError, match=r"no checkpoint of step 4; there are: 20, 3. Name one"):
        step_order(known, 4)
