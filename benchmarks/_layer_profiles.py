"""Synthetic step profiles: MLP, transformers, residual networks, VGG-16, from layer shapes and a device's rates.

Use them where nothing was profiled: to plan before a job exists, and to test
planners. A layer is a matrix operation (FLOPs / attained rate) followed by an
element-wise one (bytes / memory rate), each with a launch time; backward is
twice forward. It is a roofline, not a measurement: shapes and sizes are
exact, durations are typical. Durations int64 ns, sizes bytes.

>>> from headway.cost.specs import shipped
>>> profile = resnet50(shipped().device("V100-SXM2-16GB"), batch=32)
>>> profile.tensor_bytes.size, int(profile.tensor_bytes.sum()) // 4  # parameters of the published network
(107, 25557032)
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks._step_blocks import Block, profile_of
from benchmarks._step_model import StepProfile
from headway.core.units import seconds_to_ns
from headway.cost.specs import DeviceSpec
from headway.cost.transformer import Transformer

EFFICIENCY = 0.5
"""Share of the peak rate that matrix operations attain, unless told."""

LAUNCH_S = 5e-6
"""Time to launch a kernel and to read its input again: what fusing two of them saves."""

STATE_COPIES = 4
"""Weights, gradients and two moments of Adam."""

HALF_FRACTION = 0.45
"""Duration in 16 bits / in 32 bits: matrix units are faster by more, memory-bound operations by two."""


class ProfileFn(Protocol):
    """A model. Write a function of this shape and list it in `PROFILES`."""

    def __call__(self, device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
        """Return the profile of a step with `batch` examples per worker."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """One matrix operation and what follows it element by element; all per example."""

    flops: float
    weights: int
    outputs: int
    more_weights: int = 0


def mlp(device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
    """Twelve equal layers of 4096 x 4096."""
    return perceptron([4096] * 13, device, batch=batch, efficiency=efficiency)


def perceptron(widths: Sequence[int], device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
    """Return a chain of fully connected layers with biases; `widths` from input to output, at least two."""
    layers = [[_Layer(2.0 * a * b, a * b + b, b)] for a, b in itertools.pairwise(widths)]
    return _profile(layers, device, batch, efficiency, [a * 1000003 + b for a, b in itertools.pairwise(widths)])


def bert_large(device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
    """Twenty-four layers of hidden size 1024, sequences of 128 tokens, 30,522 words."""
    return transformer(
        Transformer(24, 1024, 16, sequence=128, vocabulary=30522), device, batch=batch, efficiency=efficiency
    )


def gpt_small(device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
    """Twelve layers of hidden size 768, sequences of 1024 tokens, 50,257 words."""
    return transformer(
        Transformer(12, 768, 12, sequence=1024, vocabulary=50257), device, batch=batch, efficiency=efficiency
    )


def transformer(model: Transformer, device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
    """Return a transformer: embedding, equal layers (attention in, core, out; two feed-forward), and the head in the
    last block when it is not tied to the embedding.
    """
    s, h, wide = model.sequence, model.hidden, model.ffn or 4 * model.hidden
    layer = [
        _Layer(2.0 * s * h * 3 * h, 3 * h * (h + 1), 3 * s * h, 2 * h),
        _Layer(4.0 * s * s * h, 0, s * h + model.heads * s * s),
        _Layer(2.0 * s * h * h, h * (h + 1), s * h, 2 * h),
        _Layer(2.0 * s * h * wide, wide * (h + 1), s * wide),
        _Layer(2.0 * s * h * wide, h * (wide + 1), s * h),
    ]
    words = model.vocabulary * h
    blocks = [[_Layer(0.0, words + (s * h if model.positions else 0), s * h)], *[layer] * model.layers]
    blocks.append([_Layer(2.0 * s * h * model.vocabulary, 0 if model.tied else words, s * model.vocabulary, 2 * h)])
    return _profile(blocks, device, batch, efficiency, [0, *[1] * model.layers, 2])


def resnet18(device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
    """He et al., 2016: 224 x 224 images, 11.7 million parameters, two convolutions per block."""
    return _resnet((2, 2, 2, 2), 1, device, batch, efficiency)


def resnet50(device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
    """He et al., 2016: 224 x 224 images, 25.6 million parameters, three convolutions per block."""
    return _resnet((3, 4, 6, 3), 4, device, batch, efficiency)


def _resnet(repeats: Sequence[int], widen: int, device: DeviceSpec, batch: int, efficiency: float) -> StepProfile:
    """Return a residual network; blocks with `widen` > 1 squeeze, convolve and widen again (bottlenecks)."""
    blocks, kinds, width = [[_conv(3, 64, 7, 112)]], [0], 64
    for stage, (count, channels, side) in enumerate(zip(repeats, (64, 128, 256, 512), (56, 28, 14, 7), strict=True)):
        for repeat in range(count):
            side_in = side * 2 if repeat == 0 and stage else side
            if widen == 1:
                block = [_conv(width, channels, 3, side), _conv(channels, channels, 3, side)]
            else:
                block = [
                    _conv(width, channels, 1, side_in),
                    _conv(channels, channels, 3, side),
                    _conv(channels, widen * channels, 1, side),
                ]
            if width != widen * channels:
                block.append(_conv(width, widen * channels, 1, side))
            blocks.append(block)
            kinds.append(2 * stage + 1 + (repeat > 0))
            width = widen * channels
    blocks.append([_Layer(2.0 * width * 1000, width * 1000 + 1000, 1000)])
    return _profile(blocks, device, batch, efficiency, [*kinds, 9])


def vgg16(device: DeviceSpec, *, batch: int, efficiency: float = EFFICIENCY) -> StepProfile:
    """Simonyan and Zisserman, 2015: 224 x 224 images, 138.4 million parameters, 90 % of them in three layers."""
    sizes = [(64, 2, 224), (128, 2, 112), (256, 3, 56), (512, 3, 28), (512, 3, 14)]
    blocks, width = [], 3
    for channels, repeats, side in sizes:
        for _ in range(repeats):
            flops, outputs = 2.0 * 9 * width * channels * side * side, channels * side * side
            blocks.append([_Layer(flops, 9 * width * channels + channels, outputs)])
            width = channels
    for inputs, outputs in [(512 * 49, 4096), (4096, 4096), (4096, 1000)]:
        blocks.append([_Layer(2.0 * inputs * outputs, inputs * outputs + outputs, outputs)])
    return _profile(blocks, device, batch, efficiency, list(range(len(blocks))))


PROFILES: dict[str, ProfileFn] = {
    "mlp": mlp, "resnet18": resnet18, "resnet50": resnet50, "vgg16": vgg16, "bert_large": bert_large,
    "gpt_small": gpt_small,
}  # fmt: skip
"""Name -> profile of a published network."""


def _conv(inputs: int, outputs: int, kernel: int, side: int) -> _Layer:
    """Return a convolution without bias, followed by batch normalisation."""
    weights = inputs * outputs * kernel * kernel
    return _Layer(2.0 * weights * side * side, weights, outputs * side * side, 2 * outputs)


def _profile(
    blocks: Sequence[Sequence[_Layer]], device: DeviceSpec, batch: int, efficiency: float, kinds: Sequence[int]
) -> StepProfile:
    """Time the layers on a device."""
    rate, memory = device.peak("fp32") * efficiency, device.memory_bytes_per_s
    weights = sum(layer.weights + layer.more_weights for block in blocks for layer in block)
    timed = [_timed(block, batch, rate, memory, kind) for block, kind in zip(blocks, kinds, strict=True)]
    return profile_of(
        timed, update_ns=seconds_to_ns(LAUNCH_S + 4 * weights * (STATE_COPIES + 3) / memory),
        state_bytes=4 * weights * STATE_COPIES, copy_ns_per_byte=2e9 / memory, most_microbatches=batch,
    )  # fmt: skip


def _timed(block: Sequence[_Layer], batch: int, rate: float, memory: float, kind: int) -> Block:
    """Time one block: each layer is a matrix operation and an element-wise one."""
    forward: list[int] = []
    backward: list[int] = []
    gradients: list[int] = []
    for layer in block:
        matrix = batch * layer.flops / rate + 4 * layer.weights / memory
        elements = 4 * batch * layer.outputs * 3 / memory
        forward += [seconds_to_ns(LAUNCH_S + matrix), seconds_to_ns(LAUNCH_S + elements)]
        # Reversed below: the element-wise operation is undone first.
        backward += [seconds_to_ns(LAUNCH_S + 2 * matrix), seconds_to_ns(LAUNCH_S + 2 * elements)]
        gradients += [4 * layer.weights, 4 * layer.more_weights]
    outputs = sum(layer.outputs for layer in block)
    return Block(
        tuple(forward), tuple(reversed(backward)), tuple(reversed(gradients)), fixed_ns=seconds_to_ns(LAUNCH_S),
        half_fraction=HALF_FRACTION, activation_bytes=4 * batch * 2 * outputs,
        input_bytes=4 * batch * block[-1].outputs, kind=kind,
    )  # fmt: skip
