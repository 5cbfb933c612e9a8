"""A child process, and a forked one, look at the checkpoint right after the save.

Remedies: checkpoint.async
"""

import os
import subprocess
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = tempfile.mkdtemp()
training = Training()
for step in range(6):
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=f"{folder}/{step}")
    if step % 2:
        found = subprocess.run(["test", "-f", f"{folder}/{step}/.metadata"]).returncode == 0
    else:
        child = os.fork()
        if child == 0:
            os._exit(0 if os.path.isfile(f"{folder}/{step}/.metadata") else 1)
        found = os.waitpid(child, 0)[1] == 0
    training.step(torch.full((4, 8), 1.0 + found))
training.finish()
