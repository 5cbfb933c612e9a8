"""A checkpoint is saved under one name and renamed right away; older ones are removed.

Remedies: checkpoint.async
"""

import os
import shutil
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = tempfile.mkdtemp()
training = Training()
for step in range(8):
    training.step(torch.full((4, 8), 1.0 + step / 10))
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=f"{folder}/draft")
    os.rename(f"{folder}/draft", f"{folder}/{step}")
    if step >= 2:
        shutil.rmtree(f"{folder}/{step - 2}")
state = {"model": training.model.state_dict()}
dcp.load(state, checkpoint_id=f"{folder}/6")
training.model.load_state_dict(state["model"])
training.step(torch.ones(4, 8))
training.finish(sorted(os.listdir(folder)))
