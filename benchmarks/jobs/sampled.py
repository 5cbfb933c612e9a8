"""Run a script plainly and say what its training thread computed: `sampled.py SCRIPT [ARGUMENT ...]`.

Samples of the thread's code, each `PERIOD_NS` of its CPU time, tell what it spins in OpenMP's code for its pool; what
it takes to make batches is read before and behind each. Prints one JSON line behind what the script prints:
`computed_s`, from the first batch on.
"""

import json
import runpy
import sys
import time
from typing import Any

from torch.utils.data import dataloader

from headway.core.machine import thread_samples
from headway.runtime.script.run_delay import POOLS

thread_samples.PERIOD_NS = 500_000


class Computed:
    """What the training thread computes between its batches, in seconds."""

    def __init__(self) -> None:
        """Know nothing yet; samples begin with the second batch, when the pool's library is loaded."""
        self.seconds, self.ended, self.samples, self.code = 0.0, 0.0, None, []

    def begin_batch(self) -> None:
        """Count what passed since the batch before."""
        if self.samples is None:
            self.samples, self.code = thread_samples.ThreadSamples(), thread_samples.code_of(POOLS)
            return
        spun = [a for a in self.samples.addresses() if any(begin <= a < end for begin, end in self.code)]
        self.seconds += time.thread_time() - self.ended - len(spun) * thread_samples.PERIOD_NS / 1e9

    def end_batch(self) -> None:
        """Begin to count."""
        if self.samples is not None:
            self.samples.addresses()
        self.ended = time.thread_time()


def main() -> None:
    """Run the script."""
    computed, original = Computed(), dataloader._BaseDataLoaderIter.__next__

    def next_batch(self: Any) -> Any:
        computed.begin_batch()
        try:
            return original(self)
        finally:
            computed.end_batch()

    dataloader._BaseDataLoaderIter.__next__ = next_batch
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    print(json.dumps({"computed_s": computed.seconds}))


if __name__ == "__main__":
    main()
