"""What the names in a profiler trace mean: categories, kinds, lanes, element sizes.

Use it to read Kineto JSON of any age, CUDA, ROCm, XPU or CPU. One literal
table per question; nothing here has units but `dtype_bytes`, which is bytes.

>>> kind_of("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", cpu_only=False)
'COLL'
>>> kind_of("kernel", "ncclDevKernel_SendRecv()", cpu_only=False), kind_said("nccl:send 0->1")
('RECV', 'SEND')
>>> kind_of("cpu_op", "aten::mm", cpu_only=False), kind_of("cpu_op", "aten::mm", cpu_only=True)
('HOST', 'COMPUTE')
>>> dtype_bytes("BFloat16"), dtype_bytes("c10::Half"), step_of("user_annotation", "ProfilerStep#12")
(2, 2, 12)

Which messages a send/receive kernel of a profiler trace carries.

torch says of each send and receive, in a row of the host, to or from which
rank it goes. NCCL runs one kernel for a message, or one for a batch of them,
which it launches when the batch is complete:

    host     |send to 4| |receive from 4| |launch|        |send to 4 [launch]|
    stream                                    |  kernel  |                |  kernel  |

So a message belongs to the first launch of its thread that comes after its
begin. What a kernel carries is an entry of the trace's table of groups: the
process group and the other end of each message, in order.

>>> entry = message_entry([(0, 4, True), (0, 4, False)])
>>> entry["name"], entry["sends"], entry["receives"]
('messages: to 4 in 0, from 4 in 0', [[0, 4]], [[0, 4]])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from headway.trace.profiler.json_events import Events

HOST, DEVICE, ABOVE = "host", "device", "above"
"""Where a category's rows stand: on a host lane, on a device lane, or drawn over the lanes."""


OP = 1 << 40
"""Added to an External id in the `corr` column: rows that belong to one op of the framework."""

FORWARD = 1 << 41
"""Added to the id of a forward-backward arrow in the `corr` column."""


@dataclass(frozen=True, slots=True)
class Category:
    """What a `cat` means."""

    kind: str
    """Kind of its rows, before the name is looked at."""

    place: str
    """`HOST`, `DEVICE` or `ABOVE`."""

    prefix: str = ""
    """What its device lanes are called: '' = 'stream 7'."""

    correlated: bool = False
    """True when rows carry the correlation id of a launch."""

    works: bool = True
    """False for rows that only name a stretch of others."""


CATEGORIES: dict[str, Category] = {
    "kernel": Category("COMPUTE", DEVICE, correlated=True),
    "gpu_memcpy": Category("DATA", DEVICE, correlated=True),
    "gpu_memset": Category("COMPUTE", DEVICE, correlated=True),
    "cuda_sync": Category("SYNC", DEVICE, "sync ", correlated=True, works=False),
    "gpu_user_annotation": Category("MARK", DEVICE, "annotation ", works=False),
    "cuda_runtime": Category("HOST", HOST, correlated=True),
    "cuda_driver": Category("HOST", HOST, correlated=True),
    "hip_runtime": Category("HOST", HOST, correlated=True),
    "xpu_runtime": Category("HOST", HOST, correlated=True),
    "xpu_driver": Category("HOST", HOST, correlated=True),
    "mtia_runtime": Category("HOST", HOST, correlated=True),
    "mtia_ccp_events": Category("COMPUTE", DEVICE, correlated=True),
    "mtia_insight": Category("COMPUTE", DEVICE, correlated=True),
    "glow_runtime": Category("HOST", HOST, correlated=True),
    "privateuse1_runtime": Category("HOST", HOST, correlated=True),
    "privateuse1_driver": Category("HOST", HOST, correlated=True),
    "collective_comm": Category("COLL", DEVICE, correlated=True),
    "cpu_op": Category("HOST", HOST),
    "operator": Category("HOST", HOST),
    "python_function": Category("HOST", HOST),
    "cpu_instant_event": Category("MARK", HOST, works=False),
    "user_annotation": Category("MARK", HOST, works=False),
    "overhead": Category("MARK", ABOVE, works=False),
    "Trace": Category("MARK", ABOVE, works=False),
    "": Category("MARK", ABOVE, works=False),
}  # fmt: skip
"""Every category the profiler writes. Rows of others are kept as MARK and lower the coverage."""

ANNOTATIONS: tuple[tuple[str, str], ...] = (
    (r"gloo:send|mpi:send", "SEND"),
    (r"gloo:recv|mpi:recv", "RECV"),
    (r"(gloo|mpi|ucc):", "COLL"),
    (r"nccl:|rccl:", "HOST"),
    (r"Optimizer\.step#", "OPTIM"),
    (r"enumerate\(DataLoader\)#", "DATA"),
)
"""Beginning of an annotation's name -> kind: the host's own collectives, the optimizer, the loader. An NCCL annotation
only surrounds the enqueueing."""

NAMESPACES = r"(void )?((\w+|\(anonymous namespace\)|<unnamed>)(<[^<>]*>)?::)*"
"""Beginning of a kernel's name, before its own word."""

COMMUNICATION = re.compile(
    NAMESPACES + r"((nccl|rccl|msccl|oneccl|nvshmem)|cross_device_reduce|\w*(multimem|one_shot|two_shot)_"
    r"|k?userbuffers_)"
    r"|(void )?(deep_ep::(?!layout)|c10d::(symmetric_memory|intra_node_comm)::|quickreduce::"
    r"|flashinfer::(comm|\w*(all_?reduce|all_?to_?all))"
    r"|tensorrt_llm::[\w:]*(all_?reduce|ar_fusion|all_?to_?all|all_?gather|reduce_?scatter|moe_?(comm|a2a)))",
    re.IGNORECASE,
)
"""Kernels that communicate: ncclKernel_..., ncclDevKernel_..., ncclAllReduceRingLLKernel over the years; of DeepEP, of
torch's symmetric memory (multimem_all_reduce_kernel, one_shot_all_reduce_kernel), of flashinfer, TensorRT-LLM, vLLM
(cross_device_reduce, quickreduce) and Transformer Engine (userbuffers)."""

SENDING_RECEIVING = re.compile(NAMESPACES + r"(nccl|rccl)\w*SendRecv", re.IGNORECASE)
"""Kernels that send, receive, or both. Unless something says what for they are messages: all-to-alls run them too."""

LAUNCHING = re.compile(r"(cuda|cu|hip|ur|ze)\w*Launch(?!HostF)")
"""Runtime calls that hand kernels to a device."""

SYNCHRONIZING = re.compile(r"(cuda|hip|cu|ze)\w*Synchronize")
"""Runtime calls that hold the host until the device has got somewhere."""

_DTYPE_BYTES = {
    "bool": 1, "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "uint8": 1, "int8": 1,
    "short": 2, "int16": 2, "uint16": 2, "unsigned short": 2, "half": 2, "bfloat16": 2, "float16": 2,
    "int": 4, "int32": 4, "uint32": 4, "unsigned int": 4, "float": 4, "float32": 4, "complexhalf": 4,
    "long": 8, "int64": 8, "uint64": 8, "long int": 8, "unsigned long": 8, "double": 8, "float64": 8, "complexfloat": 8,
    "complexdouble": 16,
}  # fmt: skip


def kind_of(category: str, name: str, *, cpu_only: bool) -> str:
    """Return the kind of a row; `cpu_only` says that the file has no device rows, so host ops are the computing."""
    entry = CATEGORIES.get(category)
    kind = entry.kind if entry else "MARK"
    if name.startswith(("Memcpy DtoD", "Memcpy D2D")):
        return "COMPUTE"  # A copy within the device is device work; only the others move data to or from the host.
    if category == "user_annotation":
        return next((found for pattern, found in ANNOTATIONS if re.match(pattern, name)), kind)
    if kind == "COMPUTE" and COMMUNICATION.match(name):
        return "RECV" if SENDING_RECEIVING.match(name) else "COLL"
    if kind == "HOST" and SYNCHRONIZING.match(name):
        return "SYNC"
    if cpu_only and category in ("cpu_op", "operator") and not name.startswith(("c10d::", "record_param_comms")):
        return "COMPUTE"
    return kind


def kind_said(verb: str) -> str:
    """Return the kind of what torch calls `verb`, 'send', 'nccl:recv 0<-1', 'all_to_allv'; MARK where it says nothing.

    A batch of messages is 'nccl:coalesced', which says nothing of them.
    """
    word = verb.lower().removeprefix("nccl:").removeprefix("rccl:")
    if word in ("", "coalesced", "none"):
        return "MARK"
    return next((kind for kind in ("SEND", "RECV") if word.startswith(kind.lower())), "COLL")


def step_of(category: str, name: str) -> int:
    """Return the number in a host row called 'ProfilerStep#7', -1 for any other row."""
    match = re.fullmatch(r"ProfilerStep#(\d{1,9})", name) if category == "user_annotation" else None
    return int(match[1]) if match else -1


def dtype_bytes(name: Any) -> int:
    """Return the size of one element of the type called `name`, in bytes; 0 when it is not known."""
    text = str(name).lower().removeprefix("c10::").removeprefix("torch.")
    return 1 if text.startswith("float8") else _DTYPE_BYTES.get(text, 0)


def host_lanes(events: Events) -> tuple[tuple[Any, Any] | None, dict[tuple[Any, Any], str]]:
    """Return the (pid, tid) of the main thread, and the file's own lane names where it is no profiler trace.

    The main thread is the one whose number is the process's; failing that, the one with the most host rows.
    """
    host = [
        code
        for code, (category, _, _) in enumerate(events.lanes)
        if category in CATEGORIES and CATEGORIES[category].place == HOST
    ]
    if not host:
        return None, events.lane_names
    counts = np.bincount(events.lane, minlength=len(events.lanes))
    own = [code for code in host if events.lanes[code][1] == events.lanes[code][2]]
    _, pid, tid = events.lanes[max(own or host, key=lambda code: int(counts[code]))]
    return (pid, tid), {}


def lane_name(
    category: str, pid: Any, tid: Any, *, main: tuple[Any, Any] | None, given: dict[tuple[Any, Any], str], many: bool
) -> str:
    """Return the name of a lane; `many` = several devices in one file, so the device is named too."""
    entry = CATEGORIES.get(category)
    if entry is not None and entry.place == DEVICE:
        device = f"device {pid} " if many else ""
        return f"{device}{entry.prefix}stream {tid}" if not entry.prefix else f"{device}{entry.prefix}{tid}"
    if (pid, tid) == main:
        return "main"
    if entry is not None and entry.place == ABOVE:
        return "profiler" if not category or category == "Trace" else category
    if main is not None and pid == main[0]:
        return f"thread {tid}"
    return given.get((pid, tid)) or f"{pid}/{tid}"


# Which messages a send/receive kernel of a profiler trace carries.

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Begins:
    """When `n` rows begin, and on which lane."""

    row: Ints
    """[n] Number of each row."""

    lane: Ints
    """[n] Its lane."""

    start_ns: Ints
    """[n] Its begin."""


def next_of(rows: Begins, among: Begins) -> Ints:
    """[n] Row of `among` that begins first on the lane of each of `rows` at its begin or after it, -1 for none."""
    found = np.full(len(rows.row), -1, np.int64)
    for lane in np.unique(rows.lane).tolist():
        own, theirs = np.flatnonzero(rows.lane == lane), np.flatnonzero(among.lane == lane)
        theirs = theirs[np.argsort(among.start_ns[theirs], kind="stable")]
        at = np.searchsorted(among.start_ns[theirs], rows.start_ns[own])
        there = at < len(theirs)
        found[own[there]] = among.row[theirs[at[there]]]
    return found


def messages_of(kernel: Ints, launch: Ints, messages: Begins, launches: Begins) -> dict[int, list[int]]:
    """Return kernel -> rows of the messages that it carries, in order; kernels of which that is not known are left out.

    `kernel` [k] are rows of kernels, `launch` [k] of their launches, -1 where those are not in the file. Of kernels
    that one launch started (a replayed graph) nothing is known.
    """
    known, first, count = np.unique(launch, return_index=True, return_counts=True)
    alone = (known >= 0) & (count == 1)
    kernel_of = dict(zip(known[alone].tolist(), kernel[first[alone]].tolist(), strict=True))
    carrier = next_of(messages, launches)
    found: dict[int, list[int]] = {}
    for at in np.argsort(messages.start_ns, kind="stable").tolist():
        if int(carrier[at]) in kernel_of:
            found.setdefault(kernel_of[int(carrier[at])], []).append(int(messages.row[at]))
    return found


def message_entry(messages: Sequence[tuple[int, int, bool]]) -> dict[str, Any]:
    """Return the entry of a kernel in the table of groups: `messages` are (process group, other rank, whether sent)."""
    words = [f"{'to' if sent else 'from'} {peer} in {group}" for group, peer, sent in messages]
    return {
        "name": f"messages: {', '.join(words)}",
        "ranks": [],
        "sends": [[group, peer] for group, peer, sent in messages if sent],
        "receives": [[group, peer] for group, peer, sent in messages if not sent],
    }
