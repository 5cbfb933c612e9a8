"""Checkpoints: a save that costs one memory copy, a restore on any layout, and an interval that keeps a budget.

Public names are resolved on first use, through one literal table; those that touch tensors need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.checkpoint.costs import young_daly as young_daly
    from headway.checkpoint.keep import Keep as Keep
    from headway.checkpoint.policy import CheckpointPolicy as CheckpointPolicy
    from headway.checkpoint.policy import PolicyReport as PolicyReport
    from headway.checkpoint.policy import StepTiming as StepTiming
    from headway.checkpoint.reads import Shard as Shard
    from headway.checkpoint.reads import plan_reads as plan_reads
    from headway.checkpoint.runtime.calls import async_save as async_save
    from headway.checkpoint.runtime.calls import load as load
    from headway.checkpoint.runtime.calls import own_group as own_group
    from headway.checkpoint.runtime.calls import save as save
    from headway.checkpoint.runtime.engine import Checkpointer as Checkpointer
    from headway.checkpoint.runtime.planner import HeadwayPlanner as HeadwayPlanner
    from headway.checkpoint.runtime.plugins import HeadwayReader as HeadwayReader
    from headway.checkpoint.runtime.plugins import HeadwayWriter as HeadwayWriter
    from headway.checkpoint.runtime.restore import RestoreReport as RestoreReport
    from headway.checkpoint.runtime.restore import restore_into as restore_into
    from headway.checkpoint.runtime.shards import FlatShard as FlatShard
    from headway.checkpoint.runtime.stager import HeadwayStager as HeadwayStager
    from headway.checkpoint.runtime.tickets import Commit as Commit
    from headway.checkpoint.runtime.tickets import SaveTicket as SaveTicket
    from headway.storage.boxes import flat_to_boxes as flat_to_boxes

PUBLIC: dict[str, str] = {
    "Shard": "headway.checkpoint.reads:Shard",
    "plan_reads": "headway.checkpoint.reads:plan_reads",
    "restore_into": "headway.checkpoint.runtime.restore:restore_into",
    "RestoreReport": "headway.checkpoint.runtime.restore:RestoreReport",
    "Checkpointer": "headway.checkpoint.runtime.engine:Checkpointer",
    "Keep": "headway.checkpoint.keep:Keep",
    "SaveTicket": "headway.checkpoint.runtime.tickets:SaveTicket",
    "Commit": "headway.checkpoint.runtime.tickets:Commit",
    "FlatShard": "headway.checkpoint.runtime.shards:FlatShard",
    "flat_to_boxes": "headway.storage.boxes:flat_to_boxes",
    "CheckpointPolicy": "headway.checkpoint.policy:CheckpointPolicy",
    "PolicyReport": "headway.checkpoint.policy:PolicyReport",
    "StepTiming": "headway.checkpoint.policy:StepTiming",
    "HeadwayPlanner": "headway.checkpoint.runtime.planner:HeadwayPlanner",
    "HeadwayReader": "headway.checkpoint.runtime.plugins:HeadwayReader",
    "HeadwayStager": "headway.checkpoint.runtime.stager:HeadwayStager",
    "HeadwayWriter": "headway.checkpoint.runtime.plugins:HeadwayWriter",
    "async_save": "headway.checkpoint.runtime.calls:async_save",
    "load": "headway.checkpoint.runtime.calls:load",
    "own_group": "headway.checkpoint.runtime.calls:own_group",
    "save": "headway.checkpoint.runtime.calls:save",
    "young_daly": "headway.checkpoint.costs:young_daly",
}
"""Every lazily loaded public name -> "module:attribute"."""


__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
