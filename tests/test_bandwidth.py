"""What a folder and memory can do for a save, and what a save would then cost."""

import pytest

from headway.checkpoint.costs import PIECE_BYTES, StorageRates, measure
from headway.core.errors import InputError

RATES = StorageRates(copy=8e9, checksum=16e9, write=5e8, read=2e9, sync_s=0.01)


def test_a_save_blocks_for_its_copy_and_is_durable_when_it_is_checked_and_written():
    assert RATES.blocked_s(8_000_000_000) == 1.0
    assert RATES.durable_s(8_000_000_000) == pytest.approx(1.0 + 0.5 + 16.0 + 10 * 0.01)
    assert RATES.restored_s(8_000_000_000) == pytest.approx(4.0 + 0.5 + 1.0)


def test_measuring_leaves_nothing_behind(tmp_path):
    rates = measure(tmp_path, PIECE_BYTES)

    assert list(tmp_path.iterdir()) == []
    assert min(rates.copy, rates.checksum, rates.write, rates.read, rates.sync_s) > 0
    assert rates.copy > rates.write  # a memory faster than storage that has to be durable


def test_a_folder_that_is_none_or_too_few_bytes_are_refused(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        measure(tmp_path / "missing")
    with pytest.raises(InputError, match="too few"):
        measure(tmp_path, 4096)
