"""CPU time of `headway watch` while 8 ranks train at 50 steps a second, against opening the run anew for each update.

Claim: reading the rings, booking the ledger and serving one browser take at most 1 % of one core. Peer: the account
that `headway why` makes of the same folder, once per round, which is what a page without a live account would do each
second. When the run is over both must count the same steps. CPU seconds of the whole process.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from _command import ROOT

from headway.ledger.answers.ledger import Ledger
from headway.trace.recording.runs import Run

RANKS, STEPS_PER_S, ROUNDS, ROUND_S, RUN_S = 8, 50, 4, 5.0, 45
CLAIM = 0.01


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far, all of its threads; exact, not counted in clock ticks."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Browser(threading.Thread):
    """Follows the stream of events as a page does, and remembers the newest step it was told."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        address = urlsplit(url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        self._path = f"/events?{address.query}"
        self.step, self.updates, self.bytes = 0, 0, 0

    def run(self) -> None:
        """Read until the server goes away."""
        self._connection.request("GET", self._path, headers={"Accept": "text/event-stream"})
        answer = self._connection.getresponse()
        while line := answer.readline():
            self.bytes += len(line)
            found = re.search(rb"step ([\d,]+) \\u00b7", line)
            if found:
                self.step, self.updates = int(found[1].replace(b",", b"")), self.updates + 1


def opened_anew(run: Path) -> tuple[float, int]:
    """Return the CPU seconds that an account of the whole run takes, and the steps it counts."""
    begun = time.process_time()
    ledger = Ledger.of(Run.open(run))
    return time.process_time() - begun, ledger.steps


def main() -> int:
    """Measure both sides in turn over one run; print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        writers = [sys.executable, str(ROOT / "tests" / "live_writers.py"), str(run), str(RANKS), str(STEPS_PER_S)]
        watch = [sys.executable, "-m", "headway.cli", "watch", str(run), "--json"]
        with (
            subprocess.Popen([*writers, str(RUN_S)], env=env) as job,
            subprocess.Popen(watch, env=env, stdout=subprocess.PIPE, text=True) as server,
        ):
            assert server.stdout is not None
            browser = Browser(json.loads(server.stdout.readline())["url"])
            browser.start()
            time.sleep(5)  # imports and the first page are paid once
            opened_anew(run)
            shares, ratios = [], []
            for _round in range(ROUNDS):
                before, updates, begun = cpu_s(server.pid), browser.updates, time.monotonic()
                time.sleep(ROUND_S)
                spent, elapsed = cpu_s(server.pid) - before, time.monotonic() - begun
                updates = browser.updates - updates
                shares.append(spent / elapsed)
                ratios.append(opened_anew(run)[0] / max(spent / max(updates, 1), 1e-4))
            assert job.poll() is None, "the ranks ended before the rounds did: nothing was followed at the end"
            job.wait()
            counted = opened_anew(run)[1]
            until = time.monotonic() + 10
            while browser.step != counted and time.monotonic() < until:
                time.sleep(0.1)
            server.terminate()
    assert browser.step == counted == RUN_S * STEPS_PER_S, f"the page counts {browser.step} steps, the peer {counted}"
    share = statistics.median(shares)
    ok = share <= CLAIM
    print(json.dumps({
        "bench": "live_page", "ranks": RANKS, "steps_per_s": STEPS_PER_S, "seconds": ROUNDS * ROUND_S,
        "core_fraction": round(share, 5), "core_fraction_range": [round(min(shares), 5), round(max(shares), 5)],
        "updates": browser.updates, "bytes_per_update": browser.bytes // max(browser.updates, 1),
        "ratio": round(statistics.median(ratios), 1), "ratio_range": [round(min(ratios), 1), round(max(ratios), 1)],
        "peer": "the whole run opened and booked for each update",
        "claim": "<= 0.01 of a core", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
