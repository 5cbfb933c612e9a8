"""A training loop whose kernels take a known time (`torch.cuda._sleep`), and what is true of it by the profiler.

It runs on a CUDA device by itself, and on the emulated one under benchmarks._pretend_device, which writes the device's
work in the profiler's place.
"""

import argparse
import fcntl
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.jobs.device_loop import Examples, timed
from headway.runtime.in_rank.device_checks import cycles_per_ms


class Wide(Examples):
    """Examples whose copy to a device takes a while."""

    width = 8

    def __getitem__(self, index):
        return super().__getitem__(index).repeat(self.width // 8)


class Sleeps(torch.autograd.Function):
    """Kernels of a forward and of its backward."""

    @staticmethod
    def forward(context, x, forward, backward):
        """Launch those of forward."""
        context.backward = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        """Launch those of backward."""
        context.backward()
        return gradient, None, None


class Model(torch.nn.Linear):
    """A layer with kernels of a known length."""

    parts = ()

    def forward(self, x):
        """Compute, and launch them."""
        return Sleeps.apply(super().forward(x), *self.parts)


def counted(costs):
    """Have CUDA's events count their calls in `costs`, and their CPU time on this thread: a record may rightly wait."""

    def counting(name):
        original = getattr(torch.cuda.Event, name)

        def call(self, *args):
            start = time.thread_time_ns()
            try:
                return original(self, *args)
            finally:
                costs["cpu_ns"] += time.thread_time_ns() - start
                costs[name] += 1

        return call

    names = ("record", "query", "elapsed_time")
    costs.update(dict.fromkeys((*names, "cpu_ns"), 0))
    for name in names:
        setattr(torch.cuda.Event, name, counting(name))


def kernels(profile, ahead_ns):
    """Return start and end of each kernel, ns of the host's clock, which is `ahead_ns` behind the profiler's."""
    found = [event for event in profile.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    return [
        (event.start_ns() - ahead_ns, event.start_ns() - ahead_ns + event.duration_ns())
        for event in found if not (event.is_user_annotation() or event.name().startswith(("Memcpy", "Memset")))
    ]  # fmt: skip


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    for name in ("load", "host", "device"):
        parser.add_argument(f"--{name}-ms", type=float, default=0.0)
    parser.add_argument("--read-every", type=int, default=0)
    parser.add_argument("--launches", type=int, default=16, help="kernels of each of the three parts of a step")
    parser.add_argument("--width", type=int, default=8, help="numbers of an example")
    parser.add_argument("--cost", type=Path, help="write what headway's events cost to this path")
    parser.add_argument("--truth", type=Path, help="write what the loop and the device did to this path")
    parser.add_argument("--profile", action="store_true", help="have the profiler see the device's work")
    parser.add_argument("--turn", type=Path, help="train while no other job has locked this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    costs, copies, loads = {}, [], []
    if options.cost:
        counted(costs)
    data = Wide(4 * options.steps, options.load_ms / 4e3)
    data.width = options.width
    model = Model(8, 8).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    turn = options.turn.open("a") if options.turn else None
    if turn is not None:
        fcntl.flock(turn, fcntl.LOCK_EX)  # until the loop is done
    rate = cycles_per_ms()

    def part(share):
        cycles = int(share * options.device_ms * rate / options.launches)

        def launch(*_):
            for _ in range(options.launches):
                torch.cuda._sleep(cycles)

        return launch

    model.parts = part(0.3), part(0.6)
    optimizer.register_step_pre_hook(part(0.1))
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if options.profile else None
    with profile or nullcontext():
        for step, batch in enumerate(timed(DataLoader(data, 4), loads, None, False)):
            start = time.perf_counter_ns()
            x = batch.to("cuda")
            copies.append((start, time.perf_counter_ns()))
            loss = model(x[:, :8]).square().mean()
            time.sleep(options.host_ms / 1e3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if options.read_every and step % options.read_every == 0:
                loss.item()
        torch.cuda.synchronize()
    if turn is not None:
        turn.close()
    truth = {"loads": loads, "copies": copies}
    if profile is not None:
        truth["work"] = kernels(profile, time.time_ns() - time.perf_counter_ns())
    if options.truth:
        options.truth.write_text(json.dumps(truth))
    if options.cost:
        options.cost.write_text(json.dumps({name: value / options.steps for name, value in costs.items()}))


if __name__ == "__main__":
    main()
