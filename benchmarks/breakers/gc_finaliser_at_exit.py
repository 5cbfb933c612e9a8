"""An object in a cycle, made before the first step, writes its last line when the interpreter ends.

Remedies: host.gc
"""

import torch
from _training import Training


class Writer:
    def __init__(self):
        self.me = self
        self.lines = 0

    def __del__(self, print=print):
        print("writer closed after", self.lines, flush=True)


def main():
    training, writer = Training(), Writer()
    for _ in range(30):
        training.step(torch.full((4, 8), 1.0))
        writer.lines += 1
    training.finish()


main()
