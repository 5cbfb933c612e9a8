"""Floor 5, parallel training: pipeline schedules, partitions of a model, and what they win.

Public names are loaded on first use; what runs on ranks (pipeline, PipelineRunner, GradientReshard, ...) needs torch.

>>> sorted(PUBLIC)
['ElasticPlan', 'GradientReshard', 'LayerGraph', 'PipelineProgram', 'PipelineRunner', 'ReplicaGroups', \
'SCHEDULES', 'ShardMap', 'StageGraph', 'Topology', 'bubbles', 'check', 'fill_gaps', 'fit_fill', 'lower', 'pipeline', \
'replan', 'replicate', 'reroute', 'search', 'split_together', 'take_units']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.parallel.availability import ShardMap as ShardMap
    from headway.parallel.availability import split_together as split_together
    from headway.parallel.elastic_plan import ElasticPlan as ElasticPlan
    from headway.parallel.elastic_plan import replan as replan
    from headway.parallel.fill.gaps import fit_fill as fit_fill
    from headway.parallel.fill.queue import bubbles as bubbles
    from headway.parallel.fill.torch_rehearsal import fill_gaps as fill_gaps
    from headway.parallel.pipelining.torch_runner import PipelineRunner as PipelineRunner
    from headway.parallel.pipelining.torch_runner import pipeline as pipeline
    from headway.parallel.planning.hierarchical import Topology as Topology
    from headway.parallel.planning.hierarchical import search as search
    from headway.parallel.planning.layers import LayerGraph as LayerGraph
    from headway.parallel.rerouted import replicate as replicate
    from headway.parallel.rerouted import reroute as reroute
    from headway.parallel.torch_reshard import GradientReshard as GradientReshard
    from headway.parallel.torch_reshard import ReplicaGroups as ReplicaGroups
    from headway.parallel.torch_reshard import take_units as take_units
    from headway.sim.pipeline.actions import PipelineProgram as PipelineProgram
    from headway.sim.pipeline.actions import StageGraph as StageGraph
    from headway.sim.pipeline.lower import check as check
    from headway.sim.pipeline.lower import lower as lower
    from headway.sim.pipeline.schedules import SCHEDULES as SCHEDULES

PUBLIC: dict[str, str] = {
    "ElasticPlan": "headway.parallel.elastic_plan:ElasticPlan",
    "GradientReshard": "headway.parallel.torch_reshard:GradientReshard",
    "LayerGraph": "headway.parallel.planning.layers:LayerGraph",
    "PipelineProgram": "headway.sim.pipeline.actions:PipelineProgram",
    "PipelineRunner": "headway.parallel.pipelining.torch_runner:PipelineRunner",
    "ReplicaGroups": "headway.parallel.torch_reshard:ReplicaGroups",
    "SCHEDULES": "headway.sim.pipeline.schedules:SCHEDULES",
    "ShardMap": "headway.parallel.availability:ShardMap",
    "StageGraph": "headway.sim.pipeline.actions:StageGraph",
    "Topology": "headway.parallel.planning.hierarchical:Topology",
    "bubbles": "headway.parallel.fill.queue:bubbles",
    "fill_gaps": "headway.parallel.fill.torch_rehearsal:fill_gaps",
    "check": "headway.sim.pipeline.lower:check",
    "fit_fill": "headway.parallel.fill.gaps:fit_fill",
    "lower": "headway.sim.pipeline.lower:lower",
    "pipeline": "headway.parallel.pipelining.torch_runner:pipeline",
    "replan": "headway.parallel.elastic_plan:replan",
    "replicate": "headway.parallel.rerouted:replicate",
    "reroute": "headway.parallel.rerouted:reroute",
    "search": "headway.parallel.planning.hierarchical:search",
    "split_together": "headway.parallel.availability:split_together",
    "take_units": "headway.parallel.torch_reshard:take_units",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
