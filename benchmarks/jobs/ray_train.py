"""Ray Train, quick-start manner: two workers on a local cluster train one model with DDP."""

import os
import tempfile
from pathlib import Path

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


def train_loop(config):
    """Train on this worker's share; rank 0 writes its losses."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, 8))
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for epoch in range(2):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["losses"]).write_text("\n".join(losses))


if __name__ == "__main__":
    folder = Path(os.environ.get("JOB_OUT") or tempfile.mkdtemp())
    losses = folder / "losses.txt"
    ray.init(
        num_cpus=3, include_dashboard=False, object_store_memory=80_000_000, _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )  # fmt: skip
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"losses": str(losses)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    )
    trainer.fit()
    ray.shutdown()
    for line in losses.read_text().splitlines():
        print("loss", line, flush=True)
