"""PyTorch Geometric: its DataLoader over small graphs, a GCN, an evaluation per epoch."""

import time

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class SlowGraphs(torch.utils.data.Dataset):
    """Rings of 8 nodes; each graph takes a known time."""

    def __init__(self, graphs, graph_s):
        self.graphs, self.graph_s = graphs, graph_s
        around = torch.arange(8)
        self.edges = torch.stack([around, (around + 1) % 8])

    def __len__(self):
        return self.graphs

    def __getitem__(self, index):
        time.sleep(self.graph_s)
        draws = torch.Generator().manual_seed(index)
        return Data(x=torch.randn(8, 16, generator=draws), edge_index=self.edges, y=torch.tensor([index % 2 / 1.0]))


class Net(nn.Module):
    """Two graph convolutions and a read-out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = GCNConv(16, 32), GCNConv(32, 32), nn.Linear(32, 1)

    def forward(self, data):
        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        return self.out(global_mean_pool(x, data.batch)).squeeze(1)


def evaluate(model, loader):
    """Print the mean loss over the validation graphs."""
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(batch), batch.y) for batch in loader]
    model.train()
    print("loss", torch.stack(losses).mean().item().hex(), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    training = DataLoader(SlowGraphs(320, 0.001), batch_size=16, shuffle=True)
    validation = DataLoader(SlowGraphs(160, 0.002), batch_size=16)
    for _epoch in range(3):
        for batch in training:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            print("loss", loss.item().hex(), flush=True)
        evaluate(model, validation)
