"""The loop lists the folder of checkpoints and trains on the number of the newest.

Remedies: checkpoint.async
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = Path(tempfile.mkdtemp())
training = Training()
for step in range(12):
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=folder / f"step-{step}")
    newest = max(int(place.parent.name.split("-")[1]) for place in folder.glob("*/.metadata"))
    training.step(torch.full((4, 8), 1.0 + newest / 10))
training.finish()
