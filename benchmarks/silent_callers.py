"""Silent strangers at the ports of a fleet: what do 1,000 connections that say nothing cost the job?

Claim: a pass over a TCP fleet takes < 5 % longer while 1,000 connections to the master are open that never say a word,
each opened again as soon as it is let go. Its batches are the same. Interleaved rounds; the strangers are a process of
their own, and their own CPU time is reported, since they share the cores of the job here.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.worker_kills import expected, free_port, prepared
from headway.data.bytes.packing import unpack
from headway.data.fleet.reader import FleetReader
from headway.data.fleet.splits import FleetPass
from headway.data.fleet.supervisor import FleetSettings, forked, start

CALLERS = 1000
AGAIN_S = 1.0
"""How often those that were let go come back."""
ROUNDS = 5
NUM_ITEMS = 1600
ITEM_S = 0.005


def keep_silent(port: int) -> None:
    """Hold `CALLERS` connections to a port of loopback open, and say nothing."""
    selector = selectors.DefaultSelector()
    while True:
        while len(selector.get_map()) < CALLERS:
            with contextlib.suppress(OSError):
                caller = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                selector.register(caller, selectors.EVENT_READ)
        until_s = time.monotonic() + AGAIN_S
        while (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                caller = key.fileobj
                assert isinstance(caller, socket.socket)
                with contextlib.suppress(OSError):
                    if caller.recv(100):
                        continue
                selector.unregister(caller)
                caller.close()
            time.sleep(0.02)


def one_pass(num_items: int, *, strangers: bool) -> tuple[float, float]:
    """Return how long a pass took in seconds, and the CPU seconds of the strangers."""
    port, work = free_port(), FleetPass(num_items, batch_size=4, seed=3)
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        tcp = {"host": "127.0.0.1", "port": port, "token": "a secret"}
        settings = FleetSettings(Path(folder), work.num_items, num_workers=2, least_workers=2, most_workers=2, **tcp)
        pid, fleet = start(prepared(ITEM_S), settings)
        reader = FleetReader(settings.address, work, token="a secret", patience_s=60.0)
        rows = [*unpack(next(reader).body)["rows"].tolist()]  # the fleet is up
        stranger = forked(lambda: keep_silent(port)) if strangers else 0
        begun_s, spent_s = time.monotonic(), 0.0
        for delivered in reader:
            rows += unpack(delivered.body)["rows"].tolist()
        wall_s = time.monotonic() - begun_s
        if stranger:
            os.kill(stranger, signal.SIGKILL)
            used = os.wait4(stranger, 0)[2]
            spent_s = used.ru_utime + used.ru_stime
        fleet.close()
        os.waitpid(pid, 0)
    assert rows == expected([work], 0), "the batches differ"
    return wall_s, spent_s


def main() -> int:
    """Run the rounds; print one JSON line."""
    rounds = [(one_pass(NUM_ITEMS, strangers=True), one_pass(NUM_ITEMS, strangers=False)) for _ in range(ROUNDS)]
    ratios = sorted(with_them[0] / without[0] for with_them, without in rounds)
    ratio = statistics.median(ratios)
    print(json.dumps({
        "bench": "silent_callers", "callers": CALLERS, "ratio": round(ratio, 3),
        "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "pass_s": round(statistics.median(without[0] for _, without in rounds), 2),
        "strangers_cpu_s": round(statistics.median(with_them[1] for with_them, _ in rounds), 2),
        "peer": "the same pass without them", "claim": "< 5 % more time", "met": ratio < 1.05,
    }))  # fmt: skip
    return 0 if ratio < 1.05 else 3


if __name__ == "__main__":
    sys.exit(main())
