"""Functions in other processes and threads: `on_ranks` by one warm fork server, `in_fork`, `run_threads`."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from tests.made.pool import PRELOAD, RankPool

MAX_RANKS = 4

IMPORTED = (
    *PRELOAD, "pytest", "hypothesis.extra.numpy", "torch.distributed.checkpoint", "torch.distributed.pipelining",
    "tests.ddp_made", "tests.remedy_context", "tests.runs_made", "headway.checkpoint.restores.restore",
    "headway.comm.advise", "headway.data.loader.loader", "headway.ledger.live_mfu", "headway.parallel",
    "headway.sim.pipeline.weight_versions", "headway.verbs.runs.compare",
)  # fmt: skip
"""What the fork server of a test process imports for all ranks of its tests."""

POOL = RankPool(IMPORTED)  # here and not at the first call: another may start the server, and it imports once


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run a module-level function on up to four gloo ranks, 60 s at most; returns the results by rank."""
    assert world_size <= MAX_RANKS, "tests use at most four ranks"
    return POOL.run(function, world_size, *args, **options)


def in_fork(act: Callable[[], object]) -> int:
    """Return the exit code of a fork that does `act`: 0 unless it raises or takes 20 s."""
    pid = os.fork()
    if not pid:
        code = 1
        signal.alarm(20)
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_threads(target: Callable[..., object], arguments: Iterable[tuple[Any, ...]], timeout_s: float = 60.0) -> None:
    """Call `target` in one thread for each tuple of arguments, all at once, and wait for them."""
    threads = [threading.Thread(target=target, args=args) for args in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
