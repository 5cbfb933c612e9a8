"""One pass over an image: checksums, digests, bytes."""

import io
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint.agent import saving as persisting
from headway.checkpoint.agent.saving import Payload, persist
from headway.core.errors import InputError
from headway.core.wire.pace import RateLimiter
from headway.storage.digests import digest_of


@st.composite
def images(draw):
    """An image of a few payloads, each followed by room for its CRC; windows are small in these tests."""
    payloads, at = [], 0
    for _ in range(draw(st.integers(0, 6))):
        start = at + draw(st.integers(0, 5000))
        stop = start + draw(st.integers(0, 9000))
        payloads.append(Payload(start, stop, (stop + draw(st.integers(0, 9)), stop + 20)))
        at = stop + 24
    length = at + draw(st.integers(0, 3000))
    rng = np.random.default_rng(length)
    return bytearray(rng.integers(0, 256, length, np.uint8).tobytes()), payloads


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(persisting, "WINDOW_BYTES", 4096)


@given(made=images())
def test_the_file_is_the_image_with_every_checksum_in_its_places(made):
    image, payloads = made
    expected = bytearray(image)
    for payload in payloads:
        crc = zlib.crc32(image[payload.start : payload.stop])
        for at in payload.crc_offsets:
            expected[at : at + 4] = crc.to_bytes(4, "little")
    file = io.BytesIO()

    written = persist(image, payloads, file, RateLimiter())

    assert file.getvalue() == expected == image
    assert list(written.crc32s) == [zlib.crc32(expected[p.start : p.stop]) for p in payloads]
    assert written.digested.root == digest_of(expected).root


@given(made=images())
def test_persisting_an_image_again_changes_nothing(made):
    image, payloads = made
    first, second = io.BytesIO(), io.BytesIO()

    written = persist(image, payloads, first, RateLimiter()), persist(image, payloads, second, RateLimiter())

    assert first.getvalue() == second.getvalue()
    assert written[0].digested.root == written[1].digested.root


def test_bytes_go_out_at_the_rate_that_was_asked_for():
    now, slept = [0.0], []
    pace = RateLimiter(8192.0, clock=lambda: now[0], sleep=slept.append)

    persist(bytearray(16384), [], io.BytesIO(), pace)

    assert slept == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    "payloads",
    [[Payload(5, 3, ())], [Payload(0, 10, ()), Payload(9, 12, ())], [Payload(0, 10, (8,))], [Payload(0, 10, (61,))]],
    ids=["backwards", "overlapping", "CRC inside", "CRC past the end"],
)
def test_payloads_that_cannot_be_are_refused(payloads):
    with pytest.raises(InputError, match=r"does not fit an image of 64 bytes.*Pass payloads in ascending order"):
        persist(bytearray(64), payloads, io.BytesIO(), RateLimiter())
