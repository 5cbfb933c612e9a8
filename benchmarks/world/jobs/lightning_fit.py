"""Lightning: a training and a validation loader, checkpoints; an argument gives the number of DDP processes."""

import os
import sys

import lightning
import torch
from slow import network, train_and_validation
from torch import nn
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    """The small network with its training and validation step."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        os.write(1, f"loss {self.global_rank} {loss.item().hex()}\n".encode())  # a whole line: ranks share the output
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


if __name__ == "__main__":
    devices = int([*sys.argv, "1"][1])
    lightning.seed_everything(0)
    torch.set_num_threads(1)
    training, validation = train_and_validation()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=os.environ.get("JOB_OUT", "out"),
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(training, 16, shuffle=True), DataLoader(validation, 16))
