"""What `headway ckpt ls`, `prune` and `verify --all` do where the checkpoints lie in a bucket."""

from __future__ import annotations

import time
from typing import Any

from headway.checkpoint.keep import Keep
from headway.core.errors import DamageError, FormatError
from headway.storage.checks.verification import VerifyReport, verify_store
from headway.storage.object_commit import CommittedObject, committed, recover, remove
from headway.storage.stored.stores import open_store


def rows(url: str) -> list[dict[str, Any]]:
    """Return a row of `headway ckpt ls` for each checkpoint below a URL."""
    return [_row(one) for one in committed(open_store(url))]


def _row(one: CommittedObject) -> dict[str, Any]:
    record = one.record
    return {
        "step": one.step,
        "path": one.url,
        "format": "headway",
        "created_unix_s": record.created_unix_s,
        "age_s": max(0.0, time.time() - record.created_unix_s),
        "num_bytes": sum(open_store(one.url).list().values()),
        "world_size": record.world_size,
        "attempt": record.attempt,
        "redundancy": record.redundancy,
        "redundancy_status": "none",
        "parity": "none",
        "root": record.root,
        "verified_unix_s": None,
        "verified": None,
    }


def reports(url: str, *, deep: bool) -> list[VerifyReport]:
    """Verify every checkpoint below a URL."""
    return [verify_store(open_store(one.url), deep=deep) for one in committed(open_store(url))]


def prune(url: str, rule: Keep, *, yes: bool) -> dict[str, Any]:
    """Return what `headway ckpt prune` answers, and with `yes` do it: the newest intact checkpoint stays."""
    store = open_store(url)
    found = committed(store)
    by_step = {one.step: one for one in found}
    surplus = rule.disposable(by_step, lambda step: _intact(by_step[step]))
    goes = [one for one in found if one.step in surplus]
    freed = sum(sum(open_store(one.url).list().values()) for one in goes)
    leftovers: list[str] = []
    if yes:
        for one in goes:
            remove(store, one)
        leftovers = recover(store)
    return {
        "schema": "headway.ckpt.prune/1", "root": url, "removed": yes, "steps": [one.step for one in goes],
        "kept": [one.step for one in found if one.step not in surplus],
        "spared": sorted(rule.surplus(by_step) - surplus), "num_bytes": freed, "leftovers": leftovers,
    }  # fmt: skip


def _intact(one: CommittedObject) -> bool:
    """Say whether a checkpoint may be relied on."""
    try:
        return verify_store(open_store(one.url)).status in ("good", "repairable")
    except (FormatError, DamageError):
        return False
