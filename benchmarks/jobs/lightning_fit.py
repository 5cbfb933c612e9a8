"""Lightning, quick-start manner: an autoencoder, a training and a validation loader, checkpoints."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(lightning.LightningModule):
    """Squeeze and stretch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16))

    def training_step(self, batch, index):
        (x,) = batch
        loss = nn.functional.mse_loss(self.net(x), x)
        print("loss", loss.item().hex(), flush=True)
        return loss

    def validation_step(self, batch, index):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


if __name__ == "__main__":
    lightning.seed_everything(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(128, 16))
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=os.environ.get("JOB_OUT", "."),
    )  # fmt: skip
    trainer.fit(AutoEncoder(), DataLoader(data, 16, shuffle=True), DataLoader(data, 64))
