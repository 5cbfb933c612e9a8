"""CPU per image of headway's threads, against the common DataLoader and against the same operators in processes (L1).

Claims: decode, random crop to 224 x 224 and flip, as uint8 into the batch by two threads (a `Pipeline`, and a
`DataLoader(workers="threads")` over a map-style dataset), take at most 0.40 of the CPU of the common DataLoader
(Pillow, float32 per example, two worker processes), and at most 0.80 of the same operators, uint8, in two worker
processes. Decoded pixels must be equal; batches equal bit by bit, but for Pillow's resize, which rounds otherwise (mean
difference below two levels). Loaders are made once and read for several epochs. CPU of all processes, from the kernel's
own account; rounds interleaved, their order alternating; other jobs only ever add time, so a side is judged by its
cheapest round. `parts_ms` says where the CPU of one example goes, without any loader.
"""

import json
import os
import resource
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import io

import numpy as np
import torch
from image_pipeline import BATCH, LENGTH, SIZE, Repeated, WithPillow, processes, seed_of
from PIL import Image

from headway.data import DataLoader, Pipeline
from headway.data.pipeline import torch_ops as ops
from headway.data.pipeline.chain import Chain, generator

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


class CropWithPillow(WithPillow):
    """The common dataset of the short pipeline: Pillow decodes, crops, resizes; then float32."""

    def __getitem__(self, index: int) -> torch.Tensor:
        image, seed = Image.open(io.BytesIO(self.chain.source.read(index))).convert("RGB"), seed_of(index)
        top, left, high, wide = ops.random_window(
            image.height, image.width, generator(seed, 2), scale=SCALE, ratio=RATIO
        )
        image = image.resize(SIZE[::-1], Image.Resampling.BILINEAR, box=(left, top, left + wide, top + high))
        if generator(seed, 3).random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(ops.to_float(np.asarray(image)).transpose(2, 0, 1).copy())


class SameOps(WithPillow):
    """headway's operators, an example at a time, for torch's worker processes."""

    def __getitem__(self, index: int) -> torch.Tensor:
        value = self.chain.run(index, seed_of(index))
        return torch.from_numpy(np.ascontiguousarray(value.transpose(2, 0, 1)))


class Whole(SameOps):
    """The same operators as a map-style dataset for threads: [height, width, channels] tensors, without a copy."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.chain.run(index, seed_of(index)))


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of its children that have ended."""
    spent = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def epoch(loader) -> tuple[float, torch.Tensor]:
    """Return the CPU milliseconds per image of one epoch, and its first batch as uint8 or float [B, H, W, C]."""
    before, first = cpu_seconds(), None
    for batch in loader:
        data = batch["data"] if isinstance(batch, dict) else batch
        if first is None:
            first = data.clone()
    del batch
    spent = cpu_seconds() - before
    return 1000 * spent / LENGTH, first if first.shape[-1] == 3 else first.permute(0, 2, 3, 1)


def parts_ms(chain: Chain, examples: int = 96) -> dict[str, float]:
    """Return the CPU milliseconds of each operator, and of one example through all of them."""
    spent: dict[str, list[float]] = {stage.name: [] for stage in chain.stages} | {"together": []}
    for index in range(examples):
        timed = chain.timed(index, seed_of(index))
        for stage in chain.stages:
            spent[stage.name].append(timed[stage.id][0])
        start = time.thread_time()
        chain.run(index, seed_of(index))
        spent["together"].append(time.thread_time() - start)
    return {name: round(1000 * statistics.median(values), 3) for name, values in spent.items()}


def check_decoders(source: Repeated) -> None:
    """Raise when Pillow and simplejpeg decode an image to other pixels."""
    for index in range(8):
        theirs = np.asarray(Image.open(io.BytesIO(source.read(index))).convert("RGB"))
        assert np.array_equal(ops.decode(source.read(index)), theirs), f"the decoders differ on image {index}"


def main() -> int:
    """Measure the four; print one JSON line."""
    torch.set_num_threads(1)
    rounds, source = 15 if "--full" in sys.argv else 7, Repeated()
    check_decoders(source)
    _ = [seed_of(index) for index in range(LENGTH)]  # worker processes inherit them
    pipeline = Pipeline(source).decode().resized_crop(*SIZE, scale=SCALE, ratio=RATIO).flip().batch(BATCH)
    chain, threads = Chain(source, pipeline.stages), {"num_workers": 2, "workers": "threads"}
    loaders = {
        "pipeline": pipeline.loader(**threads),
        "dataset": DataLoader(Whole(chain), BATCH, **threads),
        "processes": processes(SameOps(chain)),
        "pillow": processes(CropWithPillow(chain)),
    }
    figures: dict[str, list[float]] = {name: [] for name in loaders}
    batches = {}
    for k in range(rounds):
        for name in list(loaders) if k % 2 else reversed(loaders):
            spent, first = epoch(loaders[name])
            batches.setdefault(name, first)  # of the first epoch: a pipeline draws anew in each
            figures[name].append(spent)
    assert torch.equal(batches["pipeline"], batches["processes"]), "pipeline"
    assert torch.equal(batches["dataset"], batches["processes"]), "dataset"
    gap = (255 * batches["pillow"] - batches["pipeline"].float()).abs().mean()
    assert gap < 2, f"Pillow's pixels differ by {gap:.2f} levels"
    found = {
        f"{ours}_over_{theirs}": sorted(a / b for a, b in zip(figures[ours], figures[theirs], strict=True))
        for ours in ("pipeline", "dataset")
        for theirs in ("pillow", "processes")
    }
    least = {name: min(values) for name, values in figures.items()}
    ratio = {name: least[name.split("_")[0]] / least[name.split("_")[-1]] for name in found}
    ok = all(value <= (0.40 if name.endswith("pillow") else 0.80) for name, value in ratio.items())
    print(json.dumps({
        "bench": "loader_cpu", "images": LENGTH, "rounds": rounds, "load": round(os.getloadavg()[0], 1),
        "cpu_ms_per_image": {name: round(value, 3) for name, value in least.items()},
        "parts_ms": parts_ms(chain), "ratio": {name: round(value, 3) for name, value in ratio.items()},
        "ratio_median": {name: round(statistics.median(values), 3) for name, values in found.items()},
        "ratio_range": {name: [round(values[0], 3), round(values[-1], 3)] for name, values in found.items()},
        "baseline": f"torch {torch.__version__} DataLoader, Pillow {Image.__version__}",
        "claim": "<=0.40 of Pillow, <=0.80 of processes", "met": ok,
    }))  # fmt: skip
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
