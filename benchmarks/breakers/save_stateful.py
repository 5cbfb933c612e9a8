"""An object's state_dict counts its calls and draws random numbers.

Remedies: checkpoint.async
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = tempfile.mkdtemp()
training = Training(dropout=0.2)


class Counting:
    calls = 0

    def state_dict(self):
        self.calls += 1
        return {"calls": self.calls, "noise": torch.rand(4), "generator": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.calls = state["calls"]
        torch.set_rng_state(state["generator"])


counting = Counting()
for step in range(8):
    dcp.save({"model": training.model.state_dict(), "counting": counting}, checkpoint_id=f"{folder}/{step}")
    training.step(torch.full((4, 8), 1.0 + counting.calls / 10) + torch.rand(4, 8))
dcp.load({"counting": counting}, checkpoint_id=f"{folder}/5")
training.step(torch.rand(4, 8))
training.finish(counting.calls)
