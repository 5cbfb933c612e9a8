"""The devices that a job computes on: the only module here that names a backend of torch.

A `Device` is made when a tensor on it is first seen, and nothing is asked before: asking torch how many devices there
are initialises the driver, which spoils forks and fixes what CUDA_VISIBLE_DEVICES says. What a kind of device lacks
(events, capture, a name) is absent here, and no error.

>>> device_of("no tensor") is None
True

Where a device's clock stands on the host's, how late its events pass, and how far its host is ahead.

No event passes before it was recorded, nor after it was seen to have passed: that bounds the clock. A device that is
idle when an event is recorded passes it at once, which makes the bound sharp.

>>> clock = Clock()
>>> clock.bound([0, 900], [5_000, 5_300], seen_ns=6_400)
5000
>>> clock.slack_ns
500
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PRETEND = "HEADWAY_PRETEND"
"""Variable whose value 'device' has a host without devices taken for one that has some, for tests."""


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """What is known of one kind of device."""

    files: tuple[str, ...]
    """The host has such a device where one of these exists."""

    activity: str = ""
    """`torch.profiler.ProfilerActivity` that shows its kernels; '' = none does."""


OTHER = DeviceBackend((), "PrivateUse1")
"""A kind that is not listed."""

BACKENDS: dict[str, DeviceBackend] = {
    # ROCm calls itself 'cuda' as well. WSL 2 has /dev/dxg, Jetson /dev/nvhost-gpu.
    "cuda": DeviceBackend(
        ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu"),
        "CUDA",
    ),
    "xpu": DeviceBackend(("/dev/dri/renderD128",), "XPU"),
    "hpu": DeviceBackend(("/dev/accel/accel0",), "HPU"),
    "npu": DeviceBackend(("/dev/davinci0", "/dev/davinci_manager"), "PrivateUse1"),
    "mtia": DeviceBackend((), "MTIA"),
    "mps": DeviceBackend(()),
}
"""`torch.device.type` -> what is known of it."""

_MODULES = {kind: f"torch.{kind}" for kind in BACKENDS}
"""`torch.device.type` -> name of torch's module of it, also of one that a plug-in brings."""

ON_HOST = frozenset({"cpu", "meta"})
"""Values of `torch.device.type` that are no device."""


class Device:
    """One device, by `torch.accelerator`. An event is recorded in the stream that is current on this device.

    Events are reused: what was resolved goes back by `release`.
    """

    def __init__(self, kind: str, index: int) -> None:
        self.kind, self.index = kind, index
        torch = sys.modules["torch"]
        self._place = torch.device(kind, index)
        self._accelerator = getattr(torch, "accelerator", None)
        self._own = _own_events(kind)
        self._free: list[Any] = []

    def __repr__(self) -> str:
        return f"{self.kind}:{self.index}"

    def record(self, stream: Any = None) -> Any:
        """Record an event now and return it, in `stream` (`stream()` by default).

        Raises what torch raises where the device has no events that can be timed.
        """
        if self._free:
            event = self._free.pop()
        elif self._own is not None:
            event = self._own(enable_timing=True)
        else:
            event = sys.modules["torch"].Event(self._place, enable_timing=True)
        event.record(self.stream() if stream is None else stream)
        return event

    def release(self, event: Any) -> None:
        """Take an event back, of which nothing is asked any more."""
        self._free.append(event)

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: what is recorded now would become part of it."""
        capturing = getattr(self.stream(), "is_capturing", None)  # torch 2.13
        if capturing is None:
            capturing = getattr(module_of(self.kind), "is_current_stream_capturing", None)
        return bool(capturing()) if capturing is not None else False

    @property
    def name(self) -> str:
        """What the device calls itself; its kind where it has no name."""
        named = getattr(module_of(self.kind), "get_device_name", None)
        return str(named(self.index)) if named is not None else self.kind

    def memory(self) -> dict[str, int]:
        """Return the most that this process has reserved on it, that tensors took, and its size; {} where not known."""
        module = module_of(self.kind)
        try:
            return {
                "device_peak_bytes": int(module.max_memory_reserved(self.index)),
                "device_allocated_bytes": int(module.max_memory_allocated(self.index)),
                "device_total_bytes": int(module.get_device_properties(self.index).total_memory),
            }
        except (AttributeError, RuntimeError, AssertionError):  # the last one: a build or a host without a driver
            return {}

    def free_memory(self) -> tuple[int, int] | None:
        """Return (free, all) bytes as the driver counts them: of all processes, caches of torch as taken; or None."""
        try:
            free, total = module_of(self.kind).mem_get_info(self.index)
        except (AttributeError, RuntimeError, AssertionError):
            return None
        return int(free), int(total)

    @contextmanager
    def private_pool(self) -> Iterator[Any]:
        """Have what this thread allocates in the block come from a pool of memory of its own, which is yielded.

        Once all of it is freed and nobody refers to the pool, its memory goes back to the driver. None is yielded, and
        allocated as ever, where this kind of device has no pools.
        """
        module = module_of(self.kind)
        make, use = getattr(module, "MemPool", None), getattr(module, "use_mem_pool", None)
        if make is None or use is None:
            yield None
            return
        pool = make()
        with use(pool, self._place):
            yield pool

    def stream(self) -> Any:
        """Return the stream of the device that is current in this thread."""
        if self._own is not None or self._accelerator is None:
            return module_of(self.kind).current_stream(self.index)
        return self._accelerator.current_stream(self._place)


def _own_events(kind: str) -> Any:
    """Return CUDA's own class of events, None for other kinds and where torch was built without it.

    A launch waits while the queue of launches is full, and so does the record of an event. `torch.cuda.Event.record`
    lets go of the interpreter's lock meanwhile, `torch.Event.record` keeps it (torch/csrc/cuda/Event.cpp and
    torch/csrc/Event.cpp): with the latter all threads of the process would stand still, those that pin batches and
    those that answer for NCCL among them.
    """
    event = getattr(module_of(kind), "Event", None) if kind == "cuda" else None
    try:
        if event is not None:
            event(enable_timing=True)  # the driver makes it when it is first recorded
    except (RuntimeError, AssertionError):  # what stands for it in a build without CUDA
        return None
    return event


_SEEN: dict[tuple[str, int], Device] = {}
"""(kind, index) -> a device of which a tensor was seen."""

_forked = False
"""Whether this process is a fork of one that used a device: a driver does not survive that, and torch raises."""


def _forget() -> None:
    """In a forked child: forget the parent's devices, so that nothing here asks them for anything."""
    global _forked
    _forked = _forked or bool(_SEEN)
    _SEEN.clear()


os.register_at_fork(after_in_child=_forget)

_EMULATED: list[Callable[[Any], Device | None]] = []
"""What stands in for `device_of` where devices are emulated, see `emulate`."""


def device_of(tensor: Any) -> Device | None:
    """Return the device that holds a tensor; None for one in the host's memory, and for what is no tensor.

    None too in a forked child of a process that used a device.
    """
    if _forked:
        return None
    if _EMULATED:
        return _EMULATED[-1](tensor)
    place = getattr(tensor, "device", None)
    kind = getattr(place, "type", "cpu")
    if kind in ON_HOST:
        return None
    key = kind, place.index or 0  # type: ignore[union-attr]  # only a torch.device has such a type
    device = _SEEN.get(key)
    if device is None:
        device = _SEEN[key] = Device(*key)
    return device


def on_one_side(source: Any, target: Any) -> bool:
    """Whether both tensors are in the host's memory, or both on devices: a tenth of the time of `device_of` for two."""
    return not _EMULATED and getattr(source, "is_cpu", None) is getattr(target, "is_cpu", None)


def seen() -> list[Device]:
    """Return the devices of which a tensor was seen in this process, the first one first."""
    return list(_SEEN.values())


def emulate(find: Callable[[Any], Device | None], devices: Mapping[tuple[str, int], Device]) -> Callable[[], None]:
    """Have `find` stand in for `device_of`, and `devices` be those seen; returns the undo. For emulated devices."""
    before = dict(_SEEN)
    _EMULATED.append(find)
    _SEEN.update(devices)

    def undo() -> None:
        _EMULATED.remove(find)
        _SEEN.clear()
        _SEEN.update(before)

    return undo


def module_of(kind: str) -> Any:
    """Return torch's module of a kind of device ('cuda' -> torch.cuda); None where torch has none, or is not there."""
    return sys.modules.get(_MODULES.get(kind) or f"torch.{kind}")


def kinds_in_use() -> list[str]:
    """Return the kinds of device that this process computes on; asking does not initialise any."""
    return list(dict.fromkeys([*(kind for kind, _ in _SEEN), *_initialised()]))


def _initialised() -> list[str]:
    """Return the kinds that torch has initialised in this process; an emulated device is none of torch's."""
    if _forked:
        return []
    found, names = [], _MODULES
    if unlisted := {kind: f"torch.{kind}" for kind, _ in _SEEN if kind not in names}:
        names = names | unlisted
    for kind, name in names.items():
        # Asked around every load that is looked at: kinds whose module nobody has imported cost one look-up.
        initialised = getattr(sys.modules.get(name), "is_initialized", None)
        if initialised is not None and initialised():
            found.append(kind)
    return found


def in_use() -> bool:
    """Whether this process uses a device: a fork of it could not, and might hang."""
    return bool(kinds_in_use())


def capturing() -> bool:
    """Whether a graph is being captured on one of the devices in use: then nothing of ours may be asked of them."""
    if any(device.is_capturing for device in _SEEN.values()):
        return True
    asked = (getattr(module_of(kind), "is_current_stream_capturing", None) for kind in _initialised())
    return any(is_capturing() for is_capturing in asked if is_capturing is not None)


class Point:
    """A point in what the devices seen were given to do, reached once they have done all before it; nobody waits."""

    def __init__(self) -> None:
        self._events = [(device, device.record()) for device in _SEEN.values()]

    def is_reached(self) -> bool:
        """Ask each device that had not got there when it was asked last."""
        left = []
        for device, event in self._events:
            if event.query():
                device.release(event)
            else:
                left.append((device, event))
        self._events = left
        return not left


def generators() -> list[Any]:
    """Return the generators of the devices that this process computes on; looking starts none.

    None while a graph is captured: a generator that the graph has registered refuses to tell its state.
    """
    if capturing():
        return []
    found = []
    for kind in _initialised():
        every = getattr(module_of(kind), "default_generators", ())
        indices = {device.index for device in _SEEN.values() if device.kind == kind}
        current = getattr(module_of(kind), "current_device", None)
        indices |= {int(current())} if current is not None else set(range(len(every)))
        found += [every[index] for index in sorted(indices) if index < len(every)]
    return found


def synchronize() -> None:
    """Wait for what the devices in use still have to do."""
    for kind in kinds_in_use():
        module_of(kind).synchronize()


def device_type() -> str:
    """Return the name of the device that this process trains on, 'cpu' while it has touched none."""
    try:
        for device in _SEEN.values():
            return device.name
        for kind in kinds_in_use():
            return str(module_of(kind).get_device_name())
    except (AttributeError, RuntimeError, AssertionError):
        pass
    return "cpu"


def device_memory() -> dict[str, int]:
    """Return `Device.memory` of the first device seen, or of the current one; {} without one in use."""
    for device in _SEEN.values():
        return device.memory()
    for kind in kinds_in_use():
        current = getattr(module_of(kind), "current_device", None)
        return Device(kind, int(current())).memory() if current is not None else {}
    return {}


def take_peak_bytes() -> int | None:
    """Return the most memory that tensors took since the last call, on the devices in use; None without one."""
    peaks = []
    for module in map(module_of, kinds_in_use()):
        if hasattr(module, "max_memory_allocated") and hasattr(module, "reset_peak_memory_stats"):
            peaks.append(int(module.max_memory_allocated()))
            module.reset_peak_memory_stats()
    return max(peaks, default=None)


def activities() -> set[str]:
    """Return the names of the profiler's activities that show kernels of the devices in use."""
    return {BACKENDS.get(kind, OTHER).activity for kind in kinds_in_use()} - {""}


def host_has_devices() -> bool:
    """Whether the kernel knows some device; asking torch would initialise it."""
    if os.environ.get(PRETEND) == "device":
        return True
    return any(os.path.exists(path) for backend in BACKENDS.values() for path in backend.files)


# Where a device's clock stands on the host's, how late its events pass, and how far its host is ahead.

DRAINED_NS = 200_000
"""An event that passed this soon after it was recorded found the device with nothing to do."""

MOST_LATE_NS = 4_000_000
"""Idle devices of some kinds pass events late, by what the run shows (`DeviceLateness`), and no more than this."""

KEPT = 64
"""Stretches by which that is judged, and by which marks are left out."""


DRIFT = 20e-6
"""Clocks may drift apart by this fraction of the time."""


class Clock:
    """The clock of one device on the host's, int64 ns."""

    def __init__(self) -> None:
        self.device_ns = 0
        """Moment of the newest event by the device, since the first one."""
        self.ahead_ns: int | None = None
        """The host's clock less the device's; None before the first event."""
        self.slack_ns = -1
        """How far apart the bounds of the newest stretch lay; -1 before the first."""

    def bound(self, passed_ns: list[int], recorded_ns: list[int], seen_ns: int) -> int:
        """Learn from events that passed at `passed_ns` by the device, [k], and were recorded at `recorded_ns`.

        The last one was seen to have passed at `seen_ns`. Returns the host's clock less the device's.
        """
        lowest = max(host - device for host, device in zip(recorded_ns, passed_ns, strict=True))
        highest = seen_ns - max(passed_ns)
        ahead = lowest
        if self.ahead_ns is not None:
            ahead = max(lowest, self.ahead_ns - round(DRIFT * (passed_ns[-1] - passed_ns[0])))
        self.ahead_ns = min(ahead, highest)
        self.slack_ns = highest - lowest
        return self.ahead_ns


class DeviceLateness:
    """How late events pass, and how far the host is ahead: by the newest `KEPT` stretches. All ns."""

    def __init__(self) -> None:
        self._at_ready, self._ahead = deque[int](maxlen=KEPT), deque[int](maxlen=KEPT // 8)
        self.fuzz_ns = 0
        """How late an idle device passes an event, where that is more than `DRAINED_NS`; else 0."""
        self.ahead_ns = 0
        """How far the host was ahead of its device at updates, at least."""

    def at_ready(self, late_ns: int) -> None:
        """Note how late the event at a batch passed, before which the device had got to the update."""
        self._at_ready.append(late_ns)
        if len(self._at_ready) >= KEPT // 4:
            usual = 5 * sorted(self._at_ready)[len(self._at_ready) * 9 // 10] // 4
            self.fuzz_ns = min(usual, MOST_LATE_NS) if usual > DRAINED_NS else 0

    def at_update(self, late_ns: int) -> None:
        """Note how late the event at an update passed."""
        self._ahead.append(late_ns)
        self.ahead_ns = min(self._ahead) if len(self._ahead) == self._ahead.maxlen else 0
