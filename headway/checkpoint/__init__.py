"""Checkpoints: a save that costs one memory copy, a restore on any layout, and an interval that keeps a budget.

Public names are resolved on first use, through one literal table; those that touch tensors need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.checkpoint.policies.costs import young_daly as young_daly
    from headway.checkpoint.policies.keep import Keep as Keep
    from headway.checkpoint.policies.policy import CheckpointPolicy as CheckpointPolicy
    from headway.checkpoint.policies.policy import PolicyReport as PolicyReport
    from headway.checkpoint.policies.policy import StepTiming as StepTiming
    from headway.checkpoint.reading.reads import Shard as Shard
    from headway.checkpoint.reading.reads import plan_reads as plan_reads
    from headway.checkpoint.runtime.engine import Checkpointer as Checkpointer
    from headway.checkpoint.runtime.images.shards import FlatShard as FlatShard
    from headway.checkpoint.runtime.restores.restore import RestoreReport as RestoreReport
    from headway.checkpoint.runtime.restores.restore import restore_into as restore_into
    from headway.checkpoint.runtime.saves.tickets import Commit as Commit
    from headway.checkpoint.runtime.saves.tickets import SaveTicket as SaveTicket
    from headway.checkpoint.runtime.torch_calls.calls import async_save as async_save
    from headway.checkpoint.runtime.torch_calls.calls import load as load
    from headway.checkpoint.runtime.torch_calls.calls import own_group as own_group
    from headway.checkpoint.runtime.torch_calls.calls import save as save
    from headway.checkpoint.runtime.torch_calls.planner import HeadwayPlanner as HeadwayPlanner
    from headway.checkpoint.runtime.torch_calls.plugins import HeadwayReader as HeadwayReader
    from headway.checkpoint.runtime.torch_calls.plugins import HeadwayWriter as HeadwayWriter
    from headway.checkpoint.runtime.torch_calls.stager import HeadwayStager as HeadwayStager
    from headway.storage.stored.boxes import flat_to_boxes as flat_to_boxes

PUBLIC: dict[str, str] = {
    "Shard": "headway.checkpoint.reading.reads:Shard",
    "plan_reads": "headway.checkpoint.reading.reads:plan_reads",
    "restore_into": "headway.checkpoint.runtime.restores.restore:restore_into",
    "RestoreReport": "headway.checkpoint.runtime.restores.restore:RestoreReport",
    "Checkpointer": "headway.checkpoint.runtime.engine:Checkpointer",
    "Keep": "headway.checkpoint.policies.keep:Keep",
    "SaveTicket": "headway.checkpoint.runtime.saves.tickets:SaveTicket",
    "Commit": "headway.checkpoint.runtime.saves.tickets:Commit",
    "FlatShard": "headway.checkpoint.runtime.images.shards:FlatShard",
    "flat_to_boxes": "headway.storage.stored.boxes:flat_to_boxes",
    "CheckpointPolicy": "headway.checkpoint.policies.policy:CheckpointPolicy",
    "PolicyReport": "headway.checkpoint.policies.policy:PolicyReport",
    "StepTiming": "headway.checkpoint.policies.policy:StepTiming",
    "HeadwayPlanner": "headway.checkpoint.runtime.torch_calls.planner:HeadwayPlanner",
    "HeadwayReader": "headway.checkpoint.runtime.torch_calls.plugins:HeadwayReader",
    "HeadwayStager": "headway.checkpoint.runtime.torch_calls.stager:HeadwayStager",
    "HeadwayWriter": "headway.checkpoint.runtime.torch_calls.plugins:HeadwayWriter",
    "async_save": "headway.checkpoint.runtime.torch_calls.calls:async_save",
    "load": "headway.checkpoint.runtime.torch_calls.calls:load",
    "own_group": "headway.checkpoint.runtime.torch_calls.calls:own_group",
    "save": "headway.checkpoint.runtime.torch_calls.calls:save",
    "young_daly": "headway.checkpoint.policies.costs:young_daly",
}
"""Every lazily loaded public name -> "module:attribute"."""


__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
