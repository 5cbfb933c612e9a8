"""Profiler files of devices, written row by row, and the ledger that each must give, worked out by hand.

A picture above each file shows who has the device when; numbers are nanoseconds but for the windows of runs. Rows have
the form in which the profiler writes them: names, categories and arguments of CUDA, ROCm and XPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.account import KernelTimes
from headway.ledger.buckets import BUCKETS, SUB_CODE, SUBS
from headway.ledger.runs.kernels import profile_account
from headway.trace.events.trace import Trace, concat
from headway.trace.profiler import kineto
from tests.runs_made import MS, Made, RunMaker
from tests.test_sampled import on_device, steps_of

HOST = 4000
"""Process and main thread of every file."""

Wanted = dict[int, dict[str, int]]


@dataclass
class Rows:
    """Rows of one rank's file; times in ns."""

    rank: int = 0
    base_ns: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    launched: int = 0
    runtime: tuple[str, str] = ("cuda_runtime", "cudaLaunchKernelExC")
    """Category and name of a launch."""

    def add(self, category: str, name: str, start: int, length: int, lane: tuple[int, int], **args: Any) -> Rows:
        row = {"ph": "X", "cat": category, "name": name, "pid": lane[0], "tid": lane[1], "args": args}
        self.events.append({**row, "ts": start / 1000, "dur": length / 1000})
        return self

    def host(self, name: str, start: int, length: int, category: str = "cpu_op", **args: Any) -> Rows:
        return self.add(category, name, start, length, (HOST, HOST), **args)

    def mark(self, name: str, start: int, length: int) -> Rows:
        return self.host(name, start, length, "user_annotation")

    def launch(self, at: int) -> int:
        """Launch something at `at`; returns the correlation id."""
        self.launched += 1
        self.host(self.runtime[1], at, 1, self.runtime[0], correlation=self.launched)
        return self.launched

    def kernel(
        self, name: str, start: int, end: int, *, at: int = 0, stream: int = 7, corr: int | None = None, **args: Any
    ) -> Rows:
        """Run a kernel (or a copy, by its name) that was launched at `at`, or by the launch `corr`."""
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        number = self.launch(at) if corr is None else corr
        return self.add(category, name, start, end - start, (0, stream), correlation=number, stream=stream, **args)

    def says(self, verb: str, at: int, length: int, peer: int = -1, **args: Any) -> Rows:
        """Write what torch says of a call: 'send', 'recv', 'allreduce', ..."""
        end = {"send": {"Dst Rank": peer}, "recv": {"Src Rank": peer}}.get(verb, {})
        common = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "dtype": "Float", "In msg nelems": 8}
        return self.host("record_param_comms", at, length, **{"Collective name": verb, **common, **end, **args})

    def message(self, verb: str, peer: int, start: int, end: int, *, at: int = 0, **args: Any) -> Rows:
        """Send or receive by a kernel of its own, launched inside the call."""
        self.says(verb, at, 3, peer, **args)
        return self.kernel(SEND_RECEIVE, start, end, at=at + 1, stream=20)

    def batch(self, ends: list[tuple[str, int]], start: int, end: int, *, at: int = 0) -> Rows:
        """Send and receive by one kernel, which is launched when the batch is complete."""
        for k, (verb, peer) in enumerate(ends):
            self.says(verb, at + 2 * k, 1, peer)
        self.mark("nccl:coalesced", at + 2 * len(ends), 3)
        return self.kernel(SEND_RECEIVE, start, end, at=at + 2 * len(ends) + 1, stream=20)

    def text(self) -> dict[str, Any]:
        facts = {"rank": self.rank, "world_size": 8}
        return {"baseTimeNanoseconds": self.base_ns, "distributedInfo": facts, "traceEvents": self.events}

    def trace(self) -> Trace:
        return kineto.parse([json.dumps(self.text()).encode()], f"r{self.rank}.json")


SEND_RECEIVE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def ledger_of(*files: Rows) -> Wanted:
    """Return rank -> sub-line -> ns, of those that have any."""
    found = profile_account(concat([rows.trace() for rows in files])).sub_ns
    return {
        rank: {sub: int(ns) for sub, ns in zip(SUBS, amounts, strict=True) if ns} for rank, amounts in found.items()
    }


# Pipelines.


def stages() -> tuple[Rows, Rows]:
    """One message; the receive is launched early and spins until the send begins.

    rank 0   |compute      30|send     50|
    rank 1   |receive                  50|compute  80|
    """
    first = Rows(0).kernel("gemm", 0, 30).message("send", 1, 30, 50, at=10)
    second = Rows(1).message("recv", 0, 0, 50).kernel("gemm", 50, 80, at=10)
    return first, second


def test_a_receive_that_spins_until_the_send_begins_is_a_bubble():
    assert ledger_of(*stages()) == {
        0: {"useful.compute": 30, "comm.p2p": 20, "unknown.cut_short": 30},
        1: {"bubble.p2p": 30, "comm.p2p": 20, "useful.compute": 30},
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_without_the_peers_file_a_message_is_not_split(rank):
    alone = {0: {"useful.compute": 30, "comm.p2p": 20}, 1: {"comm.p2p": 50, "useful.compute": 30}}

    assert ledger_of(stages()[rank]) == {rank: alone[rank]}


def test_a_kernel_that_sends_and_receives_waits_for_the_last_of_its_peers():
    """Rank 1 receives from 0 and sends to 2 in one kernel.

    rank 0        20|send              60|
    rank 1   10|receive and send       60|
    rank 2               35|receive    60|
    """
    files = (
        Rows(0).kernel("gemm", 0, 20).message("send", 1, 20, 60, at=5),
        Rows(1).kernel("gemm", 0, 10).batch([("recv", 0), ("send", 2)], 10, 60, at=2),
        Rows(2).kernel("gemm", 0, 35).message("recv", 1, 35, 60, at=5),
    )

    assert ledger_of(*files) == {
        0: {"useful.compute": 20, "comm.p2p": 40},
        1: {"useful.compute": 10, "bubble.p2p": 25, "comm.p2p": 25},
        2: {"useful.compute": 35, "comm.p2p": 25},
    }


def test_both_directions_between_two_stages_in_one_kernel_each():
    files = (
        Rows(0).kernel("gemm", 0, 40).batch([("send", 1), ("recv", 1)], 40, 100, at=5),
        Rows(1).kernel("gemm", 0, 70).batch([("recv", 0), ("send", 0)], 70, 100, at=5),
    )

    assert ledger_of(*files) == {
        0: {"useful.compute": 40, "bubble.p2p": 30, "comm.p2p": 30},
        1: {"useful.compute": 70, "comm.p2p": 30},
    }


def test_a_send_that_left_its_bytes_in_a_buffer_waited_for_nobody():
    files = (
        Rows(0).message("send", 1, 0, 10).kernel("gemm", 10, 55, at=5),
        Rows(1).kernel("gemm", 0, 40).message("recv", 0, 40, 55, at=5),
    )

    assert ledger_of(*files) == {0: {"comm.p2p": 10, "useful.compute": 45}, 1: {"useful.compute": 40, "comm.p2p": 15}}


def test_a_message_behind_a_kernel_that_computes_counts_where_they_are_matched_by_order():
    """The first receive is hidden, so rank 1 waits in the second alone; its part that computes is no bubble.

    rank 0   |send 1   20|compute          60|send 2 80|
    rank 1   |compute  20|receive 2, compute 30|...  80|
    """
    files = (
        Rows(0).message("send", 1, 0, 20, Seq=7).kernel("gemm", 20, 60, at=5).message("send", 1, 60, 80, at=10, Seq=9),
        Rows(1).message("recv", 0, 0, 20, Seq=3).kernel("gemm", 0, 30, at=5).message("recv", 0, 20, 80, at=10, Seq=4),
    )

    assert ledger_of(*files) == {
        0: {"comm.p2p": 40, "useful.compute": 40},
        1: {"useful.compute": 30, "bubble.p2p": 30, "comm.p2p": 20},
    }


def test_of_unequally_many_messages_those_are_matched_that_ran_at_the_same_time():
    """The window of rank 1 closed before its last receive had ended; or it opened after its first one."""
    sends = Rows(0).message("send", 1, 0, 20).message("send", 1, 50, 70, at=5).message("send", 1, 90, 100, at=10)
    until = Rows(1).message("recv", 0, 0, 20).message("recv", 0, 20, 70, at=5).kernel("gemm", 70, 100, at=9)
    since = Rows(1).kernel("gemm", 0, 25).message("recv", 0, 25, 70, at=5).message("recv", 0, 70, 100, at=10)

    assert ledger_of(sends, until)[1] == {"comm.p2p": 40, "bubble.p2p": 30, "useful.compute": 30}
    assert ledger_of(sends, since)[1] == {"useful.compute": 25, "comm.p2p": 75}


def test_a_receive_that_ended_before_its_send_began_is_matched_with_nothing():
    """Clocks that are apart, or windows of other steps."""
    files = (
        Rows(0).kernel("gemm", 0, 60).message("send", 1, 60, 80, at=5),
        Rows(1).message("recv", 0, 0, 50).kernel("gemm", 50, 80, at=5),
    )

    assert ledger_of(*files)[1] == {"comm.p2p": 50, "useful.compute": 30}


@pytest.mark.parametrize("words", [{"says": "all_to_allv"}, {"mark": "nccl:all_to_all"}])
def test_an_all_to_all_runs_the_kernel_of_messages_and_is_a_collective(words):
    files = []
    for rank, start in enumerate((0, 40)):
        rows = Rows(rank).kernel("gemm", 0, max(start, 1))
        rows = rows.says("all_to_allv", 5, 9, Seq=3) if "says" in words else rows.mark(words["mark"], 5, 9)
        known = {} if "says" in words else {"Process Group Name": "0", "Collective name": "all_to_all", "Seq": 3}
        files.append(rows.kernel(SEND_RECEIVE, max(start, 1), 60, at=7, stream=20, **known))

    assert ledger_of(*files) == {
        0: {"useful.compute": 1, "straggler.device": 39, "comm.exposed": 20},
        1: {"useful.compute": 40, "comm.exposed": 20},
    }


def test_messages_of_a_replayed_graph_are_not_split():
    first, second = Rows(0), Rows(1)
    for rows, verb in ((first, "send"), (second, "recv")):
        rows.says(verb, 0, 2, 1 - rows.rank)  # while the graph was captured, with no kernel
        replay = rows.launch(4)
        rows.kernel(SEND_RECEIVE, 4, 20, corr=replay, stream=20).kernel(SEND_RECEIVE, 30, 40, corr=replay, stream=20)

    assert ledger_of(first, second)[1] == {"host.launch": 2, "idle.device": 12, "comm.p2p": 26}


# Kernels that communicate, by their names.

COMMUNICATING = (
    ALL_REDUCE,
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
    "void <unnamed>::multimem_one_shot_all_reduce_kernel<c10::BFloat16, (int)16>(T1 *, unsigned long)",
    "void one_shot_all_reduce_kernel<float, 16, 8>(float**, float*)",
    "void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**, int)",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*, long*)",
    "void deep_ep::internode_ll::combine<true, 7168, 9>(void*)",
    "void nvshmemi_call_broadcast_on_stream_kernel<int>(int, int*)",
    "void c10d::nvshmem_extension::allToAllV(void*)",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<"
    "(flashinfer::trtllm_allreduce_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 8>(void*)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals, vllm::Signal*)",
    "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<1, __nv_bfloat16>(void*)",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<__nv_bfloat16, 8>(void*)",
)

COMPUTING = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<128>(void*)",
    "void tensorrt_llm::kernels::cutlass_kernels::fused_moe<16>(void*)",
    "triton_red_fused_all_reduce_wait_tensor_0",
)


@pytest.mark.parametrize("name", COMMUNICATING)
def test_a_kernel_that_communicates_is_no_useful_time_but_where_others_compute(name):
    """|communicates 20 .. |compute 50|..  80|: hidden from 30 to 50."""
    rows = Rows().kernel(name, 0, 80, stream=20).kernel("gemm", 30, 50, at=5)

    assert ledger_of(rows) == {0: {"comm.exposed": 60, "useful.compute": 20}}


@pytest.mark.parametrize("name", COMPUTING)
def test_a_kernel_that_only_sounds_like_it_computes(name):
    assert ledger_of(Rows().kernel(name, 0, 80)) == {0: {"useful.compute": 80}}


# Collectives of many ranks.


def eight(seq: bool, fewer: int = -1) -> list[Rows]:
    """Rank r reduces from 10 r to 100, twice; the rank `fewer` shows the first one only."""
    files = []
    for rank in range(8):
        rows = Rows(rank)
        for turn in range(1 if rank == fewer else 2):
            begin, known = 100 * turn, {"Seq": 5 + turn} if seq else {}
            if rank:
                rows.kernel("gemm", begin, begin + 10 * rank, at=begin)
            rows.says("allreduce", begin + 3, 3, **known)
            rows.kernel(ALL_REDUCE, begin + 10 * rank, begin + 100, at=begin + 4, stream=20)
        files.append(rows)
    return files


@pytest.mark.parametrize("seq", [True, False])
def test_eight_ranks_wait_for_the_last_one(seq):
    files = eight(seq)

    late = [{"useful.compute": 20 * r, "straggler.device": 2 * (70 - 10 * r), "comm.exposed": 60} for r in range(8)]
    assert ledger_of(*files) == {r: {sub: ns for sub, ns in row.items() if ns} for r, row in enumerate(late)}
    lateness = profile_account(concat([rows.trace() for rows in files])).lateness
    assert (lateness.times_last[7], lateness.num_collectives, lateness.median_margin_ns[7]) == (2, 2, 10)
    assert lateness.blamed_ns == {7: {"useful": 2 * sum(70 - 10 * r for r in range(8))}}


def test_without_numbers_ranks_that_show_unequally_many_are_not_matched():
    found = ledger_of(*eight(False, fewer=3))

    assert found[0] == {"comm.exposed": 200}
    assert found[3] == {"useful.compute": 30, "comm.exposed": 70, "unknown.cut_short": 100}


def test_with_numbers_ranks_that_show_unequally_many_are_matched():
    found = ledger_of(*eight(True, fewer=3))

    assert found[0] == {"straggler.device": 140, "comm.exposed": 60}
    assert found[3] == {"useful.compute": 30, "straggler.device": 40, "comm.exposed": 30, "unknown.cut_short": 100}


def test_ranks_that_share_no_group_with_the_first_one_wait_for_their_own_last_one():
    """Two groups of two: 0 and 2, 1 and 3."""
    files = []
    for rank, begin in enumerate((0, 10, 30, 50)):
        rows = Rows(rank).kernel("gemm", 0, max(begin, 1))
        group = {"Process Group Name": str(1 + rank % 2), "Process Group Ranks": str([rank % 2, rank % 2 + 2])}
        rows.says("allreduce", 2, 3, **group, Seq=1).kernel(ALL_REDUCE, max(begin, 1), 60, at=3, stream=20)
        files.append(rows)

    found = ledger_of(*files)
    assert found[0] == {"useful.compute": 1, "straggler.device": 29, "comm.exposed": 30}
    assert found[1] == {"useful.compute": 10, "straggler.device": 40, "comm.exposed": 10}


# Launches and steps.


def test_kernels_of_one_launch_count_once_on_whatever_streams_they_ran():
    """A replayed graph: three kernels of one correlation id on two streams, overlapping from 20 to 30."""
    rows = Rows(runtime=("cuda_runtime", "cudaGraphLaunch"))
    replay = rows.launch(0)
    rows.kernel("a", 0, 30, corr=replay).kernel("b", 20, 50, corr=replay, stream=8).kernel("c", 60, 70, corr=replay)

    assert ledger_of(rows) == {0: {"useful.compute": 60, "idle.device": 10}}


@pytest.mark.parametrize("marks", ["ProfilerStep", "Optimizer.step"])
def test_device_time_belongs_to_the_step_that_launched_it(marks):
    """The host is ahead: the second step's graph runs when the host has left that step.

    host     |step 0   100|step 1   200|
    device        |graph 0         |graph 1        |
                 50              180             310
    """
    rows = Rows(runtime=("cuda_runtime", "cudaGraphLaunch"))
    for step in range(2):
        if marks == "ProfilerStep":
            rows.mark(f"ProfilerStep#{step}", 100 * step, 100)
        else:  # headway's own windows
            rows.mark("Optimizer.zero_grad#AdamW.zero_grad", 100 * step + 1, 5)
            rows.mark("Optimizer.step#AdamW.step", 100 * step + 80, 20)
        replay, begin = rows.launch(100 * step + 30), 50 + 130 * step
        rows.kernel("a", begin, begin + 60, corr=replay).kernel("b", begin + 60, begin + 130, corr=replay)

    trace = rows.trace()
    kernels = trace.where(np.array([lane.startswith("stream") for lane in trace.lanes])[trace.events["lane"]])
    assert np.bincount(kernels.events["step"], kernels.events["duration_ns"]).tolist() == [130, 130]
    found = profile_account(trace)
    assert found.steps == 2
    assert found.kernels == KernelTimes({"a": 120, "b": 140}, {"a": 2, "b": 2}, num_steps=2)
    assert sum(found.kernels.ns.values()) == found.sub_ns[0][SUB_CODE["useful.compute"]]


# Other devices.


def test_a_file_of_rocm_is_read_as_one_of_cuda():
    rows = Rows(runtime=("hip_runtime", "hipLaunchKernel"))
    rows.kernel("Memcpy HtoD (Host -> Device)", 0, 10).kernel("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", 10, 40)
    rows.kernel("Memcpy DtoD (Device -> Device)", 40, 45).kernel("Memcpy DtoH (Device -> Host)", 45, 50)
    rows.says("send", 2, 3, 1).kernel("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", 50, 70, at=3)
    rows.kernel("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", 70, 80, at=8)
    rows.host("hipGetDevice", 80, 20, "hip_runtime", correlation=99)

    assert ledger_of(rows) == {
        0: {"input.transfer": 10, "useful.compute": 35, "host.copy": 5, "comm.p2p": 20, "comm.exposed": 10,
            "host.launch": 20}
    }  # fmt: skip


def test_a_file_of_xpu_is_read_as_one_of_cuda():
    rows = Rows(runtime=("xpu_runtime", "urEnqueueKernelLaunch"))
    rows.kernel("Memcpy M2D (MEMORY(Unknown) -> DEVICE)", 0, 10).kernel("gemm_kernel", 10, 40)
    rows.kernel("Memcpy D2D (DEVICE -> DEVICE)", 40, 45).kernel("Memcpy D2M (DEVICE -> MEMORY(Unknown))", 45, 50)
    rows.kernel("oneccl_allreduce_pcie", 50, 70)

    assert ledger_of(rows) == {0: {"input.transfer": 10, "useful.compute": 35, "host.copy": 5, "comm.exposed": 20}}


# Windows of runs: what they show is what the whole run is split by.


def window(made: Made, rank: int, step: int) -> tuple[Rows, int]:
    """Return an empty window of one step, whose times count from the step's begin, and the length of the step."""
    begin, duration = steps_of(made, rank)[step]
    return Rows(rank, begin - made.meta["start_ns"] + made.meta["realtime_ns"]), duration


def write(folder: Path, rows: Rows) -> Path:
    """Write a window as headway's own are written: without the rank."""
    path = folder / f"r{rows.rank}-w0.json"
    path.write_text(json.dumps({key: value for key, value in rows.text().items() if key != "distributedInfo"}))
    return path


def job(**costs: Any) -> Made:
    return RunMaker(**{"steps": 4, "optimizer_ns": 0, "transfer_ns": 0, "iter_ns": 0, "fetch_ns": 0, **costs}).make()


@pytest.mark.parametrize(
    ("ahead_ms", "kernel_ms"), [(0, 1), (20, 1), (60, 1), (95, 1), (0, 7), (20, 7), (60, 7), (90, 7)]
)
def test_a_busy_device_is_busy_however_far_its_host_is_ahead(tmp_path, ahead_ms, kernel_ms):
    """A window shows the kernels that were launched in it and had ended when it closed; the device never rests."""
    made = job(ranks=1, compute_ns=100 * MS)
    rows, duration = window(made, 0, 1)
    for at in range(0, duration // MS, kernel_ms):
        corr, end = rows.launch(at * MS), (at + ahead_ms + kernel_ms) * MS
        if end <= duration:
            rows.kernel("gemm", end - kernel_ms * MS, end, corr=corr)
    rows.mark("Optimizer.step#AdamW.step", duration - MS, MS)

    ledger = Ledger.of(on_device(made, (write(tmp_path, rows),)))

    in_steps = sum(length for _, length in steps_of(made, 0))
    assert ledger.ledger_ns["useful"] == in_steps


def test_the_rest_of_a_host_that_launches_nothing_more_is_a_gap(tmp_path):
    made = job(ranks=1, compute_ns=100 * MS)
    rows, duration = window(made, 0, 1)
    rows.kernel("gemm", 0, 60 * MS).mark("Optimizer.step#AdamW.step", duration - MS, MS)

    ledger = Ledger.of(on_device(made, (write(tmp_path, rows),)))

    assert ledger.sub_ns["useful.compute"] == 4 * 60 * MS
    assert ledger.sub_ns["host.launch"] == 4 * 40 * MS


def test_windows_that_show_no_kernel_are_not_used_and_it_is_said(tmp_path):
    made = RunMaker(ranks=1, steps=6).make()
    rows, duration = window(made, 0, 3)
    rows.host("aten::mm", 0, duration // 2).launch(MS)

    ledger = Ledger.of(on_device(made, (write(tmp_path, rows),)))

    assert ledger.ledger_ns == {bucket: made.truth_ns.get(bucket, 0) for bucket in BUCKETS}
    assert any("1 profiler windows show no kernel" in note for note in ledger.notes)


def pipeline(tmp_path: Path, ranks: tuple[int, ...]) -> Ledger:
    """Two stages, 10 ms a step: the first computes 6 and sends 4; the second receives from the begin, then idles."""
    made = job(ranks=2, compute_ns=10 * MS, comm_ns=0)
    files = []
    for rank in ranks:
        rows, duration = window(made, rank, 2)
        if rank == 0:
            rows.kernel("gemm", 0, 6 * MS).message("send", 1, 6 * MS, 10 * MS, at=MS)
        else:
            rows.message("recv", 0, 0, 10 * MS)
        files.append(write(tmp_path, rows.mark("Optimizer.step#AdamW.step", duration - MS, MS)))
    return Ledger.of(on_device(made, tuple(files)))


def test_bubbles_that_windows_of_both_stages_show_are_bubbles_of_the_run(tmp_path):
    ledger = pipeline(tmp_path, (0, 1))

    assert ledger.sub_ns["useful.compute"] == 4 * 6 * MS
    assert ledger.sub_ns["bubble.p2p"] == 4 * 6 * MS
    assert ledger.sub_ns["comm.p2p"] == 4 * (4 + 4) * MS
    causes = {cause.cause: cause for cause in find_causes(ledger)}
    assert "more micro-batches" in causes["bubble.p2p"].fix
    assert "DDP" not in causes["comm.exposed"].fix
    assert "between stages" in causes["comm.exposed"].fix


def test_bubbles_of_a_stage_without_its_neighbours_window_are_not_split(tmp_path):
    ledger = pipeline(tmp_path, (1,))

    assert ledger.sub_ns.get("bubble.p2p", 0) == 0
    assert ledger.sub_ns["comm.p2p"] == 2 * 4 * 10 * MS  # both ranks: the other one takes the shares of this one
