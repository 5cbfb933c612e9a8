"""Flight Recorder dumps: identity exact, times honest, pickles harmless."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.trace.events.content import HASHED, group_id, parse_ranks
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KINDS
from headway.trace.readers import flight
from tests.paths import GOLDEN
from tests.refusals import refused

ENTRY = {
    "record_id": 5, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 6, "p2p_seq_id": 2,
    "op_id": 9, "profiling_name": "nccl:all_reduce", "time_created_ns": 1_700_000_000_000_000_001,
    "input_sizes": [[3, 4]], "input_dtypes": ["Float"], "output_sizes": [[3, 4]], "output_dtypes": ["Float"],
    "state": "completed", "time_discovered_started_ns": 1_700_000_000_000_000_101,
    "time_discovered_completed_ns": 1_700_000_000_000_000_601, "retired": True, "is_p2p": False,
}  # fmt: skip
"""An entry as version 2.x writes it for NCCL."""


def dump(*entries: dict[str, Any], **more: Any) -> bytes:
    """Return a pickle as torch writes it."""
    configured = {"0": {"name": "0", "desc": "default_pg", "ranks": "[4, 5, 6]"}}
    return pickle.dumps({"version": "2.4", "pg_config": configured, "entries": list(entries), **more}, protocol=2)


def first(*entries: dict[str, Any], name: str = "rank_4", **more: Any) -> dict[str, Any]:
    """Return the first row of a dump in words."""
    return flight.parse(dump(*entries, **more), name).head(1)[0]


@given(
    seqs=st.lists(st.integers(0, 2**62), min_size=1, max_size=6),
    shape=st.lists(st.integers(0, 50), max_size=3),
    created=st.integers(1, 2**62),
)
def test_pickle_and_json_say_the_same_and_identity_is_exact(seqs, shape, created):
    entries = [
        ENTRY | {"collective_seq_id": seq, "input_sizes": [shape], "time_created_ns": created + seq} for seq in seqs
    ]
    text = json.dumps({"version": "2.4", "pg_config": {}, "entries": entries}).encode()

    trace = flight.parse(text, "rank_4")

    other = flight.parse(pickle.dumps(json.loads(text), protocol=2), "rank_4")
    assert trace == other
    assert trace.events["seq"].tolist() == seqs
    size = 4
    for extent in shape:
        size *= extent
    assert trace.events["bytes"].tolist() == [max(size, 48)] * len(seqs)


@given(names=st.lists(st.text(max_size=8), unique=True, max_size=20))
def test_group_ids_are_stable_and_fit_the_column(names):
    ids = [group_id(name) for name in names]

    assert ids == [group_id(name) for name in names]
    assert all(-1 <= number < 2**31 for number in ids)
    assert all((number < 0) == (name == "") for name, number in zip(names, ids, strict=True))


def test_a_number_is_its_own_group_and_a_name_never_meets_one():
    assert [group_id("0"), group_id("17")] == [0, 17]
    assert group_id("mesh_tp") >= HASHED
    assert parse_ranks([3, 4]) == [3, 4]


def test_what_a_finished_nccl_entry_says():
    assert first(ENTRY) == {
        "rank": 4, "name": "nccl:all_reduce", "kind": "COLL", "lane": "default_pg completed, retired",
        "start_ns": 1_700_000_000_000_000_101, "duration_ns": 500, "group": 0, "seq": 6, "bytes": 48,
    }  # fmt: skip


def test_a_measured_duration_wins():
    assert first(ENTRY | {"duration_ms": 1.25})["duration_ns"] == 1_250_000


def test_an_entry_that_never_ended_lasts_nothing_and_keeps_its_state():
    hanging = ENTRY | {"state": "started", "time_discovered_completed_ns": None, "retired": False}
    waiting = hanging | {"state": "scheduled", "time_discovered_started_ns": None, "collective_seq_id": 7}

    trace = flight.parse(dump(hanging, waiting), "rank_4")

    assert flight.states(trace) == ["started", "scheduled"]
    assert flight.retired(trace).tolist() == [False, False]
    assert trace.events["duration_ns"].tolist() == [0, 0]
    assert trace.events["start_ns"].tolist() == [1_700_000_000_000_000_101, 1_700_000_000_000_000_001]


def test_point_to_point_has_its_own_number_and_a_global_peer():
    sent = first(ENTRY | {"profiling_name": "nccl:send 0->2", "is_p2p": True})
    received = first(ENTRY | {"profiling_name": "nccl:recv 0<-1", "is_p2p": True})

    assert (sent["kind"], sent["peer"], sent["seq"]) == ("SEND", 6, 2)
    assert (received["kind"], received["peer"], received["seq"]) == ("RECV", 5, 2)


def test_the_oldest_dumps_are_read():
    old = {"pg_id": 3, "seq_id": 11, "profiling_name": "nccl:broadcast", "time_created_ns": 5, "state": "completed"}

    row = first(old)

    assert (row["group"], row["seq"], row["start_ns"], row.get("bytes")) == (3, 11, 5, None)


def test_the_rank_comes_from_the_dump_or_the_name():
    assert first(ENTRY, rank=9)["rank"] == 9
    assert first(ENTRY, name="/tmp/nccl_trace_rank_12")["rank"] == 12
    assert "rank" not in first(ENTRY, name="dump")


def test_real_dumps_of_two_gloo_ranks_match_by_group_and_number():
    trace = Trace.open([GOLDEN / "flight_rank_0.json", GOLDEN / "flight_rank_1.json"])

    of_rank = [trace.select(ranks=[rank]).events for rank in (0, 1)]
    assert [events["group"].tolist() for events in of_rank] == [[0, 1, 0, 0, 0, 0]] * 2
    assert [events["seq"].tolist() for events in of_rank] == [[1, 1, 2, 3, 4, 5]] * 2
    assert trace.select(ranks=[0]).events["bytes"].tolist() == [4000, 8000, 40, 24, 40, 0]
    assert {entry["description"] for entry in trace.groups.values()} == {"default_pg", "tp"}
    assert {KINDS[kind] for kind in trace.events["kind"].tolist()} == {"COLL"}
    assert flight.retired(trace).all()
    assert trace.ranks[0]["group_status"]["1"]["last_completed_collective"] == "1"


class Evil:
    """A pickle of this one would run a command."""

    def __reduce__(self):
        return (print, ("run",))


def test_a_pickle_that_wants_to_run_something_is_refused(capsys, tmp_path):
    (tmp_path / "dump").write_bytes(dump(ENTRY, surprise=Evil()))

    with pytest.raises(FormatError, match=r"is refused: the pickle wants \w+\.print.*Do not open it"):
        Trace.open(tmp_path / "dump")
    assert capsys.readouterr().out == ""


def test_a_pickle_that_wants_all_memory_is_a_damaged_one():
    huge = b"\x80\x05\x8e" + (2**62).to_bytes(8, "little")  # bytes, 4 EiB of them

    with pytest.raises(FormatError, match=r"rank_4 is a damaged pickle of"):
        flight.parse(huge, "rank_4")


@given(cut=st.integers(2, len(dump(ENTRY)) - 1))
def test_a_pickle_cut_anywhere_is_a_clear_error(cut):
    with pytest.raises(FormatError, match=r"rank_4 (is a damaged pickle of \d+ bytes|holds no list)"):
        flight.parse(dump(ENTRY)[:cut], "rank_4")


test_damage_is_named = refused(
    (b'{"entries": [{"a": 1}', r"not JSON.*truncated \(byte 21\)"),
    (b'{"entries": 4}', "holds no list of entries"),
    (b'{"entries": [4]}', "holds no list of entries"),
    (b'{"entries": [{"collective_seq_id": "x"}]}', "entry 0 is not what torch writes.*Dump again"),
    (b'{"entries": [{"input_sizes": [["a"]], "input_dtypes": ["Float"]}]}', "entry 0 is not what torch writes"),
    by=lambda data: flight.parse(data, "dump"),
    error=FormatError,
)


@pytest.mark.slow
def test_a_dump_of_the_installed_torch_is_read(tmp_path):
    code = textwrap.dedent(
        """
        import sys, torch, torch.distributed as dist
        from torch._C import _distributed_c10d as c10d
        if not hasattr(c10d, "_dump_fr_trace"):
            sys.exit(77)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(100))
        dist.barrier()
        open(sys.argv[1], "wb").write(c10d._dump_fr_trace())
        dist.destroy_process_group()
        """
    )
    path = tmp_path / "dump_rank_0"

    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    ended = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=False)

    if ended.returncode == 77:
        pytest.skip("this torch has no Flight Recorder outside NCCL")
    trace = Trace.open(path)
    assert [trace.name_of(row) for row in range(2)] == ["gloo:all_reduce", "gloo:barrier"]
    assert trace.events["seq"].tolist() == [1, 2]
    assert trace.events["bytes"].tolist() == [400, 0]
