"""Thirty ways to train under 'comm.compress': equal on all ranks, or refused and as plain; no model is kept alive.

Claim: each job on two ranks ends under the remedy, with a codec drawn for it, with parameters equal on both ranks, or
the remedy says why it is refused and the digits are those of plain torch. Of twelve models, wrapped one after the
other, none is alive at the end, and there are as many threads as after the third. Peer: the same job without it.

`python benchmarks/compress_jobs.py NAME ...` runs some of them; without names a few, `--full` all.
"""

import gc
import json
import os
import random
import sys
import weakref
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.guard_jobs import LIMIT_S, TOGETHER, Run, applied, ddp, digits_of, sgd, simple
from headway.comm.compression.torch_codecs import Codec
from tests.made.pool import RankFailedError, RankPool

CODECS = ("half", "sign", "topk:0.1", "randomk:0.2", "shared-randomk:0.2", "dither:4", "natural:4", "int8")
FAILING = "failing"
DEFAULT = ("ddp", "sparse", "complex", "counted", FAILING, "twelve")


class Words(torch.nn.Module):
    """An embedding in front of a net."""

    def __init__(self, net, **options):
        super().__init__()
        self.words, self.net = torch.nn.Embedding(50, 8, **options), net

    def forward(self, x):
        return self.net(self.words((x[:, 0].abs() * 10).long().clamp(max=49)))


class Turned(torch.nn.Module):
    """A net behind a complex factor."""

    def __init__(self, net):
        super().__init__()
        self.factor, self.net = torch.nn.Parameter(torch.ones(8, dtype=torch.complex64)), net

    def forward(self, x):
        return self.net((x * self.factor).real)


def wrapped(run, net):
    """Train a net by way of DDP."""
    return simple(run, net, ddp(net), sgd(net.parameters()))


def tied(run, net):
    net[2] = torch.nn.Linear(8, 8)
    net[2].weight = net[0].weight
    return wrapped(run, net)


def doubled(run, net):
    return wrapped(run, torch.nn.Sequential(net[0], net[1], net[2]).to(torch.bfloat16).float())


def own_hook(run, net, after=0):
    """The script registers a hook of its own, at once or behind some steps."""
    model, run.steps = ddp(net), 20
    if after:
        simple(run, net, model, sgd(net.parameters()))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return simple(run, net, model, sgd(net.parameters()))


def failing(run, net):
    """One rank cannot encode from some step on."""
    encode, calls = Codec.encode, iter(range(1000))

    def broken(self, *arguments):
        if run.rank == 1 and next(calls) > 12:
            raise MemoryError("no room")
        return encode(self, *arguments)

    Codec.encode = broken
    return wrapped(run, net)


def twelve(run, net):
    """Wrap one model after the other; the parameters that count are how many are left."""
    alive, threads, run.steps = [], [], 3
    for _ in range(12):
        own = run.net()
        alive.append(weakref.ref(own))
        wrapped(run, own)
        del own
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    left = [sum(one() is not None for one in alive), threads[-1] - threads[2]]
    net[0].weight.data.fill_(left[0]), net[0].bias.data.fill_(left[1])
    return net


MORE = {
    "sparse": lambda r, n: wrapped(r, Words(n, sparse=True)),
    "dense_words": lambda r, n: wrapped(r, Words(n)),
    "complex": lambda r, n: wrapped(r, Turned(n)),
    "counted": wrapped,
    FAILING: failing,
    "tied": tied,
    "doubled": doubled,
    "own_hook": own_hook,
    "own_hook_later": lambda r, n: own_hook(r, n, after=10),
    "twelve": twelve,
}
"""Job -> what it does, beside those of the guard."""

REFUSED = ("sparse", "complex", "own_hook", FAILING)
"""Jobs of which the remedy has to say that it does not act."""


def rank_of_job(name, is_compressed):
    """Train on this rank; return its parameters, and why the remedy is refused."""
    run, context = Run(None), None
    if is_compressed:
        codec = {"counted": "topk:30", FAILING: "half"}.get(name) or random.Random(name).choice(CODECS)
        parameters = {"codec": codec, "min_bytes": 0}
        context = applied(run.rank, "comm.compress", parameters, "headway.comm.remedies:REMEDIES")
    net = {**TOGETHER, **MORE}[name](run, run.net())
    return digits_of(net), context and context.outcomes[-1].json()["reason_not_applied"]


def trial(pool, name):
    """Return what is wrong with a job under the remedy, nothing where all is well."""
    try:
        plain, found = (pool.run(rank_of_job, 2, name, on, timeout_s=LIMIT_S) for on in (False, True))
    except RankFailedError as error:
        return [f"died or hung: {str(error).strip().splitlines()[-1]}"]
    before, after = ([str(rank[0]) for rank in one] for one in (plain, found))
    wrong = ["other digits, and not equal on all ranks"] if before != after and after[0] != after[1] else []
    wrong += ["not finite"] if "nan" in "".join(after) else []
    wrong += ["nothing says that it is refused"] if name in REFUSED and not all(rank[1] for rank in found) else []
    wrong += ["refused, and other digits"] if name in REFUSED and name != FAILING and before != after else []
    wrong += ["models or threads are left"] if name == "twelve" and before != after else []
    return wrong


def main():
    """Run jobs, and print one JSON line; 3 where the claim is missed."""
    names = [one for one in sys.argv[1:] if one != "--full"] or list(DEFAULT)
    names = [*TOGETHER, *MORE] if "--full" in sys.argv else names
    pool = RankPool()
    wrong = {name: found for name in names if (found := trial(pool, name))}
    claim = "wrong == {}: equal on all ranks, or refused and as plain"
    print(json.dumps({"bench": "compress_jobs", "jobs": len(names), "wrong": wrong, "claim": claim}))
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
