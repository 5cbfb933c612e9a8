"""Accelerate: two batches per step, an evaluation and a saved state per epoch."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from slow import network, train_and_validation
from torch import nn
from torch.utils.data import DataLoader


def evaluate(model, loader):
    """Print the mean loss over the validation set."""
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), y) for x, y in loader]
    model.train()
    print("loss", torch.stack(losses).mean().item().hex(), flush=True)


if __name__ == "__main__":
    set_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    training, validation = train_and_validation()
    model, optimizer, training, validation = accelerator.prepare(
        model, optimizer, DataLoader(training, 16, shuffle=True), DataLoader(validation, 16)
    )
    for _epoch in range(2):
        for x, y in training:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            print("loss", loss.item().hex(), flush=True)
        evaluate(model, validation)
        accelerator.save_state(os.environ.get("JOB_OUT", "out"))
