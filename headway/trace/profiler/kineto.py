"""PyTorch profiler (Kineto) and other Chrome JSON -> Trace, in columns from start to end.

Use it for a profiler window of one rank. Every span is kept with its depth;
a Dag uses the leaves. What the columns mean here:

    start_ns   `ts` + `baseTimeNanoseconds`, exact to the nanosecond that the text gives
    lane       'stream 7' (device; 'device 1 stream 7' when there are several), 'main', 'thread 123'; 'annotation ...'
               and 'sync ...' for rows that the profiler draws over a stream, so that a stream is a serial resource
    kind       from the category and the name (`CATEGORIES`, `kind_of`); without any device row, host ops are COMPUTE
    corr       equal = linked, the earlier row leads: launch and kernel by correlation; + OP for what shares an
               External id; + FORWARD for the two ends of a forward-backward arrow
    group seq bytes peer   collectives: from the record_param_comms arguments of the row, or of the op that launched it;
               seq is -1 where the profiler did not write it (before 2026). Copies: bytes.
               Send/receive kernels: group = entry of `groups` that lists their messages (`kineto_names`), where
               they are known; seq = peer = -1, as torch numbers messages on each rank for itself.
               SYNC rows: seq = correlation of the awaited event record, peer = awaited stream. Host ops: seq = autograd
               sequence number.
    step       number of the ProfilerStep that the row, or its launch, starts in; in a file of a device without such
               marks number of the update, from 0, at whose end the step ends

`meta["coverage"]` says what share of the spans was understood and what share of the wall the leaves cover per device.

>>> text = b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "add", "pid": 0, "tid": 7, "ts": 1.001, "dur": 2}]}'
>>> trace = parse([text], "a.json")
>>> trace.lanes, trace.events["start_ns"].tolist(), trace.meta["coverage"]["mapped"]
(('main', 'stream 7'), [1001], 1.0)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.trace.events.content import MOST_RANKS, group_id, parse_ranks
from headway.trace.events.intervals import Nesting, union_ns
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, MOVING
from headway.trace.profiler import json_events
from headway.trace.profiler.json_pieces import Arguments, plain
from headway.trace.profiler.kineto_names import (
    CATEGORIES,
    DEVICE,
    FORWARD,
    LAUNCHING,
    OP,
    Begins,
    dtype_bytes,
    host_lanes,
    kind_of,
    kind_said,
    lane_name,
    message_entry,
    messages_of,
    step_of,
)

if TYPE_CHECKING:
    from headway.trace.events.content import Content


def read(content: Content) -> Trace:
    """Read a file that `formats.open_any` recognised."""
    return parse(content, str(content.path))


@dataclass(frozen=True, slots=True)
class ProfiledProcess:
    """Which process a file says that it is of."""

    rank: int | None
    """Its rank, None where the file does not say, or says that its world is this process alone."""

    host: str
    """Name of the host, "" when unknown."""

    process: int | None
    """Number of the process on its host, None when unknown."""


def parse(pieces: Iterable[bytes], where: str) -> Trace:
    """Decode as `parse_with_origin`; the rank is 0 where the file tells none."""
    return parse_with_origin(pieces, where)[0]


def parse_with_origin(pieces: Iterable[bytes], where: str) -> tuple[Trace, ProfiledProcess]:
    """Decode the JSON text of a profiler trace, which comes in pieces; `where` names it in messages.

    Raises `FormatError` on damaged text (with the byte offset) and on times that do not fit int64 nanoseconds.
    """
    events = json_events.decode(pieces, where)
    rows = _KinetoRows(events)
    kind = rows.kinds()
    corr = rows.correlations(kind)
    columns = {
        "rank": np.full(rows.n, rows.rank),
        "kind": kind,
        "lane": rows.lane,
        "depth": rows.nest.depth,
        "start_ns": rows.start_ns(where),
        "duration_ns": events.duration_ns,
        "corr": corr,
        "step": rows.steps(corr),
        **rows.communication(kind, corr),
    }
    names = {label: code for code, label in enumerate(dict.fromkeys(name for _, name in events.labels))}
    name_of_label = np.array([names[name] for _, name in events.labels], dtype=np.int32)
    columns["name"] = name_of_label[events.label]
    trace = Trace.from_columns(
        columns,
        names=list(names),
        lanes=rows.lane_table,
        groups=rows.groups,
        ranks={rows.rank: rows.rank_facts()},
        meta=rows.meta(kind),
    )
    return trace, rows.origin()


class _KinetoRows:
    """The spans of one file, with what several columns need."""

    def __init__(self, events: json_events.Events) -> None:
        self.events = events
        self.n = len(events.label)
        facts = events.facts.distributed
        self.facts: dict[str, Any] = facts if isinstance(facts, dict) else {}
        rank = _whole(self.facts.get("rank"), 0)
        self.rank = rank if 0 <= rank <= np.iinfo(np.int32).max else 0
        self.category = [CATEGORIES.get(category) for category, _ in events.labels]
        self.on_device = np.array([entry is not None and entry.place == DEVICE for entry in self.category], dtype=bool)
        self.lane_table, self.lane = self._lanes()
        self.nest = Nesting.of(self.lane, events.start_ns, events.duration_ns)
        self.groups: dict[int, dict[str, Any]] = self._known_groups()
        self.ranks_left = MOST_RANKS + self.n
        """Ranks of groups that may still be listed: a row can claim as many as it likes."""

    def _lanes(self) -> tuple[list[str], NDArray[np.int64]]:
        """Name every (category, pid, tid) and return the table and the codes [n]."""
        used = self.events.lanes
        main, given = host_lanes(self.events)
        devices = {pid for category, pid, _ in used if category in CATEGORIES and CATEGORIES[category].place == DEVICE}
        table: dict[str, int] = {"main": 0}
        codes = [
            table.setdefault(lane_name(category, pid, tid, main=main, given=given, many=len(devices) > 1), len(table))
            for category, pid, tid in used
        ]
        if len(table) > np.iinfo(np.int16).max:
            raise FormatError(f"the trace has {len(table)} lanes; at most 32767 fit. Export fewer threads.")
        return list(table), np.array(codes, dtype=np.int64)[self.events.lane]

    def _known_groups(self) -> dict[int, dict[str, Any]]:
        """Return the process groups that the head of the file lists."""
        listed = self.facts.get("pg_config")
        entries = listed if isinstance(listed, list) else []
        return {
            group_id(str(entry.get("pg_name", ""))): {
                "name": str(entry.get("pg_name", "")),
                "description": str(entry.get("pg_desc", "")),
                "ranks": parse_ranks(entry.get("ranks")),
            }
            for entry in entries
            if isinstance(entry, dict) and entry.get("pg_name") not in (None, "")
        }

    def start_ns(self, where: str) -> NDArray[np.int64]:
        """[n] Start with the file's base time added."""
        base_ns, start_ns = self.events.facts.base_ns, self.events.start_ns
        low, high = (int(start_ns.min()), int(start_ns.max())) if self.n else (0, 0)
        if not -(2**63) <= low + base_ns <= high + base_ns < 2**63 - 2**50:
            raise FormatError(f"{where}: times up to {high + base_ns} ns do not fit int64. Check baseTimeNanoseconds.")
        return start_ns + base_ns

    def kinds(self) -> NDArray[np.uint8]:
        """[n] Kind of each row."""
        present = np.bincount(self.events.label, minlength=len(self.events.labels)) > 0
        cpu_only = not bool((self.on_device & present).any())
        table = [KIND[kind_of(category, name, cpu_only=cpu_only)] for category, name in self.events.labels]
        return np.array(table, dtype=np.uint8)[self.events.label]

    def correlations(self, kind: NDArray[np.uint8]) -> NDArray[np.int64]:
        """[n] `corr` of each row, see the module's text."""
        corr = self.events.numbers["correlation"]
        linked = np.array([entry is not None and entry.correlated for entry in self.category], dtype=bool)
        if not (corr[linked[self.events.label]] >= 0).any():
            for category in json_events.LAUNCH_FLOWS:
                self._follow(category, corr, linked[self.events.label], 0)
        external = self.events.numbers["external_id"]
        older = self.events.numbers["external_id_old"] if (external < 0).all() else external
        external = np.where(external >= 0, external, older)
        by_op = (corr < 0) & (external >= 0)
        corr[by_op] = external[by_op] + OP
        host = np.array([category == "cpu_op" for category, _ in self.events.labels], dtype=bool)
        self._follow(json_events.FORWARD_FLOW, corr, host[self.events.label], FORWARD)
        return corr

    def _follow(self, category: str, corr: NDArray[np.int64], among: NDArray[np.bool_], offset: int) -> None:
        """Write the ids of the arrows of one category into `corr` of the rows that they touch."""
        flow = self.events.flows.get(category)
        rows = np.flatnonzero(among)
        if flow is None or not len(rows):
            return
        # Lanes are numbered anew by thread alone, because rows and arrows of one thread differ in category.
        place = {key: code for code, key in enumerate(dict.fromkeys((p, t) for _, p, t in self.events.lanes))}
        lane_of = np.array([place[p, t] for _, p, t in self.events.lanes], dtype=np.int64)
        order = rows[np.lexsort((self.nest.depth[rows], self.events.start_ns[rows], lane_of[self.events.lane[rows]]))]
        lane, start_ns = lane_of[self.events.lane[order]], self.events.start_ns[order]
        flow_lane = lane_of[flow.lane]
        for code in np.unique(flow_lane).tolist():
            first, last = np.searchsorted(lane, [code, code + 1])
            ends = np.flatnonzero(flow_lane == code)
            # An arrow touches the row that starts at its moment. Of several, the search from the left finds the
            # outermost.
            at = first + np.searchsorted(start_ns[first:last], flow.start_ns[ends])
            hit = (at < last) & (start_ns[np.minimum(at, len(order) - 1)] == flow.start_ns[ends])
            corr[order[at[hit]]] = flow.id[ends[hit]] + offset

    def steps(self, corr: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] Step number: a host row's by the time it starts, a device row's by the time of its launch."""
        events = self.events
        numbers = np.array([step_of(category, name) for category, name in events.labels], dtype=np.int64)
        marks = np.flatnonzero(numbers[events.label] >= 0)
        step = np.full(self.n, -1, dtype=np.int64)
        if len(marks):
            marks = marks[np.argsort(events.start_ns[marks], kind="stable")]
            begins, ends = events.start_ns[marks], events.start_ns[marks] + events.duration_ns[marks]
            at = np.searchsorted(begins, events.start_ns, side="right") - 1
            # A mark without duration still holds the instant at which it begins.
            inside = (at >= 0) & (events.start_ns < np.maximum(ends[at], begins[at] + 1))
            step[inside] = numbers[events.label[marks[at[inside]]]]
        elif self.on_device[events.label].any():
            ends = self._update_ends()
            # The number of updates that had ended by a row's start is its step; rows after the last update have none.
            at = np.searchsorted(ends, events.start_ns, side="right")
            step[at < len(ends)] = at[at < len(ends)]
        launch = self._launch_of(corr)
        step[launch >= 0] = step[launch[launch >= 0]]
        return step

    def _update_ends(self) -> NDArray[np.int64]:
        """[u] When the optimizer's updates end, in order; of several optimizers those of the last one of a step."""
        events = self.events
        updates = np.array([kind_of(*label, cpu_only=False) == "OPTIM" for label in events.labels], dtype=bool)
        rows = np.flatnonzero(updates[events.label])
        rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
        rows = rows[events.label[rows] == events.label[rows[-1:]]]
        return np.asarray(events.start_ns[rows] + events.duration_ns[rows], dtype=np.int64)

    def _launch_of(self, corr: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] Row of the host call that launched this device row, -1 for host rows and where it is not in the file."""
        device = self.on_device[self.events.label]
        hosts = np.flatnonzero(~device & (corr >= 0) & (corr < OP))
        hosts = hosts[np.argsort(corr[hosts], kind="stable")]
        launch = np.full(self.n, -1, dtype=np.int64)
        wanted = np.flatnonzero(device & (corr >= 0) & (corr < OP))
        if len(hosts) and len(wanted):
            at = np.minimum(np.searchsorted(corr[hosts], corr[wanted]), len(hosts) - 1)
            found = corr[hosts[at]] == corr[wanted]
            launch[wanted[found]] = hosts[at[found]]
        return launch

    def communication(self, kind: NDArray[np.uint8], corr: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return the columns group, seq, peer and bytes, and kind, which what launched a kernel may say better."""
        events = self.events
        columns = {
            "kind": kind.astype(np.int64),
            "said": self._said_around(kind, launch := self._launch_of(corr)),
            "group": np.full(self.n, -1, dtype=np.int64),
            "seq": events.numbers["sequence"],
            "peer": np.full(self.n, -1, dtype=np.int64),
            "bytes": events.numbers["bytes"],
        }
        self._fill_copies(columns["bytes"], launch)
        speaking = [row for row, arguments in events.kept.items() if arguments.collective is not None]
        for row, arguments in events.kept.items():
            if arguments.collective is not None:
                self._fill_collective(columns, row, arguments)
            elif kind[row] == KIND["SYNC"]:
                columns["seq"][row] = _whole(arguments.awaited_record, -1)
                columns["peer"][row] = _whole(arguments.awaited_lane, -1)
        moving = np.isin(kind, MOVING)
        silent = np.setdiff1d(np.flatnonzero(moving), speaking)
        self._inherit(columns, silent, np.array(speaking, dtype=np.int64), launch)
        device = self.on_device[events.label]
        said = columns.pop("said")
        named = moving & device & (said != KIND["MARK"])
        columns["kind"][named] = said[named]
        for row in silent[columns["bytes"][silent] == 0].tolist():
            if row in events.kept:
                columns["bytes"][row] = _input_bytes(events.kept[row])
        if len(self.groups) == len(self._known_groups()) == 1:  # The job has one group: it is that one.
            columns["group"][moving & (columns["group"] < 0)] = next(iter(self.groups))
        messages = np.isin(said, [KIND["SEND"], KIND["RECV"]]) & ~device
        self._enter_messages(columns, np.flatnonzero(messages), said == KIND["SEND"], launch)
        columns["peer"][np.abs(columns["peer"]) > np.iinfo(np.int32).max] = -1  # A stream given as an address.
        return columns

    def _fill_copies(self, size: NDArray[np.int64], launch: NDArray[np.int64]) -> None:
        """Take the size of a copy from its launch where the copy itself has none (ROCm)."""
        copies = np.array([category == "gpu_memcpy" for category, _ in self.events.labels], dtype=bool)
        rows = np.flatnonzero(copies[self.events.label] & (size == 0) & (launch >= 0))
        for row in rows.tolist():
            launching = self.events.kept.get(int(launch[row]))
            size[row] = _whole(launching.size, 0) if launching is not None else 0

    def _said_around(self, kind: NDArray[np.uint8], launch: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] Kind that the annotation around a communication kernel's launch says, 'nccl:all_to_all'; else MARK."""
        events = self.events
        said = np.full(self.n, KIND["MARK"], dtype=np.int64)
        marks = [
            KIND[kind_said(name)] if category == "user_annotation" and name.startswith(("nccl:", "rccl:")) else -1
            for category, name in events.labels
        ]
        kind_of_label = np.array(marks, dtype=np.int64)
        around = np.flatnonzero(kind_of_label[events.label] >= 0)
        rows = np.flatnonzero(np.isin(kind, MOVING) & (launch >= 0))
        outer = self._around(launch[rows], around)
        said[rows[outer >= 0]] = kind_of_label[events.label[outer[outer >= 0]]]
        return said

    def _around(self, rows: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
        """[k] Row of `among` that began last before each of `rows` on its lane and has not ended then, else -1."""
        start_ns, lane = self.events.start_ns, self.lane
        found = np.full(len(rows), -1, dtype=np.int64)
        among = among[np.lexsort((start_ns[among], lane[among]))]
        for value in np.unique(lane[rows]).tolist():
            inner = np.flatnonzero(lane[rows] == value)
            theirs = among[lane[among] == value]
            # Only the last one to begin is looked at: if it has ended, one around it that is still open is not found.
            at = np.searchsorted(start_ns[theirs], start_ns[rows[inner]], side="right") - 1
            outer = theirs[np.maximum(at, 0)] if len(theirs) else np.zeros(len(inner), dtype=np.int64)
            good = (at >= 0) & (start_ns[rows[inner]] < start_ns[outer] + self.events.duration_ns[outer])
            found[inner[good]] = outer[good]
        return found

    def _enter_messages(
        self,
        columns: dict[str, NDArray[np.int64]],
        messages: NDArray[np.int64],
        sent: NDArray[np.bool_],
        launch: NDArray[np.int64],
    ) -> None:
        """Put what the send/receive kernels carry into the table of groups, and its number into their column."""
        events = self.events
        kernels = np.flatnonzero(self.on_device[events.label] & np.isin(columns["kind"], MOVING[1:]))
        starts = np.array([bool(LAUNCHING.match(name)) for _, name in events.labels], dtype=bool)
        launches = np.flatnonzero(starts[events.label] & ~self.on_device[events.label])
        begins = [Begins(rows, self.lane[rows], events.start_ns[rows]) for rows in (messages, launches)]
        carried = messages_of(kernels, launch[kernels], *begins)
        # A kernel may carry several messages: it gets the sum of their bytes and, as its group, an entry that lists
        # them. Where the messages are not known, the kernel itself counts as the only one.
        for kernel in kernels.tolist():
            rows = carried.get(kernel, [kernel])
            ends = [(int(columns["group"][row]), int(columns["peer"][row]), bool(sent[row])) for row in rows]
            columns["bytes"][kernel] = columns["bytes"][rows].sum()
            columns["kind"][kernel] = KIND["SEND"] if sent[rows].all() else KIND["RECV"]
            if all(peer >= 0 for _, peer, _ in ends):
                entry = message_entry(ends)
                columns["group"][kernel] = group_id(entry["name"])
                self.groups.setdefault(group_id(entry["name"]), entry)
        columns["seq"][kernels] = columns["peer"][kernels] = -1

    def _fill_collective(self, columns: dict[str, NDArray[np.int64]], row: int, arguments: Arguments) -> None:
        """Write one row's collective arguments into the columns, and its group into the table."""
        said = KIND[kind_said(str(arguments.collective))]
        columns["said"][row] = said
        columns["group"][row] = self._group(arguments)
        columns["seq"][row] = _whole(arguments.group_seq, -1)
        columns["peer"][row] = _whole(arguments.target_rank if said == KIND["SEND"] else arguments.source_rank, -1)
        elements = max(_whole(arguments.elements_in, 0), _whole(arguments.elements_out, 0))
        columns["bytes"][row] = elements * dtype_bytes(arguments.dtype)

    def _group(self, arguments: Arguments) -> int:
        """Return the id of the group that the arguments name, and enter it into the table."""
        given = arguments.group_name if arguments.group_name not in (None, "") else arguments.group_number
        if isinstance(given, (list, dict)):
            given = None
        known = self.groups.get(group_id(str(given))) if given is not None else None
        if known is not None and known["ranks"] and known.get("description"):
            return group_id(str(given))
        size = _whole(arguments.group_size, 0) if _whole(arguments.rank_stride, 0) > 0 else 0
        ranks = parse_ranks(
            arguments.group_ranks,
            start=_whole(arguments.rank_start, 0),
            stride=_whole(arguments.rank_stride, 0),
            size=size if 0 < size <= self.ranks_left else 0,
        )
        self.ranks_left -= len(ranks)
        name = str(given) if given is not None else f"ranks {ranks}" if ranks else ""
        number = group_id(name)
        if number >= 0:
            entry = self.groups.setdefault(number, {"name": name, "ranks": ranks})
            if not entry["ranks"]:
                entry["ranks"] = ranks
            if arguments.group_text:
                entry.setdefault("description", str(arguments.group_text))
        return number

    def _inherit(
        self,
        columns: dict[str, NDArray[np.int64]],
        rows: NDArray[np.int64],
        sources: NDArray[np.int64],
        launch: NDArray[np.int64],
    ) -> None:
        """Give rows without collective arguments those of the op around their launch (or around themselves)."""
        source = self._around(np.where(launch[rows] >= 0, launch[rows], rows), sources)
        known, alone = rows[source >= 0], rows[(source < 0) & (launch[rows] < 0)]
        for column in ("group", "seq", "peer", "bytes"):
            columns[column][known] = columns[column][source[source >= 0]]
        said = columns["said"][source[source >= 0]]
        columns["said"][known] = np.where(said == KIND["MARK"], columns["said"][known], said)
        columns["seq"][alone] = -1  # An autograd number is no collective's number.

    def origin(self) -> ProfiledProcess:
        """Return which process the file says that it is of: its rows on the host carry the number."""
        is_given = self.facts.get("rank") is not None and _whole(self.facts.get("world_size"), 0) != 1
        count: dict[int, int] = {}
        used = np.bincount(self.events.lane, minlength=len(self.events.lanes)).tolist()
        for (category, pid, _), rows in zip(self.events.lanes, used, strict=True):
            known = CATEGORIES.get(category)
            if type(pid) is int and pid > 0 and known is not None and known.place != DEVICE:
                count[pid] = count.get(pid, 0) + rows
        process = max(count, key=lambda pid: count[pid], default=None)
        return ProfiledProcess(self.rank if is_given else None, str(self.events.facts.host or ""), process)

    def rank_facts(self) -> dict[str, object]:
        """Return what is known of the rank: host, device, process id."""
        listed = self.events.facts.devices
        names = {entry.get("id"): str(entry.get("name")) for entry in listed or [] if isinstance(entry, dict)}
        codes = self.events.lanes
        on = sorted({pid for category, pid, _ in codes if category == "kernel" and isinstance(pid, int)})
        facts = {"host": str(self.events.facts.host or ""), "device": names.get(on[0], "") if on else ""}
        return {key: value for key, value in facts.items() if value} | ({"device_index": on[0]} if on else {})

    def meta(self, kind: NDArray[np.uint8]) -> dict[str, object]:
        """Return the facts of the trace, its coverage among them."""
        device = self.rank_facts().get("device")
        facts = {
            "source": "kineto" if any(self.category) else "chrome",
            "world_size": self.facts.get("world_size"),
            "backend": self.facts.get("backend"),
            "device_type": device or ("cpu" if not self.on_device.any() else None),
        }
        return {key: value for key, value in facts.items() if value is not None} | {"coverage": self._coverage()}

    def _coverage(self) -> dict[str, Any]:
        """Return the share of spans whose category is known, and of the wall that the leaves cover on each device."""
        events = self.events
        known = np.array([entry is not None for entry in self.category], dtype=bool)
        working = np.array([entry is not None and entry.works for entry in self.category], dtype=bool)[events.label]
        everything = np.flatnonzero(known[events.label])
        start_ns, end_ns = events.start_ns[everything], (events.start_ns + events.duration_ns)[everything]
        wall_ns = int(end_ns.max() - start_ns.min()) if len(everything) else 0
        device = self.on_device[events.label]
        owner = np.array([pid if isinstance(pid, int) else -1 for _, pid, _ in events.lanes], dtype=np.int64)
        by_device: dict[str, float] = {}
        leaf = self.nest.leaf & working
        for label, rows in [("host", np.flatnonzero(leaf & ~device & (self.lane == 0)))] + [
            (f"device {pid}", np.flatnonzero(leaf & device & (owner[events.lane] == pid)))
            for pid in np.unique(owner[events.lane[device & working]]).tolist()
        ]:
            covered_ns = union_ns(events.start_ns[rows], events.duration_ns[rows])
            by_device[label] = covered_ns / wall_ns if wall_ns else 0.0
        mapped = float(known[events.label].mean()) if self.n else 1.0
        return {"mapped": mapped, "dropped": events.dropped, "wall_ns": wall_ns, "by_device": by_device}


def _whole(value: Any, blank: int) -> int:
    """Return one argument as an int64, else `blank`."""
    return int(json_events.whole_numbers([value], blank)[0])


def _input_bytes(arguments: Arguments) -> int:
    """Return the size of an annotation's inputs when shapes were recorded (gloo), 0 otherwise."""
    dims, types = plain(arguments.input_dims), plain(arguments.input_types)
    if not isinstance(dims, list) or not isinstance(types, list):
        return 0
    total = 0
    for shape, name in zip(dims, types, strict=False):
        if isinstance(shape, list) and shape and all(isinstance(size, int) for size in shape):
            total += int(np.prod(shape, dtype=np.int64)) * dtype_bytes(name)
    return total
