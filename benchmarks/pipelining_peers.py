"""The interpreter of pipelines against its simulation, and against torch's Schedule1F1B and ScheduleInterleaved1F1B.

Claim: with stages that sleep 40 ms (forward, gradient of the input, of the weights), a measured step is 0.97 to 1.08 of
the simulated one under every schedule, schedules that differ by more than 5 % in simulation have that order when
measured, and a step takes at most 1.02 of what torch's schedule takes, with the same losses bit for bit. Four gloo
ranks (two for interleaved schedules), rounds interleaved, medians. Without --full one round.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "jobs")]

from headway.parallel import SCHEDULES, StageGraph, lower  # noqa: E402 - after the path is set
from headway.sim.pipeline.orders import PipelineShape  # noqa: E402 - as above
from headway.sim.pipeline.simulate import StageCosts, simulate, steady_shapes  # noqa: E402 - as above
from tests.made.pool import RankPool  # noqa: E402 - as above

PART_S, M, STEPS = 0.04, 8, 2
DIAMOND = StageGraph(((), (0,), (0,), (1, 2)))
ON_FOUR = ("gpipe", "1f1b", "zero_bubble", "graph", "async_1f1b", "two_buffer")
ON_TWO = ("interleaved", "v")
TORCH = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


def shape_of(name: str, ranks: int) -> PipelineShape:
    """Return the shape of a schedule here."""
    return PipelineShape(ranks, M, 2 if name in ON_TWO else 1, graph=DIAMOND if name == "graph" else None)


def simulated_s(name: str, ranks: int) -> float:
    """Return the simulated step of a schedule."""
    order, shape = SCHEDULES["graph_1f1b" if name == "graph" else name], shape_of(name, ranks)
    part_ns = np.full(shape.num_stages, round(PART_S * 1e9), np.int64)
    inputs, weights = part_ns.copy(), part_ns.copy()
    inputs[0], weights[0] = 0, 2 * weights[0]  # the first stage makes no gradient of its input
    costs = StageCosts(part_ns, inputs, weights)
    shapes = steady_shapes(order, shape)
    ends = [simulate(lower(order(one), one.graph), costs).makespan_ns for one in shapes]
    return (ends[1] - ends[0] if shapes[0] != shapes[1] else ends[1]) / 1e9


def ways(names: tuple[str, ...]) -> tuple[dict[str, Callable[[], list[float]]], dict[str, Any]]:
    """Return what trains a step of each schedule on this rank, ours and torch's; each returns the losses here."""
    import torch
    import torch.distributed as dist
    from pipeline_stages import WIDTH, Stage
    from torch.distributed import pipelining

    import headway.parallel

    class Join(Stage):
        """The last stage of the diamond."""

        def forward(self, *parts: torch.Tensor) -> torch.Tensor:
            """Compute on the sum."""
            return super().forward(sum(parts[1:], parts[0]))

    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = world_size * (2 if names == ON_TWO else 1)
    data = torch.Generator().manual_seed(7)
    x, y = (torch.randn(2 * M, WIDTH, generator=data) for _ in range(2))

    def stages() -> list[torch.nn.Module]:
        torch.manual_seed(0)
        first = Stage(PART_S, 0.0, 2 * PART_S)
        return [first, *((Join if at == count - 1 else Stage)(PART_S, PART_S, PART_S) for at in range(1, count))]

    made: dict[str, Callable[[], list[float]]] = {}
    runners = {}
    for name in names:
        model = list(zip(stages(), DIAMOND.preds, strict=True)) if name == "graph" else torch.nn.Sequential(*stages())
        runner = runners[name] = headway.parallel.pipeline(
            model, x[:2], loss=torch.nn.functional.mse_loss, num_microbatches=M, schedule=name, timeout_s=60,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), interleave=count // world_size,
        )  # fmt: skip
        made[name] = lambda runner=runner: [loss.item() for loss in runner.step(x, y).values()]
    for name, kind in TORCH.items():
        if name in names:
            own = [stage for stage in range(count) if stage % world_size == rank]
            parts = [pipelining.PipelineStage(stages()[at], at, count, torch.device("cpu")) for at in own]
            schedule = getattr(pipelining, kind)(parts if name in ON_TWO else parts[0], M, loss_fn=torch.nn.MSELoss())

            def torchs(schedule: Any = schedule, parts: Any = parts) -> list[float]:
                losses: list[torch.Tensor] = []
                inputs = (x,) if rank == 0 else ()
                more = {"target": y, "losses": losses} if rank == world_size - 1 else {}
                schedule.step(*inputs, **more)
                for part in parts:
                    part.submod.zero_grad()
                return [loss.item() for loss in losses]

            made[f"torch {name}"] = torchs
    return made, runners


def measured(names: tuple[str, ...], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds of a step in each round, the slowest rank's, and the losses of this rank."""
    import torch
    import torch.distributed as dist

    made, runners = ways(names)
    losses = {name: call() for name, call in made.items()}
    for runner in runners.values():
        runner.flush()
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, call in made.items():
            is_stream = name in ("async_1f1b", "two_buffer")
            dist.barrier()
            for _ in range(2 if is_stream else 0):
                call()  # the pipeline fills; a barrier behind it would drain it
            begin = time.perf_counter()
            for _ in range(STEPS):
                call()
            took = torch.tensor((time.perf_counter() - begin) / STEPS)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(took.item())
            if is_stream:
                runners[name].flush()
    return seconds, losses


def main() -> int:
    """Measure and print one JSON line."""
    rounds = 3 if "--full" in sys.argv else 1
    pool, seconds, simulated = RankPool(), {}, {}
    for names, ranks in ((ON_FOUR, 4), (ON_TWO, 2)):
        answers = pool.run(measured, ranks, names, rounds, timeout_s=280)
        seconds |= answers[0][0]
        simulated |= {name: simulated_s(name, ranks) for name in names}
        for name in TORCH.keys() & set(names):
            ours, theirs = ([loss for _, losses in answers for loss in losses[key]] for key in (name, f"torch {name}"))
            assert ours == theirs, f"losses of {name} differ from torch's"
            assert len(ours) == M
    middle = {name: float(np.median(values)) for name, values in seconds.items()}
    ratios = {name: middle[name] / simulated[name] for name in simulated}
    against = {
        name: [ours / theirs for ours, theirs in zip(seconds[name], seconds[f"torch {name}"], strict=True)]
        for name in TORCH
    }
    swapped = [
        (a, b)
        for names in (ON_FOUR, ON_TWO)
        for a in names
        for b in names
        if simulated[a] > 1.05 * simulated[b] and middle[a] < middle[b]
    ]
    met = all(0.97 <= ratio <= 1.08 for ratio in ratios.values()) and not swapped
    met = met and all(float(np.median(values)) <= 1.02 for values in against.values())
    print(json.dumps({
        "bench": "pipelining_peers", "measured_s": {name: round(value, 3) for name, value in middle.items()},
        "measured_over_simulated": {name: round(value, 4) for name, value in ratios.items()}, "swapped": swapped,
        "over_torch": {name: round(float(np.median(values)), 4) for name, values in against.items()},
        "over_torch_range": {name: [round(min(v), 4), round(max(v), 4)] for name, v in against.items()},
        "peer": "torch 2.13 Schedule1F1B, ScheduleInterleaved1F1B", "met": met,
        "claim": "0.97 to 1.08 of simulated, <= 1.02 of torch",
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
