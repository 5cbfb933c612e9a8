"""A compiled model (eager backend: no compiler needed), and the number of its graph breaks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
torch.set_num_threads(1)
model = torch.compile(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), backend="eager", fullgraph=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for a, b in DataLoader(TensorDataset(torch.randn(128, 8), torch.randn(128, 1)), 16):
    loss = nn.functional.mse_loss(model(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item().hex())
print("breaks", dict(torch._dynamo.utils.counters["graph_break"]))
