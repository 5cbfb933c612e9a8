"""Transforms of image tensors."""

import torch


class Compose:
    """One transform after the other."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """The stand-in's images are tensors."""

    def __call__(self, image):
        return image


class Normalize:
    """(image - mean) / std per channel."""

    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std


class Lambda:
    """A function as a transform."""

    def __init__(self, function):
        self.function = function

    def __call__(self, image):
        return self.function(image)
