"""The remedy 'comm.compress' on jobs of many kinds: equal on all ranks, or refused and as plain."""

import pytest

from benchmarks.compress_jobs import DEFAULT, trial
from tests.spawn import POOL


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULT)
def test_a_compressed_job_is_equal_on_all_ranks_or_refused_and_as_plain(name):
    assert trial(POOL, name) == []
