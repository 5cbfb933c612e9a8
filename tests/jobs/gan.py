"""GAN: two networks, two optimizers, one loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.randn(320, 8)), 32, shuffle=True, drop_last=True)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), 2e-3)
optimizer_c = torch.optim.RMSprop(critic.parameters(), 2e-3)
for _epoch in range(3):
    for (real,) in loader:
        fake = generator(torch.randn(32, 4))
        loss_c = critic(fake.detach()).mean() - critic(real).mean()
        optimizer_c.zero_grad()
        loss_c.backward()
        optimizer_c.step()
        loss_g = -critic(fake).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        print("loss", loss_c.item().hex(), loss_g.item().hex())
