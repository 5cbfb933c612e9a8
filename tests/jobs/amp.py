"""Mixed precision with a GradScaler: some steps overflow and are skipped."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
x, y = torch.randn(256, 16), torch.randn(256, 1)
for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), 16)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(a).float(), b)
    optimizer.zero_grad()
    scaler.scale(loss * (float("inf") if i % 5 == 4 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    print("loss", loss.item().hex(), scaler.get_scale())
