"""A pipeline is evaluated between its steps, with the schedule that trains it, and shares a layer within a stage.

Remedies: parallel.schedule
Ranks: 2
"""

from _pipeline import Stage, train
from torch import distributed as dist


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


train(Shared, around=evaluate)
