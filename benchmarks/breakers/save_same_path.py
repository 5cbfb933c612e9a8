"""The same path is saved to again and again; the last state must be in it.

Remedies: checkpoint.async
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

place = tempfile.mkdtemp() + "/latest"
training, history = Training(), [0.0]
for step in range(10):
    history.append(training.step(torch.full((4, 8), 1.0 + step / 10)))
    dcp.save({"model": training.model.state_dict(), "history": history, "step": step}, checkpoint_id=place)
    history[0] += 1
training.step(torch.zeros(4, 8))
state = {"model": training.model.state_dict(), "history": [], "step": 0}
dcp.load(state, checkpoint_id=place)
training.step(torch.ones(4, 8))
training.finish(state["history"], state["step"])
