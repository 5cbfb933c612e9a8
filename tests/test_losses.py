"""Losses: what damage means row by row, against counting by hand and against what repair then gives back."""

import shutil

import numpy as np
import pytest

from headway.storage.checks.repair import repair
from headway.storage.checks.verification import verify
from headway.storage.manifest import Piece, read_record
from headway.storage.redundancy.parity import judge
from headway.storage.redundancy.parity_files import ParityFacts, rows_of
from tests import redundant
from tests.redundant import content, flip, protected

no_fsync = redundant.no_fsync


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Four ranks under 2+2."""
    return protected(tmp_path_factory.mktemp("root"), "2+2", world_size=4, rows=800)


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_lost_exactly_where_a_row_has_more_than_m_members_gone(checkpoint, tmp_path, seed):
    path = shutil.copytree(checkpoint, tmp_path / "step-1")
    good, rng = content(path), np.random.default_rng(seed)
    facts = read_record(path / "rank-0" / "parity.json", ParityFacts)
    stripes, size = facts.stripes, facts.segment_bytes
    gone: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for stripe in range(4):
        places = [(f"rank-{rank}/__{rank}_0.distcp", at * size) for rank, at in stripes.data(stripe)]
        places += [(f"rank-{rank}/parity.bin", at * size) for rank, at in stripes.parity(stripe)]
        for name, start in places:
            for row in np.flatnonzero(rng.random(size // 4096) < 0.06 * (seed + 1) / 2).tolist():
                if start + 4096 * row < len(good[name]):
                    flip(path, name, start + 4096 * row, seed % 8)
                    gone.setdefault((stripe, row), []).append((name, start + 4096 * row))
    want = {
        place
        for places in gone.values()
        if len(places) > 2
        for place in places
        if place[0].endswith(".distcp")
    }  # fmt: skip

    judgement = judge(path, verify(path).damaged)

    told = {
        (lost.file, at)
        for lost in judgement.missing
        for at in range(lost.offset_bytes, lost.offset_bytes + lost.num_bytes, 4096)
    }
    assert told == want
    assert judgement.status == ("lost" if want else "repairable")
    assert repair(path).status == ("lost" if want else "repaired")
    assert want or content(path) == good


@pytest.mark.parametrize(
    ("start", "stop", "rows"),
    [(0, 100, None), (100, 101, (7, 7)), (139, 141, (7, 8)), (0, 500, (7, 9)), (219, 500, (9, 9)), (220, 500, None)],
)
def test_bytes_are_named_by_their_rows_in_the_whole_tensor(start, stop, rows):
    """Three rows of ten float32, the eighth to tenth of a tensor, at byte 100 of the image."""
    piece = Piece("w", "float32", (20, 10), (7, 0), (3, 10), "f", 0, 300, 100, 120, 0)

    assert rows_of(piece, start, stop) == rows


def test_a_scalar_has_no_rows():
    assert rows_of(Piece("s", "float32", (), (), (), "f", 0, 300, 100, 4, 0), 0, 300) is None
