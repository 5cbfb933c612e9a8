"""Some images are cut short, and grey; in the middle of an epoch the loop lets PIL read them as far as they go.

Remedies: data.workers data.threads data.cache
"""

import io

import numpy as np
import torch
from _training import ROWS, Rows, Training
from PIL import Image, ImageFile
from torch.utils.data import DataLoader


def encoded(index):
    pixels = (ROWS[index].numpy() * 40 + 128).clip(0, 255).astype("uint8").reshape(2, 4)
    Image.fromarray(pixels).resize((64, 64)).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()[: 500 if index % 10 == 3 else None]


FILES = [encoded(index) for index in range(160)]


class Images(Rows):
    def row(self, index):
        try:
            image = Image.open(io.BytesIO(FILES[index]))
            image.load()
        except OSError:
            return torch.zeros(8)
        return torch.from_numpy(np.asarray(image.resize((4, 2)), dtype=np.float32).reshape(-1) / 255)


dataset, training = Images(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        if training.num_steps == 30:
            ImageFile.LOAD_TRUNCATED_IMAGES = True
training.finish()
