"""Power that a site can bear: how a job's power swings, what the grid allows, and what makes it fit.

Public names are resolved on first use, through one literal table; none of them needs torch.

>>> sorted(PUBLIC)
['GridSpec', 'PowerModel', 'check', 'optimise', 'smooth', 'store']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.cost.power import PowerModel as PowerModel
    from headway.power.advise import optimise as optimise
    from headway.power.grid_spec import GridSpec as GridSpec
    from headway.power.grid_spec import check as check
    from headway.power.smoothing import smooth as smooth
    from headway.power.smoothing import store as store

PUBLIC: dict[str, str] = {
    "PowerModel": "headway.cost.power:PowerModel",
    "GridSpec": "headway.power.grid_spec:GridSpec",
    "check": "headway.power.grid_spec:check",
    "optimise": "headway.power.advise:optimise",
    "smooth": "headway.power.smoothing:smooth",
    "store": "headway.power.smoothing:store",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
