"""Data sets of random images; WORLD_IMAGES gives the number of training images (1/4 of it for tests)."""

import os

import torch
from torch.utils.data import Dataset


class _Images(Dataset):
    """`count` images of the given shape in [0, 1] with ten classes."""

    def __init__(self, count, shape, transform, seed):
        draws = torch.Generator().manual_seed(seed)
        self.images = torch.rand((count, *shape), generator=draws)
        self.labels = torch.randint(10, (count,), generator=draws).tolist()
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return (self.transform(image) if self.transform else image), self.labels[index]


class MNIST(_Images):
    """Images [1, 28, 28]."""

    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        count = int(os.environ.get("WORLD_IMAGES", 1280))
        super().__init__(count if train else count // 4, (1, 28, 28), transform, seed=int(train))


class FakeData(_Images):
    """Images of a given size, as torchvision's class of this name makes them."""

    def __init__(self, size=1000, image_size=(3, 224, 224), num_classes=10, transform=None, target_transform=None):
        super().__init__(int(os.environ.get("WORLD_IMAGES", 1280)), image_size, transform, seed=0)
