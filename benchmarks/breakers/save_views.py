"""A state of tied, strided, empty and odd tensors is saved, changed, and loaded.

Remedies: checkpoint.async
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

place = tempfile.mkdtemp() + "/views"
base = torch.arange(24.0).view(4, 6)


def state_of(value):
    return {
        "whole": value, "tied": value, "columns": value[:, 1::2], "transposed": value.t(), "none": value[:0],
        "half": value.bfloat16(), "bits": value > 5, "number": value.sum(), "text": f"{value.sum()}",
    }  # fmt: skip


training = Training()
dcp.save(state_of(base), checkpoint_id=place)
base.neg_()
state = state_of(base.clone())
dcp.load(state, checkpoint_id=place)
total = sum(part.double().sum().item() for part in state.values() if isinstance(part, torch.Tensor))
for _ in range(5):
    training.step(torch.full((4, 8), total / 100))
training.finish(state["text"])
