"""Accelerate, quick-start manner: prepare model, optimizer, loader and scheduler; accumulate gradients."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    set_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(TensorDataset(torch.randn(192, 16), torch.randn(192, 1)), 16, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=24)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            print("loss", loss.item().hex(), flush=True)
