"""Queues of training jobs: policies, simulated; what a recorded queue suffered, and what each would have made of it.

Public names are resolved on first use, through one literal table; none of them needs torch. `fit_speed` needs scipy,
the extra `cluster`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.cluster.adaptive.knapsack import elastic as elastic
    from headway.cluster.adaptive.noise import NoiseScale as NoiseScale
    from headway.cluster.adaptive.speed import fit_speed as fit_speed
    from headway.cluster.compare import compare_policies as compare_policies
    from headway.cluster.engine import simulate as simulate
    from headway.cluster.estimate import fit_rates as fit_rates
    from headway.cluster.model import Cluster as Cluster
    from headway.cluster.model import Jobs as Jobs
    from headway.cluster.model import Rates as Rates
    from headway.cluster.model import Resize as Resize
    from headway.cluster.policies.table import POLICIES as POLICIES
    from headway.cluster.programs.leximin import leximin as leximin
    from headway.cluster.programs.maxmin import maxmin as maxmin

PUBLIC: dict[str, str] = {
    "Cluster": "headway.cluster.model:Cluster",
    "NoiseScale": "headway.cluster.adaptive.noise:NoiseScale",
    "Jobs": "headway.cluster.model:Jobs",
    "Rates": "headway.cluster.model:Rates",
    "Resize": "headway.cluster.model:Resize",
    "POLICIES": "headway.cluster.policies.table:POLICIES",
    "compare_policies": "headway.cluster.compare:compare_policies",
    "elastic": "headway.cluster.adaptive.knapsack:elastic",
    "fit_speed": "headway.cluster.adaptive.speed:fit_speed",
    "fit_rates": "headway.cluster.estimate:fit_rates",
    "leximin": "headway.cluster.programs.leximin:leximin",
    "maxmin": "headway.cluster.programs.maxmin:maxmin",
    "simulate": "headway.cluster.engine:simulate",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
