"""Saves that are looked at, loaded, repeated or taken up elsewhere at once; states that change after the call.

Remedies: checkpoint.async fault.interval fault.warm
"""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training, chosen

import headway


def save_then_exists():
    """The loop asks right after a save whether the checkpoint is there."""
    folder = tempfile.mkdtemp()
    training = Training()
    for step in range(12):
        place = f"{folder}/{step}"
        dcp.save({"model": training.model.state_dict()}, checkpoint_id=place)
        there = os.path.exists(place) + os.path.isfile(f"{place}/.metadata")
        training.step(torch.full((4, 8), 1.0 + there))
    training.finish()


def checkpointer_of_its_own():
    """A Checkpointer saves by a policy that the script has made, and keeps a hand on; its last step is restored."""
    folder = tempfile.mkdtemp()
    training = Training()
    policy = headway.CheckpointPolicy(budget=0.5)
    checkpoint = headway.Checkpointer(folder, model=training.model, optimizer=training.optimizer, policy=policy)
    checkpoint.attach(training.optimizer)
    for step in range(12):
        training.step(torch.full((4, 8), 1.0 + step / 10))
    checkpoint.save(block="durable")
    with torch.no_grad():
        for value in training.model.parameters():
            value.zero_()
    checkpoint.restore()
    checkpoint.close()
    training.finish()


def save_then_load():
    """A checkpoint is loaded right after the save, over parameters that were changed meanwhile."""
    folder = tempfile.mkdtemp()
    training = Training()
    for step in range(10):
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        dcp.save({"model": state["model"]}, checkpoint_id=f"{folder}/{step}")
        with torch.no_grad():
            for value in training.model.parameters():
                value.zero_()
        if step % 2:
            dcp.load({"model": training.model.state_dict()}, checkpoint_id=f"{folder}/{step}")
        training.step(torch.full((4, 8), 1.0 + step / 10))
    training.finish()


def save_same_path():
    """The same path is saved to again and again; the last state must be in it."""
    place = tempfile.mkdtemp() + "/latest"
    training, history = Training(), [0.0]
    for step in range(10):
        history.append(training.step(torch.full((4, 8), 1.0 + step / 10)))
        dcp.save({"model": training.model.state_dict(), "history": history, "step": step}, checkpoint_id=place)
        history[0] += 1
    training.step(torch.zeros(4, 8))
    state = {"model": training.model.state_dict(), "history": [], "step": 0}
    dcp.load(state, checkpoint_id=place)
    training.step(torch.ones(4, 8))
    training.finish(state["history"], state["step"])


class Counting:
    calls = 0

    def state_dict(self):
        self.calls += 1
        return {"calls": self.calls, "noise": torch.rand(4), "generator": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.calls = state["calls"]
        torch.set_rng_state(state["generator"])


def save_stateful():
    """An object's state_dict counts its calls and draws random numbers."""
    folder = tempfile.mkdtemp()
    training, counting = Training(dropout=0.2), Counting()
    for step in range(8):
        dcp.save({"model": training.model.state_dict(), "counting": counting}, checkpoint_id=f"{folder}/{step}")
        training.step(torch.full((4, 8), 1.0 + counting.calls / 10) + torch.rand(4, 8))
    dcp.load({"counting": counting}, checkpoint_id=f"{folder}/5")
    training.step(torch.rand(4, 8))
    training.finish(counting.calls)


def state_of(value):
    return {
        "whole": value, "tied": value, "columns": value[:, 1::2], "transposed": value.t(), "none": value[:0],
        "half": value.bfloat16(), "bits": value > 5, "number": value.sum(), "text": f"{value.sum()}",
    }  # fmt: skip


def save_views():
    """A state of tied, strided, empty and odd tensors is saved, changed, and loaded."""
    place = tempfile.mkdtemp() + "/views"
    base, training = torch.arange(24.0).view(4, 6), Training()
    dcp.save(state_of(base), checkpoint_id=place)
    base.neg_()
    state = state_of(base.clone())
    dcp.load(state, checkpoint_id=place)
    total = sum(part.double().sum().item() for part in state.values() if isinstance(part, torch.Tensor))
    for _ in range(5):
        training.step(torch.full((4, 8), total / 100))
    training.finish(state["text"])


def save_read_by_child():
    """A child process, and a forked one, look at the checkpoint right after the save."""
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


def save_and_exec():
    """The program replaces itself right after the save, and goes on from the checkpoint."""
    training = Training()
    if len(sys.argv) == 2:
        place = tempfile.mkdtemp() + "/checkpoint"
        training.step(torch.ones(4, 8))
        dcp.save({"model": training.model.state_dict(), "large": torch.ones(1 << 22)}, checkpoint_id=place)
        os.execv(sys.executable, [sys.executable, *sys.argv, place])
    dcp.load({"model": training.model.state_dict()}, checkpoint_id=sys.argv[2])
    training.step(torch.ones(4, 8))
    training.finish()


if __name__ == "__main__":
    chosen(globals())
