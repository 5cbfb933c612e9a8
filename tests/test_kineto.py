"""Profiler traces: exact times, every column, any age, any layout of the text."""

import gzip
import json
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.trace.events.intervals import Nesting, union_ns
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, KINDS
from headway.trace.profiler import json_events, kineto
from headway.trace.profiler.json_pieces import to_ns
from headway.trace.profiler.kineto_names import FORWARD, OP, dtype_bytes
from tests.paths import shared
from tests.refusals import refused
from tests.traces_made import profile, span

FILES = (
    "cpu_only", "cuda_event_sync", "nccl_data", "ns_resolution", "rocm_mi250", "sampled_rank-0", "sampled_rank-1",
    "trace_diff_control",
)  # fmt: skip
"""The public profiler traces beside the checkout."""


def rows(trace: Trace) -> list[dict[str, Any]]:
    """Return the events in the order of the file, in words."""
    return [trace._row(row) for row in range(len(trace))]


def of(*events: dict[str, Any], **facts: Any) -> Trace:
    """Return the trace of a profile that holds `events`."""
    return kineto.parse([profile(list(events), **facts)], "a.json")


# Laws.

decimals = st.decimals(min_value=-(10**15), max_value=10**15, allow_nan=False, allow_infinity=False)


@pytest.mark.slow
@given(values=st.lists(decimals, min_size=1, max_size=20))
def test_times_are_the_nearest_nanosecond_of_their_decimal_text(values):
    found = to_ns([str(value).encode() for value in values]).tolist()

    assert all(abs(Fraction(value) * 1000 - ns) <= Fraction(1, 2) for value, ns in zip(values, found, strict=True))


@given(whole=st.integers(0, 9 * 10**15 - 1), thousandths=st.integers(0, 999), digits=st.integers(0, 3))
def test_three_decimals_are_exact_at_any_size(whole, thousandths, digits):
    text = f"{whole}.{thousandths:03d}"[: len(str(whole)) + 1 + digits].rstrip(".")

    assert to_ns([text.encode()]).tolist() == [int(Decimal(text) * 1000)]


intervals = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 15), st.integers(0, 8)), max_size=12
)  # lane, start, duration


@given(events=intervals)
def test_depth_and_leaves_are_those_of_the_obvious_count(events):
    lane, start, duration = (np.array([event[i] for event in events], dtype=np.int64) for i in range(3))
    nest = Nesting.of(lane, start, duration)

    order = sorted(range(len(events)), key=lambda i: (start[i], -duration[i], i))
    for at, i in enumerate(order):
        before = [j for j in order[:at] if lane[j] == lane[i]]
        assert nest.depth[i] == sum(start[j] + duration[j] > start[i] for j in before)
        after = [j for j in order[at + 1 :] if lane[j] == lane[i]]
        assert nest.leaf[i] == (not any(start[j] < start[i] + duration[i] for j in after))


@given(events=intervals)
def test_the_union_counts_each_nanosecond_once(events):
    covered = {t for _, start, duration in events for t in range(start, start + duration)}

    start, duration = (np.array([event[i] for event in events], dtype=np.int64) for i in (1, 2))
    assert union_ns(start, duration) == len(covered)


tricky = st.sampled_from(['}, {"ph": "X"', '"traceEvents": [', "a\\b", "},\n{", "é", "[", 'end"}]}', "aten::mm"])
made_events = st.lists(
    st.builds(
        span, name=tricky | st.text(max_size=5), start_us=st.integers(0, 99), duration_us=st.integers(0, 9),
        lane=st.tuples(st.integers(1, 2), st.integers(1, 2)),
        cat=st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "user_annotation", "strange"]),
        correlation=st.integers(0, 3), nested=st.just([{"ph": "X", "name": 1}, {"ph": 2}]),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@given(events=made_events, size=st.integers(1, 60), indent=st.sampled_from([None, 0, 2]), array=st.booleans())
def test_the_text_may_come_in_pieces_of_any_size(events, size, indent, array):
    whole = json.dumps(events if array else {"a": [{"id": 1}, {"id": 2}], "traceEvents": events}, indent=indent)
    text = whole.encode()
    pieces = [text[i : i + size] for i in range(0, len(text), size)]

    in_pieces = kineto.parse(pieces, "a.json")

    assert in_pieces == kineto.parse([text], "a.json")
    assert [row.get("name", "") for row in rows(in_pieces)] == [event["name"] for event in events]


def test_a_large_file_is_read_in_batches_whatever_key_an_event_starts_with(monkeypatch):
    events = [{"cname": "good", "ph": "X", "name": f"op {i}", "ts": i, "dur": 1} for i in range(300)]
    text = json.dumps({"traceEvents": events, "otherData": {}}).encode()
    sizes: list[int] = []
    add = json_events._Collector.add
    monkeypatch.setattr(
        json_events._Collector, "add", lambda self, batch: (sizes.append(len(batch)), add(self, batch))[1]
    )

    trace = kineto.parse([text[i : i + 1000] for i in range(0, len(text), 1000)], "a.json")

    assert trace.events["start_ns"].tolist() == [1000 * i for i in range(300)]
    assert max(sizes) < 50


@given(events=made_events, seed=st.integers(0, 99))
def test_the_order_of_the_events_does_not_matter(events, seed):
    events = [event | {"ts": index * 10} for index, event in enumerate(events)]
    shuffled = random.Random(seed).sample(events, len(events))

    found = of(*shuffled)

    def key(row: dict[str, Any]) -> tuple:
        return (row["start_ns"], *(str(row.get(column)) for column in ("name", "kind", "depth", "corr", "step")))

    assert sorted(map(key, rows(found))) == sorted(map(key, rows(of(*events))))


# Oracle: an independent parse.


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_public_file_opens_with_every_span_and_exact_times(name):
    path = shared(f"kineto/{name}.json.gz")
    document = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    spans = [event for event in document["traceEvents"] if event["ph"] in ("X", "i")]
    base_ns = document.get("baseTimeNanoseconds", 0)

    trace = Trace.open(path)

    assert len(trace) == len(spans)
    assert trace.events["start_ns"].tolist() == [int(Decimal(event["ts"]) * 1000) + base_ns for event in spans]
    assert trace.events["duration_ns"].tolist() == [int(Decimal(event.get("dur", 0)) * 1000) for event in spans]
    assert [trace.name_of(row) for row in range(len(trace))] == [event["name"] for event in spans]
    assert set(trace.events["rank"].tolist()) == {(document.get("distributedInfo") or {}).get("rank", 0)}
    coverage = trace.meta["coverage"]
    assert (coverage["mapped"], coverage["dropped"]) == (1.0, 0)
    assert all(0 <= share <= 1 for share in coverage["by_device"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_kernels_and_copies_of_every_public_file_find_their_launch(name):
    path = shared(f"kineto/{name}.json.gz")
    document = json.loads(gzip.decompress(path.read_bytes()))
    launching = {
        event["args"]["correlation"] for event in document["traceEvents"] if event.get("cat") == "cuda_runtime"
    }
    device = [e for e in document["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]

    trace = Trace.open(path)

    on_stream = np.isin(trace.events["lane"], [i for i, lane in enumerate(trace.lanes) if lane.startswith("stream ")])
    corr = trace.events["corr"]
    matched = np.isin(corr[on_stream], corr[~on_stream])
    assert int(on_stream.sum()) == len(device)
    assert int(matched.sum()) == sum(event["args"]["correlation"] in launching for event in device)


# Published numbers: what the files are known to hold.


def test_collectives_of_a_kernel_trace_carry_group_and_bytes():
    trace = Trace.open(shared("kineto/nccl_data.json.gz"))

    collectives = trace.where(trace.events["kind"] == KIND["COLL"])

    assert len(collectives) == 21
    assert set(collectives.events["group"].tolist()) == {0}
    assert trace.groups[0]["ranks"] == [0, 1]
    assert sorted(set(collectives.events["bytes"].tolist())) == [
        424, 212480, 8196000, 9724160, 26255360, 26550272, 31502336,
    ]  # fmt: skip
    assert np.bincount(collectives.events["step"]).tolist() == [0, 0, 0, 0, 7, 7, 7]


def test_collectives_of_an_old_trace_are_known_by_their_kernels():
    trace = Trace.open(shared("kineto/trace_diff_control.json.gz"))

    collectives = trace.where(trace.events["kind"] == KIND["COLL"])

    assert len(collectives) == 60
    assert {trace.lanes[code] for code in collectives.events["lane"]} == {"stream 21"}
    assert np.bincount(collectives.events["step"] - 1009).tolist() == [10] * 6
    assert trace.meta["world_size"] == 8
    assert set(trace.events["rank"].tolist()) == {3}
    assert trace.ranks[3]["device"] == "NVIDIA A100-PG509-200"


def test_forward_and_backward_ops_are_linked_by_the_arrows_of_the_file():
    path = shared("kineto/nccl_data.json.gz")
    document = json.loads(gzip.decompress(path.read_bytes()))
    arrows = {event["id"] for event in document["traceEvents"] if event.get("cat") == "fwdbwd"}

    trace = Trace.open(path)

    linked = trace.events["corr"][trace.events["corr"] >= FORWARD]
    assert len(linked) == 2 * len(arrows)
    assert set((linked - FORWARD).tolist()) == arrows


def test_gloo_annotations_are_the_collectives_of_a_cpu_trace():
    trace = Trace.open(shared("kineto/cpu_only.json.gz"))

    collectives = trace.where(trace.events["kind"] == KIND["COLL"])

    assert {trace.lanes[code] for code in collectives.events["lane"]} == {"thread 3553", "thread 3554"}
    assert int(collectives.events["bytes"][0]) == 321271 * 4
    assert trace.meta["device_type"] == "cpu"


def test_a_rocm_copy_takes_its_size_from_its_launch():
    trace = Trace.open(shared("kineto/rocm_mi250.json.gz"))

    copies = [row for row in rows(trace) if row["name"] == "Memcpy HtoD (Host -> Device)"]

    assert copies[0]["bytes"] == 2560
    assert {row["lane"] for row in copies} == {"stream 0"}


def test_awaited_event_records_are_kept():
    trace = Trace.open(shared("kineto/cuda_event_sync.json.gz"))

    waits = [row for row in rows(trace) if row["name"] == "Event Sync"]

    assert [(row["seq"], row["peer"], row["kind"]) for row in waits] == [(1533, 7, "SYNC")] * 2


# Columns, one by one.


def test_kinds_follow_category_and_name():
    trace = of(
        span("aten::mm", 0, 9),
        span("cudaLaunchKernel", 1, 1, cat="cuda_runtime"),
        span("cudaDeviceSynchronize", 3, 1, cat="cuda_runtime"),
        span("void gemm<float>(int)", 5, 1, cat="kernel", lane=(0, 7)),
        span("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 6, 1, cat="kernel", lane=(0, 7)),
        span("Memcpy HtoD (Pinned -> Device)", 7, 1, cat="gpu_memcpy", lane=(0, 7)),
        span("Memcpy DtoD (Device -> Device)", 8, 1, cat="gpu_memcpy", lane=(0, 7)),
        span("Optimizer.step#SGD.step", 9, 1, cat="user_annotation"),
        span("enumerate(DataLoader)#_Single.__next__", 10, 1, cat="user_annotation"),
        span("my region", 11, 1, cat="user_annotation"),
        span("who knows", 12, 1, cat="strange"),
    )

    assert [KINDS[kind] for kind in trace.events["kind"]] == [
        "HOST", "HOST", "SYNC", "COMPUTE", "COLL", "DATA", "COMPUTE", "OPTIM", "DATA", "MARK", "MARK",
    ]  # fmt: skip
    assert trace.meta["coverage"]["mapped"] == 10 / 11


def test_without_a_device_the_host_ops_are_the_computing():
    assert [row["kind"] for row in rows(of(span("aten::mm", 0, 1), span("c10d::allreduce_", 1, 1)))] == [
        "COMPUTE",
        "HOST",
    ]


def test_lanes_are_streams_threads_and_the_main_thread():
    trace = of(
        span("a", 0, 1, lane=(5, 9)),
        span("a", 0, 1, lane=(5, 5)),
        span("k", 0, 1, cat="kernel", lane=(0, 7)),
        span("s", 0, 1, cat="cuda_sync", lane=(0, 7)),
        span("g", 0, 1, cat="gpu_user_annotation", lane=(0, 7)),
    )

    assert [row["lane"] for row in rows(trace)] == ["thread 9", "main", "stream 7", "sync 7", "annotation 7"]


def test_several_devices_are_told_apart():
    trace = of(*(span("k", 0, 1, cat="kernel", lane=(device, 7)) for device in (0, 1)))

    assert [row["lane"] for row in rows(trace)] == ["device 0 stream 7", "device 1 stream 7"]
    assert set(trace.meta["coverage"]["by_device"]) == {"host", "device 0", "device 1"}


def test_a_device_row_belongs_to_the_step_of_its_launch():
    trace = of(
        span("ProfilerStep#4", 0, 10, cat="user_annotation"),
        span("ProfilerStep#5", 10, 10, cat="user_annotation"),
        span("cudaLaunchKernel", 8, 1, cat="cuda_runtime", correlation=3),
        span("late kernel", 12, 1, cat="kernel", lane=(0, 7), correlation=3),
        span("aten::mm", 25, 1),
    )

    assert trace.events["step"].tolist() == [4, 5, 4, 4, -1]


def test_corr_links_launches_ops_and_arrows_without_mixing_them():
    forward, backward = span("mm", 0, 1, **{"External id": 3}), span("MmBackward", 5, 1, lane=(1, 2))
    arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": 3}
    trace = of(
        forward, backward, span("cudaLaunchKernel", 0, 1, cat="cuda_runtime", correlation=3),
        span("add", 2, 1, **{"external id": 3}), arrow | {"ph": "s", "pid": 1, "tid": 1, "ts": 0},
        arrow | {"ph": "f", "pid": 1, "tid": 2, "ts": 5, "bp": "e"},
    )  # fmt: skip

    assert trace.events["corr"].tolist() == [FORWARD + 3, FORWARD + 3, 3, -1]
    assert of(span("a", 0, 1, **{"external id": 8})).events["corr"].tolist() == [OP + 8]


def test_arrows_stand_in_for_missing_correlation_ids():
    trace = of(
        span("cudaLaunchKernel", 4, 1, cat="cuda_runtime"),
        span("k", 9, 1, cat="kernel", lane=(0, 7)),
        {"ph": "s", "cat": "ac2g", "id": 12, "pid": 1, "tid": 1, "ts": 4, "name": "ac2g"},
        {"ph": "f", "cat": "ac2g", "id": 12, "pid": 0, "tid": 7, "ts": 9, "name": "ac2g", "bp": "e"},
    )

    assert trace.events["corr"].tolist() == [12, 12]


COLLECTIVE = {
    "Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 100, "Out msg nelems": 800,
    "Process Group Name": "3", "Process Group Description": "tp", "Process Group Ranks": "[8, 9, 10, ...]",
    "Global rank start": 8, "Global rank stride": 1, "Group size": 8, "Seq": 41,
}  # fmt: skip
"""What record_param_comms says; long rank lists are cut by torch."""


def test_a_kernel_without_arguments_takes_those_of_the_op_that_launched_it():
    trace = of(
        span("record_param_comms", 0, 10, **COLLECTIVE),
        span("cudaLaunchKernel", 3, 1, cat="cuda_runtime", correlation=5),
        span("ncclKernel_AllReduce", 20, 5, cat="kernel", lane=(0, 20), correlation=5),
        span("cudaLaunchKernel", 30, 1, cat="cuda_runtime", correlation=6),
        span("ncclKernel_AllReduce", 40, 5, cat="kernel", lane=(0, 20), correlation=6),
    )

    table = [[trace.events[column][row].item() for column in ("group", "seq", "bytes")] for row in (0, 2, 4)]
    assert table == [[3, 41, 1600], [3, 41, 1600], [-1, -1, 0]]
    assert trace.groups[3] == {"name": "3", "description": "tp", "ranks": list(range(8, 16))}
    assert KINDS[trace.events["kind"][0]] == "HOST"


def test_a_batch_of_messages_is_one_kernel_whose_entry_lists_them():
    send = {**COLLECTIVE, "Collective name": "send", "Dst Rank": 9}
    trace = of(
        span("record_param_comms", 0, 2, **send),
        span("record_param_comms", 3, 2, **{**COLLECTIVE, "Collective name": "recv", "Src Rank": 10}),
        span("cudaLaunchKernelExC", 6, 1, cat="cuda_runtime", correlation=5),
        span("record_param_comms", 10, 5, **send),
        span("cudaLaunchKernelExC", 12, 1, cat="cuda_runtime", correlation=6),
        span("ncclDevKernel_SendRecv", 20, 5, cat="kernel", lane=(0, 20), correlation=5),
        span("ncclDevKernel_SendRecv", 30, 5, cat="kernel", lane=(0, 20), correlation=6),
    )

    batch, single = (trace.groups[trace.events["group"][row]] for row in (5, 6))
    assert (batch["sends"], batch["receives"]) == ([[3, 9]], [[3, 10]])
    assert (single["sends"], single["receives"]) == ([[3, 9]], [])
    assert [KINDS[kind] for kind in trace.events["kind"][5:]] == ["RECV", "SEND"]
    assert trace.events["bytes"][5:].tolist() == [3200, 1600]
    assert trace.events["peer"].tolist() == [9, 10, -1, 9, -1, -1, -1]


def test_in_a_job_of_one_group_every_collective_belongs_to_it():
    listed = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}]
    reduce = span("gloo:all_reduce", 0, 5, cat="user_annotation", **{"Input Dims": [[3, 2]], "Input type": ["double"]})

    one = of(reduce, distributedInfo={"rank": 1, "pg_config": listed})
    two = of(reduce, distributedInfo={"rank": 1, "pg_config": [*listed, {"pg_name": "1", "ranks": [1]}]})

    assert (one.events["group"][0], one.events["bytes"][0]) == (0, 48)
    assert two.events["group"][0] == -1


@pytest.mark.parametrize(("name", "size"), [("Float", 4), ("c10::Half", 2), ("Float8_e4m3fn", 1), ("?", 0), (None, 0)])
def test_element_sizes(name, size):
    assert dtype_bytes(name) == size


def test_begin_and_end_events_are_joined_innermost_first():
    place = {"pid": 1, "tid": 1, "cat": "cpu_op"}
    begins = [{"ph": "B", "name": name, "ts": ts, **place} for name, ts in (("outer", 0), ("inner", 2.5), ("open", 30))]
    ends = [{"ph": "E", "ts": ts, **place} for ts in (4, 9.001, 40, 50)]

    trace = of(*ends, *begins)

    found = {row["name"]: (row["start_ns"], row["duration_ns"]) for row in rows(trace)}
    assert found == {"inner": (2500, 1500), "outer": (0, 9001), "open": (30_000, 10_000)}
    assert trace.meta["coverage"]["dropped"] == 1


def test_an_event_of_negative_duration_is_left_out_and_counted():
    trace = of(span("good", 0, 1), span("bad", 5, -1))

    assert [row["name"] for row in rows(trace)] == ["good"]
    assert trace.meta["coverage"]["dropped"] == 1


def test_the_base_time_is_added_and_the_display_unit_is_ignored():
    trace = of(span("a", 1.001, 2), baseTimeNanoseconds=1_711_964_646_000_000_000, displayTimeUnit="ns")

    assert trace.events["start_ns"].tolist() == [1_711_964_646_000_001_001]


def test_foreign_chrome_traces_keep_the_names_of_their_tracks():
    trace = of(
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "CrRendererMain"}},
        span("task", 0, 1, cat="v8", lane=(1, 2)),
        span("task", 0, 1, cat="v8", lane=("gpu", "x")),
    )

    assert [row["lane"] for row in rows(trace)] == ["CrRendererMain", "gpu/x"]
    assert trace.meta["source"] == "chrome"
    assert trace.meta["coverage"]["mapped"] == 0.0


def test_the_closing_bracket_of_the_array_form_may_be_missing():
    text = b'[{"ph": "X", "name": "a", "ts": 1, "dur": 1},\n'

    assert [row["name"] for row in rows(kineto.parse([text], "a.json"))] == ["a"]


def test_a_file_without_events_is_an_empty_trace():
    assert len(of()) == 0
    assert len(kineto.parse([b"[]"], "a.json")) == 0


# Bad input.


@given(cut=st.integers(18, len(profile([span("a", 1, 2), span("b", 3, 4)])) - 1))
def test_truncated_text_is_an_error_with_the_byte(cut):
    text = profile([span("a", 1, 2), span("b", 3, 4)])[:cut]

    with pytest.raises(FormatError, match=rf"a\.json is truncated JSON: the text ends at byte {cut}.*again"):
        kineto.parse([text[:20], text[20:]], "a.json")


test_bad_text_is_named_with_its_place = refused(
    (b'{"traceEvents": [{"ph": "X" oops}]}', r"malformed JSON at byte 28"),
    (b'{"traceEvents": [{"ph": 7}]}', r"not Trace Event JSON.*\$\.traceEvents\[0\]\.ph"),
    (b'{"traceEvents": {}}', r"not Trace Event JSON.*traceEvents"),
    (b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}', r"a\.json: b'\"soon\"' is not a time in microseconds"),
    (b'{"traceEvents": [{"ph": "X", "ts": 1e300}]}', r"1e300' us does not fit int64.*Subtract a base"),
    (b'{"traceEvents": [{"ph": "X", "ts": null}]}', r"b'null' is not a time"),
    (b'{"traceEvents": [{"ph": "X", "pid": []}]}', r"a pid or tid is a list"),
    (b'{"traceEvents": [{"ph": "X", "ts": 1}], "baseTimeNanoseconds": 9223372036854775807}', "do not fit int64"),
    by=lambda text: kineto.parse([text], "a.json"),
    error=FormatError,
)


# End to end.
