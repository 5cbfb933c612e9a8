"""A pipeline's stage scales its output by how often its forward was called, counted outside the module.

Remedies: parallel.schedule
Ranks: 2
"""

from _pipeline import Stage, train

CALLS = [0]


class Counting(Stage):
    def forward(self, x):
        CALLS[0] += 1
        return super().forward(x) * (1 + 0.001 * (CALLS[0] % 7))


train(Counting)
