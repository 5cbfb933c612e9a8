"""The loop asks right after a save whether the checkpoint is there.

Remedies: checkpoint.async
"""

import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = tempfile.mkdtemp()
training = Training()
for step in range(12):
    place = f"{folder}/{step}"
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=place)
    there = os.path.exists(place) + os.path.isfile(f"{place}/.metadata")
    training.step(torch.full((4, 8), 1.0 + there))
training.finish()
