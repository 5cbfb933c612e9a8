"""Ask one loader to go on after interruptions; prints {case: what was delivered, measured}.

`python resume_loaders.py NAME FOLDER NUM_LARGE`. A job reads epochs of 96 examples in global batches of 8. It is
stopped in its second epoch, its state is pickled, and other processes, one per rank, go on through the third: their
batches are compared with those of the job that nobody stopped. Each loader is used as its documentation has it, with
what it has for several ranks; where it leaves random numbers to the process, the process saves its generators with the
state, as trainers do.
"""

import itertools
import json
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
from collections import Counter

import numpy as np
import torch
from augmented import Augmented, rows
from load_images import without_torchvision_operators

N, BATCH, SEED = 96, 8, 0
STEPS = N // BATCH
CASES = {
    "same job, 2 workers": ((1, 2, STEPS + 5), (1, 2, None)),
    "same job, no workers": ((1, 0, STEPS + 5), (1, 0, None)),
    "world size 2 to 1": ((2, 0, STEPS + 5), (1, 0, None)),
    "world size 1 to 2 to 4": ((1, 0, STEPS + 4), (2, 0, 4), (4, 0, None)),
    "workers 2 to 0": ((1, 2, STEPS + 5), (1, 0, None)),
    "workers 0 to 2": ((1, 0, STEPS + 5), (1, 2, None)),
    "state taken with the last batch": ((1, 0, 2 * STEPS), (1, 0, None)),
}
"""Case -> lives of (world size, workers, steps before the state is taken)."""
STATES = ("state_dict", "get_state", "save_state")
"""How loaders call the method that returns their state."""
UNTIL = 3 * STEPS
"""Steps of the whole job: the epoch of the interruption, and one behind it."""


class Range:
    """`num_items` numbers, read a batch at a time where a loader can."""

    def __init__(self, num_items):
        self.num_items = num_items

    def __len__(self):
        return self.num_items

    def __getitem__(self, item):
        return (item,)

    def __getitems__(self, items):
        return [(item,) for item in items]


def generators():
    """Return the states of the process's generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def begun(loader, states):
    """Return an iterator; the process's generators go to `states` behind its making, which draws a seed for workers."""
    iterator = iter(loader)
    if states is not None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    return iterator


class WithOwnDraw(Augmented):
    """Examples with one more random number, of the loader's own generator."""

    def __getitem__(self, item):
        from headway.data import generator

        return *super().__getitem__(item), generator().random()


class Headway:
    """headway's DataLoader: rank and world size are all that it is told."""

    draws = True

    def __init__(self, dataset, batch, rank, world, workers):
        from headway.data import DataLoader

        dataset = WithOwnDraw(N) if isinstance(dataset, Augmented) else dataset
        options = {"num_workers": workers, "rank": rank, "world_size": world, "seed": SEED}
        self.loader = DataLoader(dataset, batch // world, True, **options)

    def state(self):
        return self.loader.state_dict()

    def load(self, state):
        self.loader.load_state_dict(state)

    def begin(self, epoch):
        """Return the batches of the next epoch, or of the rest of one."""
        return self.loader

    def resumed(self, num_items):
        """Return the state after `num_items` items of this epoch."""
        return {**self.state(), "position": num_items}


class BesideGenerators:
    """A loader with a state, and the process's generators saved beside it."""

    loader = None
    states = None

    def begin(self, epoch):
        states, self.states = self.states, None
        return begun(self.loader, states)

    def state(self):
        return self.loader.state_dict(), generators()

    def load(self, state):
        self.loader.load_state_dict(state[0])
        self.states = state[1]


class Torchdata(BesideGenerators):
    """torchdata's StatefulDataLoader with its StatefulDistributedSampler."""

    def __init__(self, dataset, batch, rank, world, workers):
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        self.sampler = StatefulDistributedSampler(dataset, world, rank, seed=SEED)
        self.loader = StatefulDataLoader(dataset, batch // world, sampler=self.sampler, num_workers=workers)

    def begin(self, epoch):
        self.sampler.set_epoch(epoch)
        return super().begin(epoch)

    def resumed(self, num_items):
        """Read that far: the state says how, and nobody else may."""
        for _ in itertools.islice(self.begin(0), num_items // self.loader.batch_size):
            pass
        return self.state()


class Grain:
    """Grain's ElasticIterator, made for changes of the world size, over an endless dataset; `random_map` draws, too."""

    draws = True

    def __init__(self, dataset, batch, rank, world, workers):
        import grain

        examples = grain.MapDataset.source(dataset).seed(SEED).shuffle().repeat()
        examples = examples.random_map(lambda row, rng: (*row, rng.random()))
        options = {"read_options": grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)}
        if workers:
            options["multiprocessing_options"] = grain.MultiprocessingOptions(num_workers=workers)
        shards = grain.sharding.ShardOptions(rank, world)
        self.loader = grain.experimental.ElasticIterator(examples, batch, shards, **options)
        self.iterator, self.steps, self.loaded = None, 0, None

    def begin(self, epoch):
        if self.iterator is None:
            place, self.steps, states = self.loaded or (None, 0, None)
            self.iterator = begun(self.loader, states)
            if place is not None:
                self.iterator.set_state(place)
        for _ in range(STEPS - self.steps % STEPS):
            self.steps += 1
            yield next(self.iterator)

    def state(self):
        return self.iterator.get_state(), self.steps, generators()

    def load(self, state):
        self.loaded = state

    def resumed(self, num_items):
        """Return the state with another count of items, its only entry."""
        next(self.begin(0))
        ((key, _),) = self.iterator.get_state().items()
        return {key: num_items}, 0, generators()


class Streaming(BesideGenerators):
    """MosaicML's StreamingDataset, under its StreamingDataLoader."""

    def __init__(self, dataset, batch, rank, world, workers):
        from streaming import StreamingDataLoader, StreamingDataset

        class Read(StreamingDataset):
            def __getitem__(self, place):
                return dataset[super().__getitem__(place)["i"]]

        data = Read(local=f"{FOLDER}/{len(dataset)}", shuffle=True, shuffle_seed=SEED, batch_size=batch // world)
        self.loader = StreamingDataLoader(data, batch_size=batch // world, num_workers=workers)

    def resumed(self, num_items):
        """Return the state with another count of items."""
        next(iter(self.loader))
        state, states = self.state()
        return {**state, "sample_in_epoch": num_items}, states


def write_streams(sizes):
    """Write datasets of so many numbers in Streaming's format."""
    without_torchvision_operators()
    from streaming import MDSWriter

    for num_items in sizes:
        with MDSWriter(out=f"{FOLDER}/{num_items}", columns={"i": "int"}) as writer:
            for k in range(num_items):
                writer.write({"i": k})


class Torch:
    """torch's own loader."""

    def __init__(self, dataset, batch, rank, world, workers):
        loader = torch.utils.data.DataLoader(dataset, batch, shuffle=True)
        self.parts = loader, iter(loader)


class WebDataset:
    """WebDataset's loader over its pipeline."""

    def __init__(self, dataset, batch, rank, world, workers):
        import webdataset

        with webdataset.TarWriter(f"{FOLDER}/shard.tar") as shard:
            for k in range(len(dataset)):
                shard.write({"__key__": f"{k:06}", "i.cls": k})
        pipeline = webdataset.WebDataset(f"{FOLDER}/shard.tar", shardshuffle=False).batched(batch)
        loader = webdataset.WebLoader(pipeline, batch_size=None)
        self.parts = pipeline, loader, iter(loader)


class SPDL:
    """SPDL's loader."""

    def __init__(self, dataset, batch, rank, world, workers):
        from spdl.dataloader import DataLoader

        loader = DataLoader(range(len(dataset)), batch_size=batch, num_threads=1)
        self.parts = loader, iter(loader)


class Ray:
    """Ray Data's dataset and iterator."""

    def __init__(self, dataset, batch, rank, world, workers):
        import ray

        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=FOLDER)
        numbers = ray.data.range(len(dataset))
        iterator = numbers.iterator()
        self.parts = numbers, iterator, iter(iterator.iter_batches(batch_size=batch))


LOADERS = {
    "headway": Headway, "torchdata": Torchdata, "grain": Grain, "streaming": Streaming, "torch": Torch,
    "webdataset": WebDataset, "spdl": SPDL, "ray": Ray,
}  # fmt: skip


def in_process(work, *arguments):
    """Start `work` in a process forked from this one; returns it and a queue of its answer, or of what it raised."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def run():
        try:
            answers.put(work(*arguments))
        except Exception as failure:
            answers.put(
                failure if isinstance(failure, RefusedError) else RefusedError(f"{type(failure).__name__}: {failure}")
            )
        answers.close()
        answers.join_thread()
        os._exit(0)  # whatever threads and processes the loader left behind

    process = context.Process(target=run)
    process.start()
    return process, answers


class RefusedError(Exception):
    """What a loader raised."""


def answer_of(process, answers):
    """Return the answer; raises `RefusedError`."""
    found = answers.get(timeout=100)
    process.join(30)
    process.kill()
    if isinstance(found, RefusedError):
        raise found
    return found


def live(make, rank, world, workers, life):
    """Go on from the life's state for its steps."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    loader = make(Augmented(N), BATCH, rank, world, workers)
    epoch, steps = life["epoch"], life["steps"]
    if life["state"] is not None:
        loader.load(pickle.loads(life["state"]))
    epochs, state, taken = [], None, 0
    while taken < steps:
        epochs.append([])
        for batch in loader.begin(epoch):
            epochs[-1].append(rows(batch))
            taken += 1
            if taken == steps:
                state = pickle.dumps(loader.state())
                break
        else:
            epoch += 1
        if len(epochs) > steps + 2:
            raise RuntimeError("its epochs are empty")
    return epochs, state, epoch


def lived(make, world, workers, life):
    """Run the ranks of one life; returns (global batches of each epoch, state, epoch). Raises what a rank raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        ranks.append(in_process(live, make, rank, world, workers, life))
    found = [answer_of(*rank) for rank in ranks]
    epochs = []
    for parts in itertools.zip_longest(*(found[rank][0] for rank in range(world)), fillvalue=[]):
        steps = itertools.zip_longest(*parts, fillvalue=[])
        epochs.append([sorted(row for part in step for row in part) for step in steps])
    return epochs, found[0][1], found[0][2]


def interrupted(make, lives):
    """Return [the global batches of each life's epochs]. Raises what a rank raised."""
    found, state, epoch, taken = [], None, 0, 0
    for world, workers, steps in lives:
        life = {"state": state, "epoch": epoch, "steps": UNTIL - taken if steps is None else steps}
        epochs, state, epoch = lived(make, world, workers, life)
        taken += life["steps"]
        found.append(epochs)
    return found


def judged(lives, whole):
    """Say how the batches of `lives` differ from the `whole` job's; and whether the loader's own draws do."""
    batches = [batch for epochs in lives for epoch in epochs for batch in epoch]
    expected = [batch for epoch in whole for batch in epoch]

    def same(part):
        return [[row[part] for row in batch] for batch in batches] == [
            [row[part] for row in batch] for batch in expected
        ]

    if not same(slice(0, 1)):
        return said(interrupted_epoch(lives)), False
    return "exact" if same(slice(0, 4)) else "batches exact, draws differ", same(slice(4, None))


def interrupted_epoch(lives):
    """Return the items of the epoch that was interrupted: its part of the first life, what later lives added to it."""
    items = [row[0] for batch in lives[0][-1] for row in batch]
    for epochs in lives[1:]:
        if len(items) >= N:
            break  # it was complete: what follows is the next epoch's
        items += [row[0] for batch in epochs[0] for row in batch]
        if len(epochs) > 1:
            break  # it ended within this life
    return items


def said(items):
    """Say which items came more than once, and which never."""
    counts = Counter(items)
    repeated, lost = sum(count - 1 for count in counts.values()), N - len(counts)
    if not repeated and not lost:
        return "each once, other batches"
    return ", ".join(f"{verb} {number}" for verb, number in (("repeats", repeated), ("loses", lost)) if number)


def table(make):
    """Return {case: cell}."""
    cells, wholes, different = {}, {}, []
    for case, lives in CASES.items():
        try:
            before = lives[0][:2]
            if before not in wholes:
                wholes[before] = interrupted(make, [(*before, None)])[0]
            cells[case], own = judged(interrupted(make, lives), wholes[before])
        except RefusedError as refusal:
            cells[case], own = f"refuses: {str(refusal).strip().splitlines()[-1][:150]}", False
        different += [] if own else [case]
    own = f"differ: {', '.join(different)}" if different else "exact in all of them"
    return {**cells, "draws of the loader's own generator": own if hasattr(make, "draws") else "not offered"}


def large(make, num_items):
    """Return what a state half way through `num_items` items weighs, and how long going on from it takes."""
    size, cpu_s = answer_of(*in_process(resumed_in, make, num_items))
    return {"state, bytes": size, "time to resume, CPU ms": round(1000 * cpu_s, 1)}


def resumed_in(make, num_items):
    """Return the bytes of a state half way through `num_items` items, and the CPU seconds from there to a batch."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    state = make(Range(num_items), 256, 0, 1, 0).resumed(num_items // 512 * 256)
    size = len(pickle.dumps(state[0] if isinstance(state, tuple) else state))  # without the process's generators
    state = pickle.dumps(state)
    begin = time.process_time()
    loader = make(Range(num_items), 256, 0, 1, 0)
    loader.load(pickle.loads(state))
    next(iter(loader.begin(0)))
    return size, time.process_time() - begin


def main():
    """Ask; a loader without state says so."""
    torch.set_num_threads(1)
    torch.set_vital = lambda *_: None  # torchdata calls it, torch 2.13 warns
    answers, sys.stdout = sys.stdout, sys.stderr
    name, num_large = sys.argv[1], int(sys.argv[3])
    make = LOADERS[name]
    if not hasattr(make, "load"):
        parts = make(Augmented(N), BATCH, 0, 1, 0).parts
        found = [f"{type(part).__name__}.{name}" for part in parts for name in STATES if hasattr(part, name)]
        print(json.dumps({"offers": found}), file=answers, flush=True)
        return
    if make is Streaming:
        write_streams({N, num_large})
    print(json.dumps({"cells": {**table(make), **large(make, num_large)}}), file=answers)


if __name__ == "__main__":
    FOLDER = sys.argv[2]
    main()
