"""Ray Train: TorchTrainer with two workers on a local cluster of its own."""

import os
import sys

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from slow import network, train_and_validation
from torch import nn
from torch.utils.data import DataLoader


def train(options):
    """Train in one worker; its losses go to a file, for Ray puts the workers' output into its own log."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    training, _ = train_and_validation()
    loader = prepare_data_loader(DataLoader(training, 16, shuffle=False))
    losses = []
    for _epoch in range(4):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    with open(f"{options['folder']}/losses-{ray.train.get_context().get_world_rank()}", "w") as file:
        file.write("\n".join(losses))


if __name__ == "__main__":
    folder = os.path.abspath(os.environ.get("JOB_OUT", "out"))
    os.makedirs(folder, exist_ok=True)
    paths = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    TorchTrainer(
        train, train_loop_config={"folder": folder}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/ray"),
    ).fit()  # fmt: skip
    for rank in range(2):
        with open(f"{folder}/losses-{rank}") as file:
            for line in file:
                print("loss", rank, line.strip())
    ray.shutdown()
    sys.exit(0)
