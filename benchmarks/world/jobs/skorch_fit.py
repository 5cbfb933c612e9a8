"""skorch: NeuralNetRegressor.fit with a validation set of its own."""

import torch
from skorch import NeuralNetRegressor
from skorch.helper import predefined_split
from slow import network, train_and_validation


class Regressor(NeuralNetRegressor):
    """skorch's regressor; its pass over the validation set has a name of its own, by which it can be timed."""

    def run_single_epoch(self, iterator, training, **more):
        run = super().run_single_epoch if training else self.validation_pass
        return run(iterator, training, **more)

    def validation_pass(self, iterator, training, **more):
        return super().run_single_epoch(iterator, training, **more)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    training, validation = train_and_validation()
    net = Regressor(
        network, max_epochs=4, lr=0.01, batch_size=16, iterator_train__shuffle=True,
        train_split=predefined_split(validation), verbose=0,
    )  # fmt: skip
    net.fit(training, y=None)
    for epoch in net.history:
        print("loss", float(epoch["train_loss"]).hex(), float(epoch["valid_loss"]).hex())
