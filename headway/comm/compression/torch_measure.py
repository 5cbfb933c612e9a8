"""What codecs take on this host: `python -m headway.comm.compression.torch_measure NAME FILE`, one thread, CPU seconds.

Every codec encodes and decodes normal numbers of four sizes; a row holds the median of some rounds, in which the
codecs take turns. Beside it stand the stages of a push-pull (`headway.cost.codecs.STAGES`) per stretch of that size, by
the code that ranks run, with residuals, between two owners. CPU time, because the turns that other processes of the
host have now say little of those that they will have beside a training step. A second process does the same meanwhile:
ranks of one host encode at the same time, and share its caches and memory. What else a reduction needs is measured by
reducing between both, beside a thread that computes, and given per collective.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headway.comm.compression.torch_codecs import codec_of
from headway.comm.compression.torch_push_pull import PushPull, Unit, all_finite, cut
from headway.cost.codecs import PARTITION_NUMBERS, STAGES, wire_bytes
from headway.runtime.recorder.probes import write_json

SCHEMA = "headway.comm-bench/1"

SIZES = (4_096, 32_768, 131_072, 500_000)
"""Numbers in a stretch; the largest is what one of two owners has of a partition."""

OWNERS = 2

ROUNDS = 9
BUDGET_S = 15.0
"""No round begins after this, but the first two."""

FEWEST = "topk:0.001:bf16"
"""The codec whose collectives carry next to nothing."""

MEETING_S = 30.0
"""The two processes wait so long for each other."""

T = TypeVar("T")


def measured(names: Sequence[str], *, rounds: int = ROUNDS, budget_s: float = BUDGET_S) -> list[dict[str, object]]:
    """Return a row per codec and size: codec, numel, encode_s, decode_s, wire_bytes, and `STAGES` where it has them."""
    began = time.monotonic()
    cases = {(name, n): _CodecCase(name, n) for name in names for n in SIZES}
    times: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in cases}
    for number in range(rounds):
        if number >= 2 and time.monotonic() - began > budget_s:
            break
        for key, case in cases.items():
            found = case.timed()
            if number:  # the first round takes fresh memory
                times[key].append(found)
    return [
        {"codec": name, "numel": n, "wire_bytes": wire_bytes(name, n)}
        | {column: median(one[column] for one in found) for column in found[0]}
        for (name, n), found in times.items()
    ]


class _CodecCase:
    """A codec and a size, and what is kept between its rounds."""

    def __init__(self, name: str, n: int) -> None:
        self.codec = codec_of(name)
        self.x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        self.given = torch.cat([self.x, self.x.flip(0)])
        self.gradients = {"x": torch.empty_like(self.given)}
        self.pull = PushPull(OWNERS, 0, feedback=True, two_way=True)
        self.layout = cut([("x", OWNERS * n, self.codec)], OWNERS, 0, min_bytes=0, two_way=True)

    def timed(self) -> dict[str, float]:
        """Do everything once, and return the seconds."""
        found: dict[str, float] = {}
        found["encode_s"], packet = _timed(lambda: self.codec.encode(self.x, 0))
        found["decode_s"], _ = _timed(lambda: self.codec.decode(packet, self.x.numel(), 0))
        for units in self.layout.partitions:  # one, or none where only values travel
            self.gradients["x"].copy_(self.given)
            push_s, packets = _timed(partial(self._sent, units))
            arrived = packets[:1].expand(OWNERS, -1).contiguous()
            answer_s, answer = _timed(partial(self.pull.answer, self.layout, units, arrived))
            gathered = answer.expand(OWNERS, -1).contiguous()  # the other owner's has as many bytes
            pull_s, _ = _timed(partial(self.pull.decode, units, gathered, self.gradients))
            self.pull.end_step()
            # Of both stretches a rank sends and takes, of one it is the owner.
            found |= dict(zip(STAGES, (push_s / OWNERS, answer_s, pull_s / OWNERS), strict=True))
        return found

    def _sent(self, units: list[Unit]) -> torch.Tensor:
        return self.pull.encode(units, self.gradients, all_finite(self.gradients.values()))


class _TimedPushPull(PushPull):
    """A push-pull that knows what its stages take."""

    stages_s = 0.0

    def encode(self, *arguments: Any) -> torch.Tensor:
        """Encode, and add up the CPU seconds; `answer` and `decode` alike."""
        return self._watched(super().encode, *arguments)

    def answer(self, *arguments: Any) -> torch.Tensor:
        return self._watched(super().answer, *arguments)

    def decode(self, *arguments: Any) -> None:
        self._watched(super().decode, *arguments)

    def _watched(self, stage: Callable[..., T], *arguments: Any) -> T:
        seconds, found = _timed(lambda: stage(*arguments))
        self.stages_s += seconds
        return found


def collective_s(rank: int, store: str, count: int = 24) -> float:
    """Return the CPU seconds, of all threads, that a reduction needs for each of its collectives beside its stages.

    Two processes of this host reduce a bucket as ranks do, beside a thread that computes. Collectives alone, one after
    the other, take a fifth of that: their threads then neither sleep for long, nor find their caches filled with other
    data, nor wait for a core. `store` is a file that does not exist yet, where the processes meet.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=OWNERS, timeout=timedelta(seconds=MEETING_S)
    )
    try:
        sizes = {"first": PARTITION_NUMBERS, "second": PARTITION_NUMBERS, "small": 1_000}
        codecs = dict.fromkeys(sizes, codec_of(FEWEST)) | {"small": None}
        pull = _TimedPushPull(OWNERS, rank, feedback=True, two_way=True)
        layout = cut([(name, n, codecs[name]) for name, n in sizes.items()], OWNERS, rank, min_bytes=0, two_way=True)
        buffer = torch.randn(sum(sizes.values()))
        gradients = dict(zip(sizes, torch.split(buffer, list(sizes.values())), strict=True))
        group, seconds = dist.distributed_c10d._get_default_group(), []
        with _Training() as training:
            for _ in range(count):
                finite_s, _ = _timed(lambda: all_finite([buffer]))
                begin, pull.stages_s = time.process_time() - training.spent_s, 0.0
                pull.reduce(layout, gradients, group, buffer)
                pull.end_step()
                seconds.append(time.process_time() - training.spent_s - begin - pull.stages_s - finite_s)
            dist.barrier()
        return median(seconds[2:]) / (2 * len(layout.partitions) + 1)  # the first ones take fresh memory
    finally:
        dist.destroy_process_group()


class _Training:
    """A thread that does what a layer does, in a `with` block."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        """CPU seconds of the thread."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        x, weight = torch.randn(48, 768), torch.randn(768, 768)
        while not self._ended.is_set():
            torch.mm(x, weight)
            self.spent_s = time.thread_time()


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    begin = time.thread_time()
    answer = call()
    return max(time.thread_time() - begin, 1e-9), answer


def main() -> None:
    """Measure and write the file; with a store behind it, be the other rank until somebody ends it."""
    torch.set_num_threads(1)
    names, path = sys.argv[1].split(","), sys.argv[2]
    if len(sys.argv) > 3:
        collective_s(1, sys.argv[3])
        measured(names, rounds=10 * ROUNDS, budget_s=4 * BUDGET_S)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, "-m", "headway.comm.compression.torch_measure", sys.argv[1], path, store]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as beside:
            try:
                answer = {"collective_s": collective_s(0, store), "rows": measured(names)}
                write_json(path, {"schema": SCHEMA, **answer, "path": path})
            finally:
                beside.kill()


if __name__ == "__main__":
    main()
