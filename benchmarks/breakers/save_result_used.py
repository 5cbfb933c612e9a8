"""What a save returns is looked at, compared, copied and pickled.

Remedies: checkpoint.async
"""

import copy
import pickle
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training
from torch.distributed.checkpoint.metadata import Metadata

folder = tempfile.mkdtemp()
training = Training()
for step in range(6):
    result = dcp.save({"model": training.model.state_dict()}, checkpoint_id=f"{folder}/{step}")
    kept = pickle.loads(pickle.dumps(copy.deepcopy(result)))
    scale = isinstance(result, Metadata) + isinstance(kept, Metadata) + len(kept.state_dict_metadata)
    training.step(torch.full((4, 8), 1.0 + scale / 10))
training.finish()
