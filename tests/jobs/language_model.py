"""Character language model with gradient accumulation, clipping, and a cosine schedule."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1)
torch.set_num_threads(1)


class Text(Dataset):
    """Windows of a text."""

    def __init__(self):
        self.data = torch.tensor(list((__doc__ * 40).encode()))

    def __len__(self):
        return 256

    def __getitem__(self, i):
        return self.data[i : i + 24], self.data[i + 1 : i + 25]


model = nn.Sequential(
    nn.Embedding(256, 32), nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), nn.Linear(32, 256)
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for _epoch in range(2):
    for i, (x, y) in enumerate(DataLoader(Text(), 16, shuffle=True)):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 4
        loss.backward()
        print("loss", loss.item().hex())
        if i % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
