"""What the functions around a plain step cost the training thread, switched on and off every dozen steps of one loop.

Claim: CPU added to a step of a plain loop is at most 60 us, in the median of neighbouring stretches. Baseline: the same
loop with torch's own functions in their place. Other load on a host makes a step twice as long for seconds at a time:
stretches of 12 steps meet the same, where the turns of job_costs do not. What a recording does beside its functions
(the start, threads, collections) is not in it. Both sides go through one function more, which chooses.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from _command import ROOT

PAIRS, STRETCH, WARM, FIRST = 300, 12, 4, 300
LIMIT_US = 60.0

sys.argv[1:] = []
sys.path.insert(0, str(ROOT / "benchmarks" / "jobs"))


class DoneError(Exception):
    """All stretches are measured."""


class Switch:
    """Functions of torch, and headway's in their place, by turns."""

    def __init__(self, targets: dict[str, tuple[Any, str]]) -> None:
        self.targets = targets
        self.sides = {False: self.now()}
        self.chosen: dict[str, list[Any]] = {}
        self.costs_us: dict[bool, list[float]] = {False: [], True: []}
        self.order = [side for pair in range(PAIRS) for side in ((False, True) if pair % 2 else (True, False))]
        self.step, self.began_ns = -FIRST, 0

    def now(self) -> dict[str, Any]:
        """Return the functions that stand there now."""
        return {name: getattr(owner, attribute) for name, (owner, attribute) in self.targets.items()}

    def join(self) -> None:
        """Choose from now on between those of before and those that stand there now."""
        self.sides[True] = self.now()
        for name, (owner, attribute) in self.targets.items():
            self.chosen[name] = [self.sides[True][name]]
            function = choosing(self.chosen[name])
            function.hooked = True  # the mark by which torch knows a class of optimizers that is done
            setattr(owner, attribute, function)

    def stepped(self) -> None:
        """Count a step of the loop."""
        self.step += 1
        number, at = divmod(max(self.step, 0), STRETCH)
        if self.step >= 0 and at == 0:
            if number:
                spent_ns = time.thread_time_ns() - self.began_ns
                self.costs_us[self.order[number - 1]].append(spent_ns / (STRETCH - WARM) / 1e3)
            if number == len(self.order):
                raise DoneError
            for name, chosen in self.chosen.items():
                chosen[0] = self.sides[self.order[number]][name]
        elif self.step >= 0 and at == WARM:
            self.began_ns = time.thread_time_ns()


def choosing(chosen: list[Any]) -> Any:
    """Return a function that calls the chosen one."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return chosen[0](*args, **kwargs)

    return function


def main() -> int:
    """Train once, print one JSON line; exits with 3 where the bar is missed."""
    import cost_kinds
    import torch
    from torch.utils.data import _utils, dataloader

    torch.set_num_threads(1)
    cost_kinds.STEPS = FIRST + (2 * PAIRS + 1) * STRETCH
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # the class gets its step
    switch = Switch({
        "model": (torch.nn.Module, "__call__"), "backward": (torch.autograd, "backward"),
        "step": (torch.optim.AdamW, "step"), "next": (dataloader._BaseDataLoaderIter, "__next__"),
        "fetch": (_utils.fetch._MapDatasetFetcher, "fetch"),
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HEADWAY_RUN": folder, "HEADWAY_WINDOWS": "0"}
        session = cost_kinds.bootstrap.start_here(os.environ)
        switch.join()
        try:
            plain: Callable[[Any], object] = cost_kinds.KINDS["plain"]
            plain(switch)
        except DoneError:
            pass
        session.stop()
    bare, ours = switch.costs_us[False], switch.costs_us[True]
    each = [b - a for a, b in zip(bare, ours, strict=True)]
    quartiles = statistics.quantiles(each, n=4)
    met = quartiles[1] <= LIMIT_US
    print(json.dumps({
        "bench": "recorded_step", "baseline": "torch's own functions, by turns in one loop", "pairs": len(each),
        "step_us": round(statistics.median(bare), 1), "added_us": round(quartiles[1], 1),
        "quartiles_us": [round(quartiles[0], 1), round(quartiles[2], 1)],
        "lowest_tenth_us": round(statistics.quantiles(ours, n=10)[0] - statistics.quantiles(bare, n=10)[0], 1),
        "claim": f"<={LIMIT_US:g} us", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
