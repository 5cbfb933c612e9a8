"""Run a function on several ranks, quickly and often: ranks are forked from a process that has torch imported.

Use it in tests and benchmarks. One fork server per Python process imports
torch and what DDP needs once (about two seconds); each call after that forks
its ranks in milliseconds. The ranks meet over gloo on loopback, through a
file, so no port is chosen. The function must be importable in the ranks.

>>> DEFAULT_TIMEOUT_S
60.0
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, cast

from headway.core.errors import HeadwayError

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
"""What the fork server imports. DDP's constructor imports torch._dynamo: without it every launch costs seconds."""

DEFAULT_TIMEOUT_S = 60.0


class RankFailedError(HeadwayError):
    """A rank of the pool failed; the message holds the tracebacks of all that did, the first to fail first."""


class RankPool:
    """Runs functions on ranks forked from one warm process."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        group: bool = True,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call `function(*args)` on ranks 0..world_size-1 and return their results in order.

        With `group` a gloo process group exists while it runs; RANK,
        LOCAL_RANK and WORLD_SIZE are set, and `env` on top. Raises
        `RankFailedError` when a rank raises, dies or exceeds `timeout_s`.
        """
        with tempfile.TemporaryDirectory(prefix="headway-pool-") as folder:
            meeting = str(Path(folder) / "store") if group else None
            ranks = [self._start(function, args, rank, world_size, meeting, env or {}) for rank in range(world_size)]
            try:
                return _collect(ranks, timeout_s)
            finally:
                for process, receiver in ranks:
                    if process.is_alive():
                        process.kill()
                    process.join()
                    process.close()
                    receiver.close()

    def _start(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        rank: int,
        world_size: int,
        meeting: str | None,
        env: dict[str, str],
    ) -> tuple[Any, Connection]:
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_rank_main, args=(sender, function, args, rank, world_size, meeting, env), daemon=False
        )
        process.start()
        sender.close()
        return process, receiver


def _rank_main(
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    meeting: str | None,
    env: dict[str, str],
) -> None:
    """Run in the rank: join the group, call, send the result or the traceback, leave without teardown."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), **env})
    try:
        if meeting is not None:
            import torch.distributed as dist

            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
        answer: tuple[bool, Any] = (True, function(*args))
        if meeting is not None:
            dist.barrier()  # a rank that leaves early would cut its peers' connections
    except BaseException:
        answer = (False, traceback.format_exc())
    try:
        sender.send(answer)
    except Exception:
        sender.send((False, traceback.format_exc()))
    sender.close()
    os._exit(0)  # gloo's threads may abort an orderly exit once a peer is gone


def _collect(ranks: Sequence[tuple[Any, Connection]], timeout_s: float) -> list[Any]:
    """Return every rank's result; after the first failure the others get a moment, for their tracebacks."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    pending = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    deadline = time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending), max(deadline - time.monotonic(), 0))
        if not ready:
            late = ", ".join(str(rank) for rank in sorted(pending.values()))
            if not failures:
                failures.append(f"ranks {late} did not finish within {timeout_s:g} s")
            break
        for receiver in ready:
            rank = pending.pop(cast(Connection, receiver))  # wait() returns what it was given
            try:
                done, value = cast(Connection, receiver).recv()
            except EOFError:
                process = ranks[rank][0]
                process.join(5)
                done, value = False, f"the process ended with exit code {process.exitcode} and no answer"
            if done:
                results[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
                deadline = min(deadline, time.monotonic() + 1.0)
    if failures:
        raise RankFailedError("\n".join(failures) + "\nRun the function in one process to debug it.")
    return [results[rank] for rank in range(len(ranks))]
