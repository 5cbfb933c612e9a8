"""A part of the matrix of saving and loading layouts; all of it: headway bench reshard_matrix --full."""

import zlib

import pytest

from tests.reshard_cases import LAYOUTS, run_matrix
from tests.spawn import on_ranks


@pytest.mark.slow
def test_what_any_layout_saves_any_layout_loads_bit_for_bit_with_stock_dcp_on_either_side(tmp_path):
    def keep(name: str) -> bool:
        return zlib.crc32(name.encode()) % 25 == 3

    count, wrong = run_matrix(on_ranks, str(tmp_path), (1, 2, 4), keep)

    assert wrong == []
    assert count > 100
    assert len(LAYOUTS) == 9
