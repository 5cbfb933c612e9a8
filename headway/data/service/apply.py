"""Remedy: a data server prepares the examples of an unmodified script's loader, once for all jobs that read them.

The script's loader is followed by headway's with `server="auto"`: the first
job on the host starts the server, others with an equal dataset join. Every
job still gets each of its examples once per epoch, in a random order of its
own; it is another order than torch's, with other random draws, so the user
has to allow it (`result-equivalent`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from headway.core.machine.interruptions import pass_on
from headway.data.bytes import account
from headway.data.guard.decisions import NOT_TRIED, Decisions, budget_of
from headway.data.guard.outcome import OutcomeWriter, impure
from headway.data.guard.trial import unfit
from headway.data.guard.verification import Verification, verification_of
from headway.data.loader.loader import DataLoader as OwnLoader
from headway.data.loader.read_ahead import bound_to_the_loop, pass_restorer
from headway.data.remedies import ServerParameters
from headway.data.service.stock import DataServer
from headway.data.service.torch_served import Served
from headway.data.workers.hand_over import AsWritten, failure
from headway.runtime.host.host_memory import host_memory
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.script.draws import sampler_of

MOST_LOADERS = 64
"""A script that makes more loaders than this reads the rest by itself."""


def server(parameters: ServerParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy.

    Whether a given loader takes it is decided when that loader is first read, and reported then.
    """
    total_bytes = host_memory()["memory_total_bytes"]
    if total_bytes is not None and parameters.cache_bytes > total_bytes:
        return RefusedRemedy(
            "data.server",
            f"its cache_bytes of {parameters.cache_bytes:.4g} is more than this host's memory of {total_bytes:.4g} "
            "bytes: give less in the plan",
        )
    options = DataServer(cache_bytes=parameters.cache_bytes, idle_s=parameters.idle_s)
    report = OutcomeWriter("data.server", parameters, context)
    share = LoaderSharing(
        options, report, verification=verification_of(context), decisions=Decisions(budget_of(context))
    )
    context.patch(
        "torch.utils.data.dataloader:DataLoader._get_iterator", share.around_get_iterator, restoring=pass_restorer
    )
    return Applied("data.server", parameters.to_json())


def followed(loader: DataLoader[Any], options: DataServer, decisions: Decisions | None = None) -> OwnLoader | str:
    """Return headway's loader that gives what `loader` gives, from a server; or say why there is none.

    `decisions` know what was tried before; without them the loader is tried now.
    """
    reason = bound_to_the_loop(loader)
    if reason is not None:
        return reason
    if loader.worker_init_fn is not None or loader.persistent_workers:
        return "it prepares or keeps worker processes of its own (worker_init_fn, persistent_workers)"
    order = _order(loader)
    if order is None:
        return f"its {type(sampler_of(loader)).__name__} does not give each example once"
    finding = (decisions or Decisions()).result(loader, lambda: unfit(loader, may_draw=True)[0])
    if finding == NOT_TRIED:
        return finding
    if finding:
        return impure(finding, loader.dataset)
    own = OwnLoader(
        loader.dataset, loader.batch_size, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
        timeout=loader.timeout, server=options, seed=torch.initial_seed() >> 1, **order,
    )  # fmt: skip
    if len(own) != len(loader):
        return f"its epoch would have {len(own)} batches and not {len(loader)}"
    return own


def _order(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Return shuffle, place and tail as headway's loader takes them; None for an order that no server gives."""
    sampler = sampler_of(loader)
    if type(sampler) is DistributedSampler:
        tail = "drop" if sampler.drop_last or loader.drop_last else "pad"
        return {"shuffle": sampler.shuffle, "rank": sampler.rank, "world_size": sampler.num_replicas, "tail": tail}
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return None
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return None
    return {
        "shuffle": type(sampler) is RandomSampler, "rank": 0, "world_size": 1, "drop_last": loader.drop_last,
    }  # fmt: skip


@dataclass(slots=True)
class LoaderSharing:
    """Decides loader by loader. One per rank."""

    options: DataServer
    """How the first job starts the server."""
    report: OutcomeWriter
    """Called when something about a loader was decided."""
    decided: WeakKeyDictionary[DataLoader[Any], OwnLoader | None] = field(default_factory=WeakKeyDictionary)
    """Loader -> the one that is read in its place, None when it is left alone."""
    num_tried: int = 0
    """Loaders decided on so far."""
    verification: Verification | None = None
    """Compares batches with what the script's dataset gives for their indices; None where nobody asked for it."""
    decisions: Decisions = field(default_factory=Decisions)
    """What was tried, by the facts of loaders."""

    def around_get_iterator(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader._get_iterator`: hand out the iterator of the loader that follows it."""

        def _get_iterator(loader: DataLoader[Any]) -> Any:
            own = self._following(loader)
            if own is None:
                return original(loader)
            account.describe(workers="server")
            if self.verification is None:
                return self._served(loader, own)
            return self.verification.following(
                loader, lambda: self._served(loader, own), self.report, self._leave, own_workers=0, may_draw=True
            )

        return _get_iterator

    def _served(self, loader: DataLoader[Any], own: OwnLoader) -> Any:
        """Return the iterator of the loader that follows; of a job of one rank, one that fails leaves the rest here."""
        iterator = iter(own)

        def leave(cause: Exception, indices: Iterator[Any]) -> AsWritten:
            self._leave(loader, "")
            known = {**self.report.names(loader), "had_it": True}
            self.report({**known, "reason_not_applied": failure(cause)})
            return AsWritten(loader, indices)

        if isinstance(iterator, Served) and iterator.is_alone:
            iterator.leave = leave
        return iterator

    def _leave(self, loader: DataLoader[Any], reason: str) -> None:
        """Let the next pass over a loader be the script's own."""
        self.decided[loader] = None

    def _following(self, loader: DataLoader[Any]) -> OwnLoader | None:
        """Decide on a loader that is new. A failure leaves it alone."""
        if loader not in self.decided:
            try:
                found = (
                    followed(loader, self.options, self.decisions)
                    if self.num_tried < MOST_LOADERS
                    else "there are too many"
                )
            except Exception as failure:
                pass_on(failure)
                found = f"{type(failure).__name__}: {failure}"
            facts = self.report.names(loader)
            reason = found if isinstance(found, str) else None
            self.report({**facts, **({"reason_not_applied": reason} if reason else {"server": "auto"})})
            if found == NOT_TRIED:  # a later pass may try
                return None
            self.num_tried += 1
            self.decided[loader] = None if isinstance(found, str) else found
        return self.decided[loader]
