"""The purity probe: may this dataset's examples be kept, or be made in another process?

A dataset is pure when reading an example changes nothing and depends on
nothing but its index. The probe reads a few examples twice and looks for every
difference it can see: between the results, in the random number states, in
the dataset's own attributes. It restores what it disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headway.core.machine.interruptions import pass_on
from headway.data.bytes.torch_examples import decode, encode, equal, memory
from headway.data.bytes.torch_keyed import generator_states, set_generators
from headway.data.guard.outcome import OfDataset
from headway.data.guard.picture import picture
from headway.runtime.script.draws import drawn, fingerprints, own_generators, restorer

SEEDED = {"random", "numpy", "torch"}
"""Generators that torch seeds in each loader worker, differently from all others."""


def impurity(
    dataset: Any, indices: Sequence[int], holders: Sequence[Any] = (), *, may_draw: bool = False, fresh: bool = False
) -> str | None:
    """Say why the examples of `dataset` may not be kept, or None when the probe found nothing.

    Reads each of `indices` twice. An exception of the dataset is a finding, not a failure. With `may_draw`, it may
    draw from the generators that torch seeds anew in each worker: then equal draws must give equal examples.
    `holders` may have generators of their own, which count as the dataset's. `fresh`: each reading must return memory
    of its own, as what another process made has: else a loop that changes one batch, or keeps it, would see.
    """
    own = own_generators(dataset, *holders)
    states, before, restore_own = generator_states(), fingerprints(own), restorer(own)
    try:
        for index in indices:
            if may_draw:
                set_generators(states)
            first = dataset[index]
            attributes = picture(dataset)  # after the first reading: opening a file lazily is no impurity
            found = drawn(before, fingerprints(own))
            if may_draw:
                set_generators(states)
            second = _read_as_a_worker_would(dataset, index)
            found = sorted({*found, *drawn(before, fingerprints(own))})
            if found and not (may_draw and {*found} <= SEEDED):
                return OfDataset(f"reading example {index} draws random numbers")
            if not equal(first, second):
                if may_draw:
                    set_generators(states)
                if torch.get_num_threads() > 1 and equal(first, dataset[index]):
                    return f"reading example {index} with one intra-op thread, as workers do, gives another result"
                return OfDataset(f"reading example {index} twice gave two different results")
            if fresh and memory(first) & memory(second):
                return f"reading example {index} returns memory that the dataset keeps, or uses again"
            if picture(dataset) != attributes:
                return OfDataset(f"reading example {index} changes attributes of the dataset")
            if not equal(decode(encode(first)), first):
                return f"a copy of example {index} is not equal to it: it holds objects that a pickle does not keep"
    except Exception as failure:
        pass_on(failure)
        return f"reading an example in a test process raised {type(failure).__name__}: {failure}"
    finally:
        set_generators(states)
        restore_own()
    return None


def _read_as_a_worker_would(dataset: Any, index: int) -> Any:
    """Read with one intra-op thread, as loader workers do: a sum over more threads may differ in its last bit."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return dataset[index]
    finally:
        torch.set_num_threads(num_threads)
