"""What torch's own pipeline schedules execute, found by running them on stages that only write down their calls."""

from typing import Any
from unittest.mock import MagicMock

from headway.sim.pipeline.actions import OPS, Action, B, F, Orders


def _stage(index: int, num_stages: int, group_size: int, calls: list[Action] | None = None) -> Any:
    """Return a stage without a model and without messages."""
    stage = MagicMock(stage_index=index, num_stages=num_stages, group_size=group_size, group_rank=index % group_size)
    stage.is_first, stage.is_last, stage.has_backward = index == 0, index == num_stages - 1, True
    stage.device = "cpu"
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    if calls is not None:
        stage.forward_one_chunk.side_effect = lambda j, *_, **__: calls.append(Action(F, index, j))
        stage.backward_one_chunk.side_effect = lambda j, *_, **__: calls.append(Action(B, index, j))
    return stage


def executed(schedule: str, num_ranks: int, num_microbatches: int) -> Orders:
    """Return what `ScheduleGPipe` or `Schedule1F1B` runs on each rank."""
    from torch.distributed import pipelining

    orders = []
    for rank in range(num_ranks):
        calls: list[Action] = []
        ours = getattr(pipelining, schedule)(_stage(rank, num_ranks, num_ranks, calls), num_microbatches)
        ours._initialize_stage = lambda *_: None
        ours._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
        orders.append(tuple(calls))
    return tuple(orders)


def planned(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Orders:
    """Return the computations in the order of one of torch's schedules with several stages per rank."""
    from torch.distributed import pipelining

    num_stages = num_ranks * stages_per_rank
    indices = [part * num_ranks for part in range(stages_per_rank)]
    if schedule == "ScheduleZBVZeroBubble":
        indices = [0, num_stages - 1]
    stages = [_stage(index, num_stages, num_ranks) for index in indices]
    for stage in stages:
        stage.group_rank = 0
    made = getattr(pipelining, schedule)(stages, num_microbatches)
    names = {name: op for op, name in enumerate(OPS)}
    return tuple(
        tuple(
            Action(names[str(action.computation_type.value)], action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None and str(action.computation_type.value) in "FBIW"
        )
        for rank in range(num_ranks)
    )
