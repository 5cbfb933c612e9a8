"""A rank of a pipeline in torch's runtime, run by tests on gloo ranks."""

from __future__ import annotations

from pathlib import Path


def losses_and_gradients(folder: str, text: str) -> tuple[list[float], list[float]]:
    """Run one step of Schedule1F1B, or of torch's runtime under the order `text`; return losses and gradients."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank = dist.get_rank()
    torch.manual_seed(rank)
    world_size = dist.get_world_size()
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())
    stage = PipelineStage(model, rank, world_size, torch.device("cpu"))
    loss = nn.MSELoss()
    if text:
        schedule = _PipelineScheduleRuntime([stage], 8, loss_fn=loss)
        path = Path(folder) / f"orders-{rank}.csv"
        path.write_text(text)
        schedule._load_csv(str(path), format="compute_only")
    else:
        schedule = Schedule1F1B(stage, 8, loss_fn=loss)
    torch.manual_seed(7)
    x, y = torch.randn(16, 6), torch.randn(16, 6)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [loss.item() for loss in losses], torch.cat(gradients).tolist()
