"""A checkpoint is loaded right after the save, over parameters that were changed meanwhile.

Remedies: checkpoint.async
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = tempfile.mkdtemp()
training = Training()
for step in range(10):
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    dcp.save({"model": state["model"]}, checkpoint_id=f"{folder}/{step}")
    with torch.no_grad():
        for value in training.model.parameters():
            value.zero_()
    if step % 2:
        dcp.load({"model": training.model.state_dict()}, checkpoint_id=f"{folder}/{step}")
    training.step(torch.full((4, 8), 1.0 + step / 10))
training.finish()
