"""CPU time per image: a planned pipeline in threads, against the order as written and against torch's DataLoader.

Claims: planned, the seven operators of SimCLR's pipeline behind the decoder (to_float, jitter, greyscale, blur,
normalise, crop to 224, flip) take 1/1.7 of the CPU of the order as written, and 1/2.7 of a DataLoader with Pillow,
float32 and two workers (E2). Equal pixels are asserted: bit by bit, but for the borders of a blur that is cropped first
on its author's word. CPU of all processes; rounds interleaved.
"""

import json
import os
import statistics
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import io
from functools import cache

import numpy as np
import torch
from PIL import Image

from headway.data import Pipeline, SyntheticJpeg
from headway.data.bytes.order import item_seeds
from headway.data.pipeline import torch_ops as ops
from headway.data.pipeline.chain import Chain, generator

BATCH, SIZE, IMAGES = 32, (224, 224), 96
LENGTH = 288
GREY = (0.45,), (0.23,)


class Repeated:
    """A few generated JPEGs, several times: decoding costs the same, making them does not."""

    def __init__(self) -> None:
        images = SyntheticJpeg(IMAGES, 500, 375, seed=11)
        self.data = [images.read(k) for k in range(IMAGES)]

    def __len__(self) -> int:
        return LENGTH

    def read(self, index: int) -> bytes:
        return self.data[index % IMAGES]


@cache
def seed_of(index: int) -> int:
    """Return the seed that headway's loader gives the example in its first epoch: looked up, as it costs 40 us."""
    return int(item_seeds(0, 0, np.array([index]), np.array([0]))[0])


class WithPillow(torch.utils.data.Dataset):
    """The common dataset: Pillow, then float32, then the operators of `chain` behind the first two, as written."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(self.chain.source.read(index))).convert("RGB")
        value, seed = ops.to_float(np.asarray(image)), seed_of(index)
        for stage in self.chain.stages[2:]:
            value = stage.function(value, generator(seed, stage.id)) if stage.random else stage.function(value)
        return torch.from_numpy(np.ascontiguousarray(value.transpose(2, 0, 1)))


def processes(dataset: torch.utils.data.Dataset) -> torch.utils.data.DataLoader:
    """Return torch's loader with two workers."""
    return torch.utils.data.DataLoader(dataset, BATCH, num_workers=2)


def cpu_ms(make) -> tuple[float, torch.Tensor]:
    """Return the CPU milliseconds per image of one epoch, workers included, and its first batch."""
    before, first = os.times(), None
    for batch in make():
        data = batch["data"] if isinstance(batch, dict) else batch
        first = data.clone() if first is None else first
    after = os.times()  # the workers have ended and were waited for
    return 1000 * (sum(after[:4]) - sum(before[:4])) / LENGTH, first


def measured(makers: dict, rounds: int) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Return the figures of every round, interleaved, and the first batches."""
    figures: dict[str, list[float]] = {name: [] for name in makers}
    batches = {}
    for _ in range(rounds):
        for name, make in makers.items():
            spent, batches[name] = cpu_ms(make)
            figures[name].append(spent)
    return figures, batches


def ratios(figures: dict[str, list[float]], of: str, to: str) -> list[float]:
    """Return of / to of every round, sorted."""
    return sorted(a / b for a, b in zip(figures[of], figures[to], strict=True))


def main() -> int:
    """Measure the pipeline; print one JSON line."""
    rounds, source = 9 if "--full" in sys.argv else 4, Repeated()
    seven = Pipeline(source).decode().to_float().jitter().greyscale().blur(commutes=True).normalise(*GREY)
    seven = seven.crop(*SIZE).flip().batch(BATCH)
    best = seven.plan(profile=seven.profile(64))
    threads = {"num_workers": 2, "workers": "threads"}
    long, batches = measured({
        "planned": lambda: seven.loader(best, **threads),
        "written": lambda: seven.loader(**threads),
        "pillow": lambda: processes(WithPillow(Chain(source, seven.stages))),
    }, rounds)  # fmt: skip
    assert torch.equal(batches["written"], batches["pillow"]), "Pillow"
    inside = (..., slice(5, -5), slice(5, -5))
    assert torch.allclose(batches["planned"][inside], batches["written"][inside], atol=1e-5), "order"
    found = {
        "written_over_planned": ratios(long, "written", "planned"),
        "pillow_over_planned": ratios(long, "pillow", "planned"),
    }
    middle = {name: statistics.median(values) for name, values in found.items()}
    ok = middle["written_over_planned"] >= 1.7 and middle["pillow_over_planned"] >= 2.7
    print(json.dumps({
        "bench": "image_pipeline", "images": LENGTH, "order": [seven.ops()[op].name for op in best.order],
        "cpu_ms_per_image": {name: round(statistics.median(values), 3) for name, values in long.items()},
        "ratio": {name: round(value, 3) for name, value in middle.items()},
        "ratio_range": {name: [round(values[0], 3), round(values[-1], 3)] for name, values in found.items()},
        "predicted_written_over_planned": round(best.baseline_s / best.cost_s, 2),
        "baseline": f"torch {torch.__version__} DataLoader, Pillow {Image.__version__}",
        "claim": ">=1.7 of the written order, >=2.7 of the DataLoader", "met": bool(ok),
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
