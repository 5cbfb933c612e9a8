"""Hooks on the parameters of a pipeline's stage change each gradient by the number of gradients so far.

Remedies: parallel.schedule
Ranks: 2
"""

from _pipeline import train

COUNT = [0]


def changed(gradient):
    COUNT[0] += 1
    return gradient * (1 + 0.001 * (COUNT[0] % 5))


train(prepare=lambda model: [value.register_hook(changed) for value in model.parameters()])
