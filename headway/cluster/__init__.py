"""Queues of training jobs: policies, simulated, and a service that shares devices by them; recorded queues.

Public names are resolved on first use, through one literal table; `consolidate` alone needs torch.
`fit_speed` needs scipy, the extra `cluster`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.cluster.adaptive.decide import elastic as elastic
    from headway.cluster.adaptive.speed import NoiseScale as NoiseScale
    from headway.cluster.adaptive.speed import fit_speed as fit_speed
    from headway.cluster.max_min import leximin as leximin
    from headway.cluster.max_min import maxmin as maxmin
    from headway.cluster.model import Cluster as Cluster
    from headway.cluster.model import Jobs as Jobs
    from headway.cluster.model import Rates as Rates
    from headway.cluster.model import Resize as Resize
    from headway.cluster.policies import POLICIES as POLICIES
    from headway.cluster.queue.compare import compare_policies as compare_policies
    from headway.cluster.queue.engine import simulate as simulate
    from headway.cluster.queue.recorded_rates import fit_rates as fit_rates
    from headway.cluster.service.server import EXECUTORS as EXECUTORS
    from headway.runtime.torch_state import consolidate as consolidate

PUBLIC: dict[str, str] = {
    "Cluster": "headway.cluster.model:Cluster",
    "EXECUTORS": "headway.cluster.service.server:EXECUTORS",
    "NoiseScale": "headway.cluster.adaptive.speed:NoiseScale",
    "Jobs": "headway.cluster.model:Jobs",
    "Rates": "headway.cluster.model:Rates",
    "Resize": "headway.cluster.model:Resize",
    "POLICIES": "headway.cluster.policies:POLICIES",
    "compare_policies": "headway.cluster.queue.compare:compare_policies",
    "consolidate": "headway.runtime.torch_state:consolidate",
    "elastic": "headway.cluster.adaptive.decide:elastic",
    "fit_speed": "headway.cluster.adaptive.speed:fit_speed",
    "fit_rates": "headway.cluster.queue.recorded_rates:fit_rates",
    "leximin": "headway.cluster.max_min:leximin",
    "maxmin": "headway.cluster.max_min:maxmin",
    "simulate": "headway.cluster.queue.engine:simulate",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
