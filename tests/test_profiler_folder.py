"""A folder of profiler files is one trace of all ranks."""

import gzip

import pytest

from headway.core.errors import InputError
from headway.sim.observed import observe
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from tests.paths import shared
from tests.traces_made import profile, span


def window(start_us: int, *, rank: int | None = None, device: bool = False) -> bytes:
    """Return a file of one rank: a launch and its kernel, or two plain ops."""
    facts = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    launch = span("cudaLaunchKernel", start_us, 5, cat="cuda_runtime", correlation=17)
    kernel = span("gemm", start_us + 6, 5, lane=(0, 7), cat="kernel", correlation=17)
    return profile(
        [launch, kernel] if device else [span("aten::mm", start_us, 5), span("aten::add", start_us + 6, 2)], **facts
    )


def test_ranks_come_from_the_files_themselves_packed_or_not(tmp_path):
    (tmp_path / "hostb_12.1700000000000000001.pt.trace.json").write_bytes(window(10, rank=1))
    (tmp_path / "hosta_99.1700000000000000002.pt.trace.json.gz").write_bytes(gzip.compress(window(30, rank=0)))
    (tmp_path / "events.out.tfevents.1700000000.hosta").write_bytes(b"\x18\0\0\0not a trace")

    trace = Trace.open(tmp_path)

    assert trace.events["rank"].tolist() == [0, 0, 1, 1]
    assert trace.events["start_ns"].tolist() == [30_000, 36_000, 10_000, 16_000]
    assert sorted(trace.ranks) == [0, 1]


def test_ranks_come_from_the_names_where_the_files_are_silent(tmp_path):
    for rank in (3, 1):
        (tmp_path / f"rank{rank}.pt.trace.json").write_bytes(window(rank))

    assert sorted(Trace.open(tmp_path).ranks) == [1, 3]


def test_ranks_are_given_in_order_of_name_with_a_warning_where_nothing_tells(tmp_path, caplog):
    for name in ("host_31.1700000000000.pt.trace.json", "host_22.1700000000009.pt.trace.json"):
        (tmp_path / name).write_bytes(window(5))

    trace = Trace.open(tmp_path)

    assert sorted(trace.ranks) == [0, 1]
    assert "2 files, such as host_22" in caplog.text


def test_windows_of_one_rank_keep_their_launches_apart(tmp_path):
    for start_us in (100, 500):
        (tmp_path / f"host_1.17000000000{start_us}.pt.trace.json").write_bytes(window(start_us, rank=0, device=True))

    trace = Trace.open(tmp_path)

    assert trace.events["start_ns"].tolist() == [100_000, 106_000, 500_000, 506_000]
    first, kernel, second, other = trace.events["corr"].tolist()
    assert (first, second) == (kernel, other)
    assert first != second
    assert observe(trace).edges["launch"] == 2


def test_files_that_overlap_cannot_be_one_rank(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_bytes(window(100, rank=0))

    with pytest.raises(
        InputError, match=r"a.json and b.json both say they are rank 0, and overlap in time. Put the files"
    ):
        Trace.open(tmp_path)


def test_a_folder_of_real_profiles_is_what_its_files_are(tmp_path):
    names = [f"kineto/sampled_rank-{rank}.json.gz" for rank in (0, 1)]
    for name in names:
        (tmp_path / shared(name).name).symlink_to(shared(name))

    assert Trace.open(tmp_path) == Trace.open([shared(name) for name in names])


@pytest.mark.parametrize("facts", [{}, {"distributedInfo": {"rank": 0, "world_size": 1}}], ids=["silent", "alone"])
@pytest.mark.parametrize("given", ["a folder", "a list"])
def test_processes_that_do_not_know_their_rank_are_devices_of_their_own(tmp_path, given, facts):
    for number, host in enumerate(("left", "right")):
        busy = [span("gemm", 10 * k, 8, lane=(0, 7), cat="kernel", correlation=k) for k in range(10)]
        launches = [span("cudaLaunchKernel", 10 * k, 1, lane=(41, 41), cat="cuda_runtime") for k in range(10)]
        (tmp_path / f"{number}.json").write_bytes(profile([*launches, *busy], host_name=host, **facts))

    trace = Trace.open(tmp_path if given == "a folder" else sorted(tmp_path.iterdir()))

    assert sorted(trace.ranks) == [0, 1]
    for rank in (0, 1):
        rows = (trace.events["rank"] == rank) & (trace.events["kind"] == KIND["COMPUTE"])
        assert trace.events["duration_ns"][rows].sum() == 80_000


def test_files_of_one_process_number_that_overlap_are_refused(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_bytes(profile([span("aten::mm", 1, 5, lane=(41, 41), cat="cpu_op")]))

    with pytest.raises(InputError, match=r"overlap in time.*rank<n>.json so that they are told apart"):
        Trace.open(tmp_path)
