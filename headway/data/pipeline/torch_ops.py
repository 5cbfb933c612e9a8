"""What the operators of a pipeline do to one example: images as uint8 or float32 [height, width, channels] arrays.

Decoding is simplejpeg's, Pillow's for what it cannot read; resizing is
torch's bilinear with antialiasing, on uint8. Everything else is numpy. All of
it lets go of the interpreter lock. Random operators draw from a generator of
their own, given per example.

>>> image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
>>> flip(image, np.random.default_rng(0), p=1.0)[0, 0].tolist()
[3, 4, 5]
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headway.core.errors import FormatError, InputError

Image = np.ndarray[Any, np.dtype[Any]]
GREY = (0.299, 0.587, 0.114)
"""Weights of red, green, blue (ITU-R BT.601)."""


def decode(data: bytes) -> Image:
    """Return the uint8 [height, width, 3] pixels of an encoded image. Raises `FormatError` on damaged ones."""
    try:
        import simplejpeg
    except ImportError as error:
        raise InputError("decoding images needs the extra `vision`: pip install 'headway[vision]'.") from error
    try:
        pixels: Image = simplejpeg.decode_jpeg(data)
    except ValueError:
        return _decoded_by_pillow(data)
    return pixels


def _decoded_by_pillow(data: bytes) -> Image:
    """PNG, CMYK and all else that is no common JPEG."""
    from PIL import Image as Pillow

    try:
        with Pillow.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise FormatError(
            f"{len(data)} bytes cannot be decoded as an image: {error}. Replace the file, or skip it: on_error='skip'."
        ) from error


def resize(image: Image, *, size: tuple[int, int], out: Image | None = None) -> Image:
    """Return the image at (height, width): bilinear with antialiasing, in the type that it has.

    `out`, if it has the result's shape and type, receives the result and is returned.
    """
    if image.shape[:2] == size:
        return image
    shape = (*size, image.shape[2])
    if out is None or out.shape != shape or out.dtype != image.dtype:
        out = np.empty(shape, image.dtype)
    source, target = _planes(_tensor(image)), _planes(torch.from_numpy(out))
    # What interpolate calls, which takes no place to write to; through torch.ops it takes 20 us more.
    torch._C._nn._upsample_bilinear2d_aa(source, size, False, None, None, out=target)  # type: ignore[call-arg]  # torch's stub lacks `out`
    return out


def _planes(image: torch.Tensor) -> torch.Tensor:
    """Return [height, width, channels] as [1, channels, height, width]: a view.

    With the batch axis in front of the permutation, and strides of its own, torch sees channels_last, keeps it, and is
    twice as fast (numpy gives a new axis the stride 0, which is none of that layout). One call: behind a decoder,
    which empties the caches, each costs 5 us.
    """
    (height, width, channels), (down, right, across) = image.shape, image.stride()
    return image.as_strided((1, channels, height, width), (height * down, across, down, right))


def _tensor(image: Image) -> torch.Tensor:
    """Return the image as a tensor that shares its memory, where torch can: not read-only, not mirrored."""
    shared = image.flags.writeable and min(image.strides) >= 0
    return torch.from_numpy(image if shared else image.copy())


def crop(image: Image, rng: np.random.Generator, *, size: tuple[int, int]) -> Image:
    """Return a random (height, width) window, a view. Raises `InputError` when the image is smaller."""
    height, width = _room(image, size)
    top, left = int(rng.integers(0, height + 1)), int(rng.integers(0, width + 1))
    return image[top : top + size[0], left : left + size[1]]


def center_crop(image: Image, *, size: tuple[int, int]) -> Image:
    """Return the window of (height, width) in the middle, a view. Raises `InputError` when the image is smaller."""
    height, width = _room(image, size)
    return image[height // 2 : height // 2 + size[0], width // 2 : width // 2 + size[1]]


def _room(image: Image, size: tuple[int, int]) -> tuple[int, int]:
    height, width = image.shape[0] - size[0], image.shape[1] - size[1]
    if min(height, width) < 0:
        raise InputError(f"an image of {image.shape[:2]} is smaller than a crop of {size}. Resize it first.")
    return height, width


def resized_crop(
    image: Image,
    rng: np.random.Generator,
    *,
    size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    out: Image | None = None,
) -> Image:
    """Return a window of random area (fraction in `scale`) and shape (in `ratio`, log-uniform), resized to `size`.

    The law of RandomResizedCrop: ten tries, then the largest window in the middle. `out` as in `resize`.
    """
    top, left, high, wide = random_window(image.shape[0], image.shape[1], rng, scale=scale, ratio=ratio)
    return resize(image[top : top + high, left : left + wide], size=size, out=out)


def random_window(
    height: int, width: int, rng: np.random.Generator, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a window that `resized_crop` would cut out of an image of this size."""
    for _ in range(10):
        # `random` is several times as fast as `uniform` and `integers`.
        area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.random())
        shape = ratio[0] * (ratio[1] / ratio[0]) ** rng.random()
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            return int(rng.random() * (height - high + 1)), int(rng.random() * (width - wide + 1)), high, wide
    bounded = min(max(width / height, ratio[0]), ratio[1])
    wide, high = min(width, round(height * bounded)), min(height, round(width / bounded))
    return (height - high) // 2, (width - wide) // 2, high, wide


def flip(image: Image, rng: np.random.Generator, *, p: float = 0.5) -> Image:
    """Return the image mirrored left to right with probability `p`.

    torch copies mirrored rows of three-byte pixels 16 times as fast as numpy (0.013 ms against 0.2 ms at 224 x 224),
    and a mirrored view would cost every operator behind it as much.
    """
    if rng.random() >= p:
        return image
    mirrored: Image = torch.flip(_tensor(image), (1,)).numpy()
    return mirrored


def jitter(image: Image, rng: np.random.Generator, *, brightness: float, contrast: float, saturation: float) -> Image:
    """Return the image with random brightness, contrast (round mid-grey, not the image's mean) and saturation.

    Each factor is uniform in 1 +- its argument. Every pixel depends on itself alone.
    """
    factors = [1 + strength * rng.uniform(-1, 1) for strength in (brightness, contrast, saturation)]
    top = np.float32(255 if image.dtype == np.uint8 else 1)
    bright, contrasted, saturated = (np.float32(factor) for factor in factors)
    # bright * contrasted * (saturated * x + (1 - saturated) * grey) + (1 - contrasted) * top / 2, in few passes.
    coloured = bool(saturation) and image.shape[2] == 3
    scale, shift = bright * contrasted, (1 - contrasted) * top / 2
    values = np.multiply(image, scale * saturated if coloured else scale, dtype=np.float32)
    if coloured:
        grey = _grey(image)
        grey *= scale * (1 - saturated)
        grey += shift
        for channel in range(3):  # a long inner loop; a broadcast over three channels has one of length three
            values[..., channel] += grey
    else:
        values += shift
    np.clip(values, 0, top, out=values)
    return values if image.dtype != np.uint8 else np.rint(values, out=values).astype(np.uint8)


def blur(image: Image, rng: np.random.Generator, *, sigma: tuple[float, float], width: int) -> Image:
    """Return the image under a Gaussian of random deviation (uniform in `sigma`, pixels), cut at `width` pixels.

    Borders are mirrored. Raises `InputError` on images smaller than half the width.
    """
    half = width // 2
    if min(image.shape[:2]) <= half:
        raise InputError(f"an image of {image.shape[:2]} is too small for a blur {width} pixels wide. Pass less.")
    weights = np.exp(-0.5 * (np.arange(-half, half + 1) / max(rng.uniform(*sigma), 1e-6)) ** 2)
    kernel = torch.from_numpy((weights / weights.sum()).astype(np.float32))
    planes = _tensor(image).to(torch.float32).permute(2, 0, 1).unsqueeze(1)
    planes = torch.nn.functional.pad(planes, (half, half, half, half), mode="reflect")
    planes = torch.nn.functional.conv2d(planes, kernel.view(1, 1, -1, 1))
    planes = torch.nn.functional.conv2d(planes, kernel.view(1, 1, 1, -1)).squeeze(1).permute(1, 2, 0)
    blurred: Image = (planes.round_().to(torch.uint8) if image.dtype == np.uint8 else planes).numpy()
    return blurred


def greyscale(image: Image) -> Image:
    """Return the brightness of each pixel, [height, width, 1] in the type that it has."""
    values = _grey(image)[..., None]
    return values.astype(image.dtype) if image.dtype != np.uint8 else np.rint(values).astype(np.uint8)


def _grey(image: Image) -> Image:
    red, green, blue = (image[..., c] * np.float32(weight) for c, weight in enumerate(GREY))
    summed: Image = red + green + blue
    return summed


def to_float(image: Image) -> Image:
    """Return uint8 values 0..255 as float32 0..1; float images stay as they are."""
    return image if image.dtype == np.float32 else image.astype(np.float32) * np.float32(1 / 255)


def normalise(image: Image, *, mean: Sequence[float], std: Sequence[float]) -> Image:
    """Return (image - mean) / std per channel as float32; uint8 values count as 0..1."""
    height, width, channels = image.shape
    shift, scale = np.asarray(mean, np.float32), 1 / np.asarray(std, np.float32)
    if image.dtype == np.uint8:
        shift, scale = shift * 255, scale / np.float32(255)
    # Rows of width x channels values: the inner loop is long, not of length `channels`.
    rows = np.ascontiguousarray(image).reshape(height, width * channels)
    values = np.subtract(rows, np.resize(shift, width * channels), dtype=np.float32)
    values *= np.resize(scale, width * channels)
    normalised: Image = values.reshape(height, width, channels)
    return normalised


WRITERS = (resize, resized_crop)
"""Operators that can write their result where they are told (`out`)."""
