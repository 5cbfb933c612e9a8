"""Operators on one image: a resize is torch's own, bit by bit, wherever it reads and writes."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.data.pipeline import torch_ops as ops


def test_a_resize_keeps_pixels_together_and_writes_where_it_is_told():
    rng = np.random.default_rng(1)
    window = rng.integers(0, 256, (60, 70, 3), dtype=np.uint8)[5:45, 10:63]
    place = np.zeros((24, 30, 3), np.uint8)

    made = ops.resize(window, size=(24, 30))

    assert made.flags.c_contiguous
    assert ops.resize(window, size=(24, 30), out=place) is place
    assert np.array_equal(place, made)
    assert ops.resize(window, size=(24, 30), out=place.astype(np.float32)) is not place  # of another type


@given(
    height=st.integers(8, 60), width=st.integers(8, 60), channels=st.sampled_from([1, 3, 4]),
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)), kind=st.sampled_from(["u1", "f4"]),
    made=st.sampled_from(["window", "mirrored", "read-only"]),
)  # fmt: skip
def test_a_resize_is_torch_s_to_the_last_bit_whatever_the_image_s_layout(height, width, channels, size, kind, made):
    image = np.random.default_rng(height).integers(0, 256, (height, width, channels)).astype(kind)
    image = {"window": image[2:-1, 3:-2], "mirrored": image[:, ::-1], "read-only": image}[made]
    image.flags.writeable = made != "read-only"
    planes = torch.from_numpy(image.copy()).permute(2, 0, 1).unsqueeze(0)
    expected = torch.nn.functional.interpolate(planes, size=size, mode="bilinear", antialias=True)[0].permute(1, 2, 0)

    resized = ops.resize(image, size=size)

    assert resized.dtype == image.dtype
    assert np.array_equal(resized, expected.numpy() if size != image.shape[:2] else image)
