"""Which checkpoint is restored, and from where its bytes come."""

from __future__ import annotations

import os

import pytest
import torch

import headway
from headway.checkpoint.fetch import Files, LocalFiles
from headway.checkpoint.link import ask
from headway.checkpoint.runtime.restoring import HeldFiles, step_order
from headway.core.errors import DamageError, InputError
from headway.storage.commit import committed


def rotted(path):
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)


def test_the_newest_image_comes_from_the_agents_memory_though_its_file_is_damaged(tmp_path):
    model = torch.nn.Linear(50, 50)
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        ckpt.save(1, block="durable")
        ckpt.save(2, block="durable")
        kept = model.weight.detach().clone()
        rotted(tmp_path / "step-2" / "rank-0" / "__0_0.distcp")
        model.weight.data.zero_()

        report = ckpt.restore()

        assert (report.step, report.source, torch.equal(model.weight, kept)) == (2, "memory", True)


def test_memory_that_is_not_what_was_saved_is_passed_over_for_the_file(tmp_path):
    model = torch.nn.Linear(50, 50)
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        ckpt.save(2, block="durable")
        kept = model.weight.detach().clone()
        held, file = ask(str(tmp_path), 0, 2)
        os.pwrite(file, b"\xff" * held.num_bytes, 0)
        os.close(file)
        model.weight.data.zero_()

        report = ckpt.restore()

        assert (report.step, report.source, torch.equal(model.weight, kept)) == (2, "local", True)


def test_when_no_checkpoint_is_whole_that_is_an_error_and_not_a_fresh_start(tmp_path):
    model = torch.nn.Linear(50, 50)
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        ckpt.save(1, block="durable")
        ckpt.save(2, block="durable")
    for step in (1, 2):
        rotted(tmp_path / f"step-{step}" / "rank-0" / "__0_0.distcp")

    with headway.Checkpointer(tmp_path, model=model) as ckpt, pytest.raises(DamageError, match=r"none of the 2"):
        ckpt.restore()


def test_a_state_that_does_not_fit_is_the_callers_mistake_and_no_older_step_is_tried(tmp_path):
    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(3, 3)) as ckpt:
        ckpt.save(1, block="durable")

    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(4, 3)) as ckpt, pytest.raises(InputError, match="weight"):
        ckpt.restore()


def test_files_that_are_held_are_read_from_memory_and_others_from_the_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"disk a")
    (tmp_path / "b").write_bytes(b"disk b")
    files = HeldFiles(LocalFiles(tmp_path), {"a": b"held a"})

    assert isinstance(files, Files)
    assert (bytes(files.read("a", 0, 4)), bytes(files.read("b", 0, 4))) == (b"held", b"disk")
    assert (bytes(files.span("a", 5, 6, None)), files.is_from_memory) == (b"a", True)
    with pytest.raises(DamageError, match=r"a in memory ends at byte 6"):
        files.span("a", 5, 9, None)


def test_steps_are_tried_newest_first_or_the_one_that_was_asked_for(tmp_path):
    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(3, 3)) as ckpt:
        for step in (3, 20):
            ckpt.save(step, block="durable")

    known = [entry.step for entry in committed(tmp_path)]
    assert (step_order(known, "latest"), step_order(known, 3)) == ([20, 3], [3])
    with pytest.raises(InputError, match=r"no checkpoint of step 4; there are: 20, 3. Name one"):
        step_order(known, 4)


def test_who_goes_back_to_an_older_step_is_told_that_a_newer_one_would_be_taken_again(tmp_path):
    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(3, 3)) as ckpt:
        for step in (3, 20):
            ckpt.save(step, block="durable")

        with pytest.warns(UserWarning, match=r"step 20 is newer and still there.*remove: step-20"):
            ckpt.restore(3)
