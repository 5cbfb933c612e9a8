"""Checkpoints with parity, and ways to damage them."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from headway.storage.commit import commit
from headway.storage.draft import open_draft
from headway.storage.redundancy.parity import encode_rank
from tests import checkpoints
from tests.checkpoints import rows_of, write_rank


@pytest.fixture(autouse=True, scope="module")
def no_fsync():
    """Do not wait for the disk: what is durable when is `test_durable`'s subject. A test file that names it has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def state_of(rows: int = 3000, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return some state; `rows` * 132 + ... bytes."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(rows, 33, generator=draw),
        "model.bias": torch.randn(rows, generator=draw).bfloat16(),
        "opt.step": torch.tensor(7.0),
    }


def protected(
    root: Path,
    redundancy: str = "+2",
    *,
    world_size: int = 6,
    rows: int = 3000,
    hosts: Sequence[str] = (),
    step: int = 1,
) -> Path:
    """Commit a checkpoint and let every rank make its parity; return its folder."""
    for rank, parts in enumerate(rows_of(state_of(rows, seed=step), world_size)):
        draft = open_draft(root, step, "a", rank=rank)
        write_rank(draft, rank, world_size, parts, {"loader": {"epoch": 3}}, host=hosts[rank] if hosts else "")
    commit(draft, world_size=world_size, deadline_s=5.0, redundancy=redundancy)
    for rank in range(world_size):
        encode_rank(draft.target, rank)
    return draft.target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of six ranks, of which any two may be lost; tests that damage it take `copy`."""
    return protected(tmp_path_factory.mktemp("root"))


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy of `checkpoint` that is the test's own."""
    return shutil.copytree(checkpoint, tmp_path / "step-1")


def content(path: Path) -> dict[str, bytes]:
    """Return name -> bytes of every file."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def put_back(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder hold exactly these files."""
    shutil.rmtree(path)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def lose(path: Path, *ranks: int) -> None:
    """Remove rank directories; with rank 0's, what its agent wrote beside them."""
    for rank in ranks:
        shutil.rmtree(path / f"rank-{rank}")
        for name in (".metadata", "commit.json", "commit.json.copy") if rank == 0 else ():
            (path / name).unlink()


def flip(path: Path, name: str, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    checkpoints.flip(path / name, offset, 1 << bit)
