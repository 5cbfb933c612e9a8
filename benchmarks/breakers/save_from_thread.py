"""A thread of the script's own saves while the loop trains on another state.

Remedies: checkpoint.async
"""

import tempfile
import threading

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = tempfile.mkdtemp()
training = Training()
for step in range(6):
    state = {"model": {name: value.clone() for name, value in training.model.state_dict().items()}}
    thread = threading.Thread(target=lambda state=state, step=step: dcp.save(state, checkpoint_id=f"{folder}/{step}"))
    thread.start()
    training.step(torch.full((4, 8), 1.0 + step / 10))
    thread.join()
    dcp.save({"step": step}, checkpoint_id=f"{folder}/step")
dcp.load({"model": training.model.state_dict()}, checkpoint_id=f"{folder}/3")
training.step(torch.ones(4, 8))
training.finish()
