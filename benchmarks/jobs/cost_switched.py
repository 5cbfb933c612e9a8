"""What the functions around one kind of job cost the training thread, switched on and off every dozen steps of a loop.

`python cost_switched.py KIND PAIRS` prints {"kind": KIND, "plain": [CPU, ...], "recorded": [CPU, ...], "losses": 1}:
microseconds of the training thread per step in each stretch, and how many losses this loop and a plain one ended with.

Other load on a host makes a step twice as long for seconds at a time: neighbouring stretches of one loop meet the same,
two loops do not. What a recording does beside its functions (the start, threads, collections) is not in it. Both sides
go through one function more, which chooses.
"""

import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
from typing import Any

KIND, PAIRS = sys.argv[1], int(sys.argv[2])
sys.argv[1:] = []

import cost_kinds  # noqa: E402  # it reads the words behind its own name
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from headway.runtime.calls import patches, probe_comm  # noqa: E402

STRETCH, WARM, FIRST = 12, 4, 160
"""Steps of a stretch, those of it that are not counted, and steps before the first: readings in children end there."""

ON = [True]
"""Whether headway's functions stand in for torch's now."""


class Switch:
    """Counts steps, and changes sides between stretches; pairs begin with the one and the other by turns."""

    def __init__(self) -> None:
        self.order = [side for pair in range(PAIRS) for side in ((False, True) if pair % 2 else (True, False))]
        self.costs_us: dict[bool, list[float]] = {False: [], True: []}
        self.step, self.began_ns = -FIRST, 0

    def stepped(self) -> None:
        """Count a step of the loop."""
        self.step += 1
        number, place = divmod(self.step, STRETCH)
        if self.step < 0 or number > len(self.order) or (number == len(self.order) and place):
            return
        if place == 0:
            if number:
                spent_ns = time.thread_time_ns() - self.began_ns
                self.costs_us[self.order[number - 1]].append(spent_ns / (STRETCH - WARM) / 1e3)
            ON[0] = number == len(self.order) or self.order[number]
        elif place == WARM:
            self.began_ns = time.thread_time_ns()


def choosing(ours: Any, plain: Any) -> Any:
    """Return a function that calls one of two; inside a compiler it is ours, as in a recorded job."""
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if is_compiling() or ON[0] else plain(*args, **kwargs)

    function.__wrapped__ = plain
    return function


def wrapping(wrapper: Any) -> Any:
    """Return a wrapper of a patch whose replacements choose."""

    def wrapped(original: Any, probes: Any) -> Any:
        ours = wrapper(original, probes)
        if not isinstance(ours, staticmethod):
            return choosing(ours, original)
        inner = ours.__func__  # of an optimizer's step: it makes the function that is called
        hook = functools.wraps(original)(lambda func: choosing(inner(func), original(func)))
        return staticmethod(hook)

    return wrapped


def choose() -> None:
    """Have all that is patched from here on choose, hooks of DDP's parameters too."""
    for name, patch in patches.PATCHES.items():
        if patch.wrapper is not None:
            patches.PATCHES[name] = dataclasses.replace(patch, wrapper=wrapping(patch.wrapper))
    watch, register = probe_comm.watch_ddp, torch.Tensor.register_post_accumulate_grad_hook

    def watched(ddp: Any, probes: Any) -> None:
        torch.Tensor.register_post_accumulate_grad_hook = lambda tensor, hook: register(
            tensor, lambda gradient: hook(gradient) if ON[0] else None
        )
        try:
            watch(ddp, probes)
        finally:
            torch.Tensor.register_post_accumulate_grad_hook = register

    probe_comm.watch_ddp = watched


def choose_steps() -> None:
    """Have the optimizers' steps that were in use before the recording began choose."""
    pending = [torch.optim.Optimizer]
    while pending:
        pending += (subclasses := pending.pop().__subclasses__())
        for subclass in subclasses:
            step = vars(subclass).get("step")
            if hasattr(step, "headway_inner"):
                subclass.step = choosing(step, step.headway_inner)
                subclass.step.hooked = True  # the mark by which torch knows a class that is done


def main() -> None:
    """Train plainly, then with switched functions, and print what each stretch cost."""
    torch.set_num_threads(1)
    os.environ.setdefault("JOB_OUT", tempfile.mkdtemp())
    if KIND in ("ddp", "fsdp2"):
        store = f"file://{os.environ['JOB_OUT']}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    cost_kinds.STEPS = FIRST + 2 * PAIRS * STRETCH + 1
    losses, switch = set(), Switch()
    torch.manual_seed(0)
    losses.add(float(cost_kinds.KINDS[KIND](Switch())).hex())
    choose()
    ON[0] = True
    os.environ |= {"HEADWAY_RUN": tempfile.mkdtemp(dir=os.environ["JOB_OUT"]), "HEADWAY_WINDOWS": "0"}
    session = cost_kinds.bootstrap.start_here(os.environ)
    try:
        choose_steps()
        torch.manual_seed(0)
        losses.add(float(cost_kinds.KINDS[KIND](switch)).hex())
    finally:
        session.stop()
    costs = {"plain": switch.costs_us[False], "recorded": switch.costs_us[True]}
    print(json.dumps({"kind": KIND, **costs, "losses": len(losses)}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
