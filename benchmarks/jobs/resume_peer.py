"""Ask one loader (headway, torchdata) to go on after an interruption; prints {kind of case: {items, bits}}.

The interruption comes after 5 of 12 steps of the second epoch. "items": the same items in the same global batches as in
the job that was not interrupted; "bits": with the same random numbers, too.
"""

import json
import pickle
import sys

from augmented import Augmented, rows

N, BATCH, STEPS = 96, 8, 5
KINDS = {
    "same job": ((1, 2), (1, 2)),
    "no workers": ((1, 0), (1, 0)),
    "other worker count": ((1, 2), (1, 1)),
    "other world size": ((2, 0), (1, 0)),
    "both": ((1, 2), (2, 0)),
}
"""Kind -> (world size, workers) before and after."""


def headway_ranks(world, workers):
    """Return the loaders of all ranks."""
    from headway.data import DataLoader

    return [
        DataLoader(Augmented(N), BATCH // world, True, num_workers=workers, rank=r, world_size=world)
        for r in range(world)
    ]


def torchdata_ranks(world, workers):
    """The same as its documentation has it: a DistributedSampler where there are several ranks."""
    import torch
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(0)
    options = {"num_workers": workers}
    if world == 1:
        return [StatefulDataLoader(Augmented(N), BATCH, shuffle=True, **options)]
    return [
        StatefulDataLoader(Augmented(N), BATCH // world, sampler=DistributedSampler(range(N), world, r), **options)
        for r in range(world)
    ]


def step(iterators):
    """Return the global batch of one step, in no order: what was delivered, not to whom."""
    return sorted(row for iterator in iterators for row in rows(next(iterator)))


def begin(ranks, epoch):
    """Begin an epoch on every rank."""
    for loader in ranks:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
    return [iter(loader) for loader in ranks]


def exact(make, before, after):
    """Interrupt, go on elsewhere, compare with the job that was not interrupted."""
    whole = make(*before)
    list(zip(*begin(whole, 0), strict=True))
    iterators = begin(whole, 1)
    for _ in range(STEPS):
        step(iterators)
    state = pickle.dumps(whole[0].state_dict())
    expected = [step(iterators) for _ in range(N // BATCH - STEPS)]
    later = make(*after)
    for loader in later:
        loader.load_state_dict(pickle.loads(state))
    iterators = begin(later, 1)
    got = [step(iterators) for _ in range(N // BATCH - STEPS)]
    items = [[[row[0] for row in batch] for batch in batches] for batches in (got, expected)]
    return {"items": items[0] == items[1], "bits": got == expected}


def main():
    """Ask every kind; an exception counts as a failure."""
    make = {"headway": headway_ranks, "torchdata": torchdata_ranks}[sys.argv[1]]
    answer = {}
    for kind, (before, after) in KINDS.items():
        try:
            answer[kind] = exact(make, before, after)
        except Exception as failure:
            print(f"{kind}: {type(failure).__name__}: {failure}", file=sys.stderr)
            answer[kind] = {"items": False, "bits": False, "error": type(failure).__name__}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
