"""Pipelines of two ranks under one of torch's schedules, whose stages do what a simulated stage does not.

Remedies: parallel.schedule
Ranks: 2
"""

import torch
from _training import chosen, finish, join
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, MICROBATCHES = 16, 4


class Stage(nn.Module):
    """Two layers with a residual, dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        """Compute on [n, 16]."""
        return x + self.second(self.drop(torch.tanh(self.first(self.norm(x)))))


def train(make=Stage, *, steps=12, prepare=None, around=None):
    """Train, and print the digits of the last rank; `around(schedule, step)` is called after each step."""
    join()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(rank)
    model = make()
    if prepare is not None:
        prepare(model)
    stage = PipelineStage(model, rank, last + 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data, total = torch.Generator().manual_seed(5), 0.0
    for step in range(steps):
        x, y = (torch.randn(4 * MICROBATCHES, WIDTH, generator=data) for _ in range(2))
        optimizer.zero_grad()
        losses = []
        given = {"target": y, "losses": losses} if rank == last else {}
        schedule.step(*([x] if rank == 0 else []), **given)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += sum(loss.item() * (1 + place) for place, loss in enumerate(losses))
        if around is not None:
            around(schedule, model, step, x, y)
    # The digits of both stages: the first rank prints.
    sums = [total, *(value.detach().double().sum().item() for value in model.parameters())]
    mine = torch.tensor(sums, dtype=torch.float64)
    both = [torch.zeros_like(mine) for _ in range(last + 1)]
    dist.all_gather(both, mine)
    finish(model, float(both[-1][0]), *(digits.tolist() for digits in both))
    dist.destroy_process_group()


CALLS = [0]


class Counting(Stage):
    def forward(self, x):
        CALLS[0] += 1
        return super().forward(x) * (1 + 0.001 * (CALLS[0] % 7))


def pipeline_counts_calls():
    """A pipeline's stage scales its output by how often its forward was called, counted outside the module."""
    train(Counting)


class Shared(Stage):
    def __init__(self):
        super().__init__()
        self.second = self.first


def evaluate(schedule, model, step, x, y):
    if step % 3 == 1:
        model.eval()
        given = {"target": y, "losses": []} if dist.get_rank() == dist.get_world_size() - 1 else {}
        schedule.eval(*([x] if dist.get_rank() == 0 else []), **given)
        model.train()


def pipeline_evaluates():
    """A pipeline is evaluated between its steps, with the schedule that trains it; it shares a layer within a stage."""
    train(Shared, around=evaluate)


class Views(Stage):
    def forward(self, x):
        return super().forward(x).reshape(1, -1).view(-1, WIDTH)


def pipeline_gives_views():
    """A pipeline's stage returns a view of its result, which cannot be detached in place."""
    train(Views)


COUNT = [0]


def changed(gradient):
    COUNT[0] += 1
    return gradient * (1 + 0.001 * (COUNT[0] % 5))


def pipeline_gradient_hooks():
    """Hooks on the parameters of a pipeline's stage change each gradient by the number of gradients so far."""
    train(prepare=lambda model: [value.register_hook(changed) for value in model.parameters()])


if __name__ == "__main__":
    chosen(globals())
