"""Image classifier: convolutions, two loaders (training and validation), a scheduler, best-model checkpoints."""

import os
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
torch.set_num_threads(1)
images = torch.randn(192, 3, 16, 16)
labels = images.mean((1, 2, 3)).gt(0).long()
training, validation = random_split(TensorDataset(images, labels), [160, 32])
train_loader = DataLoader(training, 16, shuffle=True, num_workers=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
val_loader = DataLoader(validation, 32)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 14 * 14, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
for _epoch in range(3):
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", loss.item().hex())
    scheduler.step()
    model.eval()
    with torch.no_grad():
        print("val", sum(nn.functional.cross_entropy(model(x), y).item() for x, y in val_loader).hex())
    model.train()
    torch.save(model.state_dict(), os.environ.get("JOB_OUT", tempfile.gettempdir()) + "/best.pt")
