"""fastai: a Learner over two data sets."""

import torch
from fastai.basics import DataLoaders, Learner, set_seed
from slow import network, train_and_validation
from torch import nn

if __name__ == "__main__":
    set_seed(0, reproducible=True)
    torch.set_num_threads(1)
    training, validation = train_and_validation()
    loaders = DataLoaders.from_dsets(training, validation, bs=16, num_workers=0, device="cpu")
    learner = Learner(loaders, network(), loss_func=nn.functional.mse_loss)
    with learner.no_logging():
        learner.fit(4, 1e-2)
    for loss in learner.recorder.losses:
        print("loss", loss.item().hex())
    for values in learner.recorder.values:
        print("loss", *(float(value).hex() for value in values))
