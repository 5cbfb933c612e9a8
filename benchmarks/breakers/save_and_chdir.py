"""A checkpoint goes to a relative path, and the working directory changes right after the save.

Remedies: checkpoint.async
"""

import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

places = [tempfile.mkdtemp(), tempfile.mkdtemp()]
os.chdir(places[0])
training = Training()
for step in range(6):
    training.step(torch.full((4, 8), 1.0 + step / 10))
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=f"checkpoint-{step}")
    os.chdir(places[(step + 1) % 2])
training.step(torch.zeros(4, 8))
os.chdir(places[0])
dcp.load({"model": training.model.state_dict()}, checkpoint_id="checkpoint-2")
training.step(torch.ones(4, 8))
training.finish(sorted(os.listdir(places[0])), sorted(os.listdir(places[1])))
