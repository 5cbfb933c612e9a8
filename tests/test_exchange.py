"""Ranks that hold equal copies read each byte once between them; who cannot read tells all."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import headway.checkpoint.restores.exchange as exchange_module
from headway.checkpoint import restore_into
from headway.checkpoint.restores.exchange import agreed
from headway.core.errors import FormatError, HeadwayError
from headway.core.units import KIB
from headway.storage.manifest import MANIFEST, RankManifest, read_record
from tests.checkpoints import flip
from tests.layouts_made import write
from tests.spawn import on_ranks


def state(seed):
    """Tensors of odd sizes and types, several buckets long when a bucket is small."""
    rng = torch.Generator().manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    return {
        "model": {
            f"w{n}": torch.randint(0, 200, (3 + 29 * n, 71), generator=rng).to(kinds[n % 4]).t() for n in range(12)
        },
        "step": seed,
    }


def _load_together(folder: str, bucket_bytes: int) -> tuple[int, int]:
    """Restore through the group; return what this rank read, and the bytes of the tensors."""
    exchange_module.BUCKET_BYTES = bucket_bytes
    mine, want = state(0), state(1)
    report = restore_into(folder, mine, group=dist.group.WORLD)
    assert all(torch.equal(mine["model"][name], want["model"][name]) for name in want["model"])
    assert mine["step"] == 1
    return report.read_bytes, sum(tensor.nbytes for tensor in want["model"].values())


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [10 * KIB, 16 * 1024 * KIB])
def test_each_of_four_ranks_reads_a_quarter_and_holds_all(tmp_path, bucket_bytes):
    folder = write({**state(1), "model": {n: t.contiguous() for n, t in state(1)["model"].items()}}, tmp_path)

    answers = on_ranks(_load_together, 4, str(folder), bucket_bytes)

    read, unique = [read for read, _ in answers], answers[0][1]
    assert max(read) < 0.25 * unique + 16 * 4096
    assert sum(read) < 1.05 * unique + 4 * 16 * 4096


def told(act: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the text of what `act` raises."""
    try:
        act()
    except HeadwayError as error:
        return type(error).__name__, str(error)
    return "", ""


def _fails(folder: str, wants: list[str]) -> tuple[str, str]:
    mine = {"model": {wants[dist.get_rank()]: state(0)["model"][wants[dist.get_rank()]]}}
    return told(lambda: restore_into(folder, mine, group=dist.group.WORLD))


def test_damage_that_one_reader_meets_is_raised_on_all(tmp_path):
    folder = write({"model": {"w11": state(1)["model"]["w11"].contiguous()}}, tmp_path)
    image = folder / "rank-0" / "__0_0.distcp"
    piece = read_record(folder / "rank-0" / MANIFEST, RankManifest).pieces[0]
    flip(image, piece.payload_offset + piece.payload_bytes - 1)

    answers = on_ranks(_fails, 2, str(folder), ["w11", "w11"])

    assert {kind for kind, _ in answers} == {"DamageError"}
    assert all("reader 1 of the group failed" in text and "in model.w11" in text for _, text in answers)


def _misnames(folder: str) -> tuple[str, str]:
    mine = {"model": {"w11" if dist.get_rank() else "nothing": state(0)["model"]["w11"]}}
    return told(lambda: restore_into(folder, mine, group=dist.group.WORLD))


def test_a_mistake_on_one_rank_is_raised_there_and_told_to_the_others(tmp_path):
    folder = write({"model": {"w11": state(1)["model"]["w11"].contiguous()}}, tmp_path)

    (own, text), (other, heard) = on_ranks(_misnames, 2, str(folder))

    assert (own, other) == ("InputError", "HeadwayError")
    assert "lacks 1 of the values" in text
    assert "another rank of the group could not go on" in heard
    assert text in heard


def _damaged_alone(folder: str) -> tuple[str, str]:
    def together() -> None:
        with agreed(dist.group.WORLD):
            if dist.get_rank():
                raise FormatError("no checkpoint at all. Name another.")

    return told(together)


def test_damage_on_one_rank_is_damage_on_all(tmp_path):
    (other, heard), (own, _) = on_ranks(_damaged_alone, 2, str(tmp_path))

    assert (own, other) == ("FormatError", "DamageError")
    assert "rank 1: no checkpoint at all" in heard


def test_ranks_that_want_different_tensors_are_told(tmp_path):
    folder = write({**state(1), "model": {n: t.contiguous() for n, t in state(1)["model"].items()}}, tmp_path)

    answers = on_ranks(_fails, 2, str(folder), ["w10", "w11"])

    assert {kind for kind, _ in answers} == {"InputError"}
    assert all("do not want the same tensors" in text for _, text in answers)
