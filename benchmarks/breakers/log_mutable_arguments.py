"""Arguments of a message change right after the call, as do objects that are the message.

Remedies: host.logging
"""

import logging
import tempfile
from pathlib import Path

import torch
from _training import Training


class State:
    value = 0

    def __str__(self):
        return f"state {self.value}"


path = tempfile.mktemp()
logging.basicConfig(filename=path, level="INFO", format="%(message)s %(extra)s")
training, losses, state, extra = Training(), [], State(), [0]
for step in range(40):
    logging.info("losses %s", losses, extra={"extra": extra})
    logging.info(state, extra={"extra": "none"})
    losses.append(step)
    state.value, extra[0] = step, step
    training.step(torch.full((4, 8), 1 + step / 40))
logging.shutdown()
training.finish(Path(path).read_text())
