"""One loader of `loader_peers.py` in a process of its own: answers each line that it reads with one epoch's cost.

`python load_images.py NAME FOLDER NUM_IMAGES`. FOLDER holds images/*.jpg and shards/*.tar, the same files. Every loader
reads from there, decodes, crops, resizes and flips with headway's operators and the same draws per image; batches of 32
uint8 images, two workers. Lines in: "check" answers with [images, digest of all pixels], "epoch" with [images, CPU
seconds of this process and its children]. Each preparation adds a byte to the file $PREPARED, if it is set.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headway.data.bytes.account import usage
from headway.data.stalls.torch_costs import BATCH, WAYS, Prepared, digest, prepared, read

WORKERS = 2
ROUNDS = 1_000_000
"""Epochs that endless loaders are told to go on for."""


class Files:
    """The folder's images, by number; each reading adds a byte to the file $PREPARED, if it is set."""

    def __init__(self, folder, num_images):
        self.paths = [f"{folder}/images/{k:06}.jpg" for k in range(num_images)]
        self.counted = os.environ.get("PREPARED")

    def __len__(self):
        return len(self.paths)

    def read(self, index):
        counted(self.counted)
        return Path(self.paths[index]).read_bytes()


def counted(path):
    """Note that an image is read to be prepared: jobs that share would do it once."""
    if path:
        with open(path, "ab", buffering=0) as file:
            file.write(b".")


def ours_or_torch(folder, num_images, way):
    """One of the ways that `headway data bench` measures."""
    return WAYS[way](Files(folder, num_images), WORKERS)


def torchdata_loader(folder, num_images):
    """torchdata's loader with state, its worker processes kept."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    images = Prepared(Files(folder, num_images))
    loader = StatefulDataLoader(images, BATCH, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield loader


def stacked(pairs):
    """Return examples as a batch (SPDL leaves it to the user)."""
    return np.stack([image for image, _ in pairs]), np.array([index for _, index in pairs])


def spdl_threads(folder, num_images):
    """SPDL's pipeline: threads prepare images in the order of the source, one stacks them."""
    from spdl.pipeline import PipelineBuilder

    images = Prepared(Files(folder, num_images))
    while True:
        builder = PipelineBuilder().add_source(range(num_images))
        builder = builder.pipe(images.__getitem__, concurrency=WORKERS, output_order="input")
        builder = builder.aggregate(BATCH).pipe(stacked).add_sink(4)
        pipeline = builder.build(num_threads=WORKERS)
        with pipeline.auto_stop():
            yield pipeline.get_iterator()


def grain_threads(folder, num_images):
    """Grain reading with threads."""
    import grain

    images = grain.MapDataset.source(Prepared(Files(folder, num_images))).batch(BATCH)
    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * WORKERS)
    while True:
        yield images.to_iter_dataset(options)


def grain_processes(folder, num_images):
    """Grain's worker processes; one epoch behind the other, so that they are started once."""
    import grain

    images = grain.MapDataset.source(Prepared(Files(folder, num_images))).batch(BATCH).repeat(ROUNDS)
    endless = images.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    endless = iter(endless.mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS)))
    while True:
        yield (next(endless) for _ in range(num_images // BATCH))


def webdataset_loader(folder, num_images):
    """WebDataset over the shards, batched in the workers, as its documentation has it."""
    import webdataset

    def loaded(example):
        index = int(example["__key__"])
        counted(os.environ.get("PREPARED"))
        return torch.from_numpy(prepared(example["jpg"], index)), index

    shards = sorted(str(path) for path in Path(folder, "shards").glob("*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=False).map(loaded).batched(BATCH)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield loader


def streaming_loader(folder, num_images):
    """MosaicML Streaming over shards of its own format, under its own loader."""
    without_torchvision_operators()
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    shards = tempfile.mkdtemp(dir=folder)
    with MDSWriter(out=shards, columns={"index": "int", "jpeg": "bytes"}) as writer:
        for k in range(num_images):
            writer.write({"index": k, "jpeg": Path(f"{folder}/images/{k:06}.jpg").read_bytes()})

    class Streamed(StreamingDataset):
        def __getitem__(self, place):
            row = super().__getitem__(place)
            counted(os.environ.get("PREPARED"))
            return prepared(row["jpeg"], row["index"]), row["index"]

    dataset = Streamed(local=shards, shuffle=False, batch_size=BATCH)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield loader


def without_torchvision_operators():
    """Let `import streaming` pass beside a CPU build of torch, for which pip has no torchvision with its operators.

    Streaming needs torchvision's Python part only.
    """
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")


def ray_dataset(folder, num_images):
    """Ray Data on two cores: files read and prepared by its tasks, batches out of its object store."""
    import ray

    ray.init(
        num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=500_000_000, _temp_dir=tempfile.mkdtemp(dir=folder),
    )  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False

    path_counted = os.environ.get("PREPARED")

    def loaded(batch):
        ids = [int(Path(path).stem) for path in batch["path"]]
        for _ in ids:
            counted(path_counted)
        return {"data": np.stack([prepared(*pair) for pair in zip(batch["bytes"], ids, strict=True)]), "ids": ids}

    images = ray.data.read_binary_files(f"{folder}/images", include_paths=True).map_batches(loaded, batch_size=BATCH)
    while True:
        yield ((batch["data"], batch["ids"]) for batch in images.iter_batches(batch_size=BATCH))


LOADERS = {
    **{way: partial(ours_or_torch, way=way) for way in WAYS},
    "torchdata StatefulDataLoader": torchdata_loader,
    "SPDL, threads": spdl_threads,
    "Grain, threads": grain_threads,
    "Grain, processes": grain_processes,
    "WebDataset": webdataset_loader,
    "MosaicML Streaming": streaming_loader,
    "Ray Data": ray_dataset,
}
"""Name -> generator of epochs, each of which yields batches (images, indices)."""
ENDLESS = ("Grain, processes",)
"""Those whose epochs are cut out of one long stream."""


def main():
    """Answer lines until there are none."""
    torch.set_num_threads(1)
    name, folder, num_images = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers, sys.stdout = sys.stdout, sys.stderr  # loaders print, too
    epochs, before = LOADERS[name](folder, num_images), 0.0
    for line in sys.stdin:
        images, found = {"check": digest, "epoch": read}[line.strip()](next(epochs))
        if name in ENDLESS:  # they read ahead between our questions, too
            before, found = usage()["cpu_s"], found if line.strip() == "check" else usage()["cpu_s"] - before
        print(json.dumps([images, found]), file=answers, flush=True)


if __name__ == "__main__":
    main()
