"""Keras 3 on its torch backend: compile and fit with a PyDataset for training and one for validation."""

import os
import time

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np


class SlowBatches(keras.utils.PyDataset):
    """Batches that take a known time."""

    def __init__(self, batches, batch_s):
        super().__init__()
        self.batches, self.batch_s = batches, batch_s

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        time.sleep(self.batch_s)
        draws = np.random.default_rng(index)
        return draws.normal(size=(16, 16)).astype("float32"), draws.normal(size=(16, 1)).astype("float32")


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    history = model.fit(SlowBatches(40, 0.01), epochs=2, validation_data=SlowBatches(15, 0.03), verbose=0)
    for name, values in history.history.items():
        print("loss", name, *(float(value).hex() for value in values))
