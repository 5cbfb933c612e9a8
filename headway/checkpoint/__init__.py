"""Checkpoints: a save that costs one memory copy, a restore on any layout, and an interval that keeps a budget.

Public names are resolved on first use, through one literal table; those that touch tensors need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.checkpoint.costs import young_daly as young_daly
    from headway.checkpoint.engine import Checkpointer as Checkpointer
    from headway.checkpoint.layout.reads import Shard as Shard
    from headway.checkpoint.layout.reads import plan_reads as plan_reads
    from headway.checkpoint.policy import CheckpointPolicy as CheckpointPolicy
    from headway.checkpoint.policy import Keep as Keep
    from headway.checkpoint.policy import PolicyReport as PolicyReport
    from headway.checkpoint.policy import StepTiming as StepTiming
    from headway.checkpoint.restores.restore import RestoreReport as RestoreReport
    from headway.checkpoint.restores.restore import restore_into as restore_into
    from headway.checkpoint.saves.tickets import Commit as Commit
    from headway.checkpoint.saves.tickets import SaveTicket as SaveTicket
    from headway.checkpoint.state.shards import FlatShard as FlatShard
    from headway.checkpoint.torch_dcp.calls import HeadwayPlanner as HeadwayPlanner
    from headway.checkpoint.torch_dcp.calls import async_save as async_save
    from headway.checkpoint.torch_dcp.calls import load as load
    from headway.checkpoint.torch_dcp.calls import own_group as own_group
    from headway.checkpoint.torch_dcp.calls import save as save
    from headway.checkpoint.torch_dcp.plugins import HeadwayReader as HeadwayReader
    from headway.checkpoint.torch_dcp.plugins import HeadwayWriter as HeadwayWriter
    from headway.checkpoint.torch_dcp.stager import HeadwayStager as HeadwayStager
    from headway.storage.boxes import flat_to_boxes as flat_to_boxes

PUBLIC: dict[str, str] = {
    "Shard": "headway.checkpoint.layout.reads:Shard",
    "plan_reads": "headway.checkpoint.layout.reads:plan_reads",
    "restore_into": "headway.checkpoint.restores.restore:restore_into",
    "RestoreReport": "headway.checkpoint.restores.restore:RestoreReport",
    "Checkpointer": "headway.checkpoint.engine:Checkpointer",
    "Keep": "headway.checkpoint.policy:Keep",
    "SaveTicket": "headway.checkpoint.saves.tickets:SaveTicket",
    "Commit": "headway.checkpoint.saves.tickets:Commit",
    "FlatShard": "headway.checkpoint.state.shards:FlatShard",
    "flat_to_boxes": "headway.storage.boxes:flat_to_boxes",
    "CheckpointPolicy": "headway.checkpoint.policy:CheckpointPolicy",
    "PolicyReport": "headway.checkpoint.policy:PolicyReport",
    "StepTiming": "headway.checkpoint.policy:StepTiming",
    "HeadwayPlanner": "headway.checkpoint.torch_dcp.calls:HeadwayPlanner",
    "HeadwayReader": "headway.checkpoint.torch_dcp.plugins:HeadwayReader",
    "HeadwayStager": "headway.checkpoint.torch_dcp.stager:HeadwayStager",
    "HeadwayWriter": "headway.checkpoint.torch_dcp.plugins:HeadwayWriter",
    "async_save": "headway.checkpoint.torch_dcp.calls:async_save",
    "load": "headway.checkpoint.torch_dcp.calls:load",
    "own_group": "headway.checkpoint.torch_dcp.calls:own_group",
    "save": "headway.checkpoint.torch_dcp.calls:save",
    "young_daly": "headway.checkpoint.costs:young_daly",
}
"""Every lazily loaded public name -> "module:attribute"."""


__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
