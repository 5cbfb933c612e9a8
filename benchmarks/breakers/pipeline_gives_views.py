"""A pipeline's stage returns a view of its result, which cannot be detached in place.

Remedies: parallel.schedule
Ranks: 2
"""

from _pipeline import WIDTH, Stage, train


class Views(Stage):
    def forward(self, x):
        return super().forward(x).reshape(1, -1).view(-1, WIDTH)


train(Views)
