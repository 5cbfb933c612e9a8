"""Where things lie in a protected region's files: headers come back, sections stay apart, bad sizes are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.storage.regions.layout import ALIGN_BYTES, Geometry, SidecarHeader, read_header
from tests.refusals import refused

PAGE = 4096
geometries = st.builds(
    lambda pages, per_page, stripe, parity: Geometry(pages * per_page * PAGE, per_page * PAGE, stripe, parity),
    st.integers(1, 10**7), st.integers(1, 16), st.integers(1, 32), st.integers(1, 8),
)  # fmt: skip


@given(
    geometries, st.booleans(), st.integers(0, 2**60), st.integers(0, 2**60), st.sampled_from([1, 2, 4, 8]), st.data()
)
def test_a_header_is_read_as_it_was_written(tmp_path_factory, geometry, is_open, epoch, number, w, data):
    size = geometry.stripe * geometry.parity
    header = SidecarHeader(geometry, is_open, epoch, number, w, data.draw(st.binary(min_size=size, max_size=size)))
    path = tmp_path_factory.mktemp("header") / "x.guard"
    path.write_bytes(header.packed().ljust(ALIGN_BYTES, b"\0") * 2)

    assert read_header(path) == header


@given(geometries)
def test_sections_are_aligned_large_enough_and_apart(geometry):
    shadow, table, parity, end = geometry.places()

    assert shadow == 2 * ALIGN_BYTES
    assert all(place % ALIGN_BYTES == 0 for place in (shadow, table, parity, end))
    assert 8 * (table - shadow) >= geometry.num_pages
    assert parity - table >= 8 * geometry.num_stripes * (geometry.stripe + geometry.parity + 1)
    assert end - parity == geometry.num_stripes * geometry.parity * geometry.page
    assert (geometry.num_stripes - 1) * geometry.stripe < geometry.num_pages <= geometry.num_stripes * geometry.stripe


@given(st.binary(max_size=200))
def test_no_other_bytes_are_taken_for_a_header(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("header") / "x.guard"
    path.write_bytes(b"headway.region/1" + data)

    with pytest.raises(FormatError, match=r"no sidecar.*Remove it"):
        read_header(path)


test_sizes_that_cannot_work_are_refused = refused(
    ((PAGE + 1, PAGE, 4, 1), "not whole pages"), ((0, PAGE, 4, 1), "not whole pages"),
    ((PAGE, 1000, 4, 1), "page is 1000"), ((PAGE, 0, 4, 1), "page is 0"), ((PAGE, PAGE, 0, 1), "stripe is 0"),
    ((PAGE, PAGE, 4, 0), "parity 0"), ((PAGE, PAGE, 100, 100), "10000; the header has room"),
    by=lambda sizes: Geometry(*sizes),
)  # fmt: skip
