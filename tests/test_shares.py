"""A host's share: what is kept, refused and counted, over forks and pickles."""

import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.partitioned.peers import AWAY, BACK, COUNTS, THERE, CacheShare
from tests.spawn import run_threads


@given(
    puts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=30),
    own=st.sets(st.integers(0, 5)),
    capacity=st.integers(1, 60),
)
def test_a_share_keeps_what_fits_refuses_the_rest_for_good_and_settles_once_each_own_item_came(puts, own, capacity):
    share = CacheShare(6, capacity, own=sorted(own), num_hosts=1)
    expected, used = {}, 0
    for item, size in puts:
        if item not in expected:
            expected[item] = bytes([item]) * size if used + size <= capacity else None
            used += size if expected[item] is not None else 0

        assert share.keep(item, bytes([item]) * size) == (expected[item] is not None)
    found = {item: view for item in range(6) if (view := share.get(item)) is not None}

    assert {item: bytes(view) for item, view in found.items()} == {k: v for k, v in expected.items() if v is not None}
    assert {item for item in range(6) if share.refused(item)} == {k for k, v in expected.items() if v is None}
    assert share.settled == (own <= set(expected))


def test_forked_children_and_their_threads_count_without_losing_one():
    share = CacheShare(8, 1000, own=[], num_hosts=1)

    def count():
        for _ in range(300):
            share.count(storage_reads=1, storage_bytes=7)

    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            run_threads(count, [()] * 2)
            os._exit(0)
        children.append(pid)
    count()

    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert share.counts() == {**dict.fromkeys(COUNTS, 0), "storage_reads": 2100, "storage_bytes": 14_700}


def test_another_process_gets_the_same_memory_by_pickle(tmp_path):
    share = CacheShare(4, 100, own=[1], num_hosts=2)
    share.keep(0, b"here")
    (tmp_path / "share").write_bytes(pickle.dumps(share))
    code = """
import pickle, sys
share = pickle.load(open(sys.argv[1], "rb"))
assert bytes(share.get(0)) == b"here" and not share.settled
share.keep(1, b"there")
share.count(local_hits=3)
share.set_standing(1, 1)
share.raise_level(3, 1)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "share")], check=True, timeout=60)

    assert bytes(share.get(1)) == b"there"
    assert share.settled
    assert share.counts()["local_hits"] == 3
    assert share.away(1)
    assert share.level(3) == 1


def test_memory_of_a_process_that_is_gone_is_one_clear_error():
    code = (
        "import pickle, sys; from headway.data.partitioned.peers import CacheShare; "
        "sys.stdout.buffer.write(pickle.dumps(CacheShare(2, 10, own=[], num_hosts=1)))"
    )
    gone = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout

    with pytest.raises(InputError, match=r"is gone.*Keep the process that made it running"):
        pickle.loads(gone)


def test_levels_rise_one_by_one_and_standings_say_what_was_before():
    share = CacheShare(2, 10, own=[], num_hosts=3)
    share.raise_level(0, 2)

    assert share.level(0) == 0  # what the first host has room for is not known yet
    share.raise_level(0, 1)
    share.raise_level(0, 2)
    share.raise_level(0, 1)
    assert (share.level(0), share.level(1)) == (2, 0)
    assert [share.set_standing(2, standing) for standing in (AWAY, AWAY, BACK, THERE)] == [THERE, AWAY, AWAY, BACK]


@pytest.mark.parametrize(("items", "capacity"), [(0, 10), (3, 0)])
def test_a_share_that_holds_nothing_is_refused(items, capacity):
    with pytest.raises(InputError, match="Give at least 1 of each"):
        CacheShare(items, capacity, own=[], num_hosts=1)
