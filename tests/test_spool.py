"""Spools: what was sealed comes back, what is no recording is left out."""

import numpy as np

from headway.runtime.run_folder.finalise import finalise
from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.records import RECORD_DTYPE, pack, recorded, unpack


def test_a_sealed_piece_is_what_was_packed_and_much_smaller():
    rng = np.random.default_rng(0)
    records = np.zeros(10_000, RECORD_DTYPE)
    records["number"] = np.arange(1, 10_001)
    records["start_ns"] = np.cumsum(rng.integers(1, 100_000, 10_000)) + 10**15
    records["duration_ns"] = rng.integers(1, 50_000, 10_000)
    records["code"] = rng.choice([span.code for span in SPANS.values()], 10_000)
    packed = pack(records)

    assert (unpack(packed) == records).all()
    assert len(packed) < records.nbytes / 6


def test_a_ring_without_a_header_is_left_out(tmp_path):
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "a0-r0-p1.ring").write_bytes(b"")

    assert recorded(tmp_path / "rings" / "a0-r0-p1") is None
    assert finalise(tmp_path) == []
