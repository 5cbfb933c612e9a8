"""A stand-in for torchvision: made-up images in place of MNIST, the few transforms that the examples use, no download.

torchvision's wheel is built for another build of torch than the tested one, and its data sets want to be downloaded.
"""

from . import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]
