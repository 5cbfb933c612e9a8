"""A checkpoint is copied right after the save, as to a bucket, and loaded from the copy.

Remedies: checkpoint.async
"""

import shutil
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = tempfile.mkdtemp()
training = Training()
for step in range(8):
    training.step(torch.full((4, 8), 1.0 + step / 10))
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=f"{folder}/{step}")
    shutil.copytree(f"{folder}/{step}", f"{folder}/copy-{step}")
state = {"model": training.model.state_dict()}
dcp.load(state, checkpoint_id=f"{folder}/copy-3")
training.model.load_state_dict(state["model"])
training.step(torch.ones(4, 8))
training.finish()
