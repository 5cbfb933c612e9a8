"""The loop reads a checkpoint's metadata by torch's reader, right after the save.

Remedies: checkpoint.async
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training
from torch.distributed.checkpoint import FileSystemReader

folder = tempfile.mkdtemp()
training = Training()
for step in range(10):
    dcp.save({"model": training.model.state_dict(), "step": step}, checkpoint_id=f"{folder}/{step}")
    names = FileSystemReader(f"{folder}/{step}").read_metadata().state_dict_metadata
    training.step(torch.full((4, 8), 1.0 + len(names) / 10))
training.finish()
