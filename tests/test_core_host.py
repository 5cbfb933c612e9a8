"""What a process may use of its host, and how it waits there."""

import os
import resource

import pytest

from headway.core.machine.host import host_cores, readable


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_cores_are_those_this_process_may_run_on():
    assert host_cores() == len(os.sched_getaffinity(0))


def test_a_descriptor_is_readable_when_something_is_in_it_and_at_its_end(pipe):
    reads, writes = pipe
    assert not readable(reads, 0.0)
    assert not readable(reads, -1.0)  # a deadline that is past is no wait for ever
    os.write(writes, b"x")
    assert readable(reads, 60.0)
    os.read(reads, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, writes)  # nobody writes any more
    assert readable(reads, 60.0)
    os.close(null)


def test_a_descriptor_beyond_the_range_of_select_is_waited_for(pipe):
    high = 1500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= high:
        pytest.skip(f"at most {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, high + 1), hard))
    try:
        os.dup2(pipe[0], high)
        os.write(pipe[1], b"x")
        assert readable(high, 60.0)
        os.close(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
