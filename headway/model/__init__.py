"""The model itself: a trained one grows without loss, a run tunes its settings, unlike devices serve one.

Public names are resolved on first use, through one literal table; only `grow` and `Tuner` need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.model.growth.apply import grow as grow
    from headway.model.growth.families import FAMILIES as FAMILIES
    from headway.model.growth.sizes import growth_schedule as growth_schedule
    from headway.model.precision.allocation import allocate as allocate
    from headway.model.serving.plan import serve_plan as serve_plan
    from headway.model.tuning.search import summarise as summarise
    from headway.model.tuning.space import Choice as Choice
    from headway.model.tuning.space import Range as Range
    from headway.model.tuning.torch_tuner import Tuner as Tuner

PUBLIC: dict[str, str] = {
    "Choice": "headway.model.tuning.space:Choice",
    "FAMILIES": "headway.model.growth.families:FAMILIES",
    "Range": "headway.model.tuning.space:Range",
    "Tuner": "headway.model.tuning.torch_tuner:Tuner",
    "allocate": "headway.model.precision.allocation:allocate",
    "grow": "headway.model.growth.apply:grow",
    "growth_schedule": "headway.model.growth.sizes:growth_schedule",
    "serve_plan": "headway.model.serving.plan:serve_plan",
    "summarise": "headway.model.tuning.search:summarise",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
