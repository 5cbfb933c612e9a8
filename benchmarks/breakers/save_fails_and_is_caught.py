"""A save fails, the script catches that at the call, and falls back to another place.

Remedies: checkpoint.async
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from _training import Training
from torch.distributed.checkpoint.api import CheckpointException

folder = Path(tempfile.mkdtemp())
(folder / "file").write_text("in the way")
training, failed = Training(), 0
for step in range(6):
    state = {"model": training.model.state_dict()}
    if step == 4:
        state["function"] = lambda: None
    try:
        dcp.save(state, checkpoint_id=folder / ("file" if step == 2 else ".") / str(step))
    except (CheckpointException, Exception):
        failed += 1
        dcp.save({"model": state["model"]}, checkpoint_id=folder / f"fall-back-{step}")
    training.step(torch.full((4, 8), 1.0 + failed / 10))
training.finish(failed, sorted(place.name for place in folder.iterdir()))
