"""The model itself: a trained one grows without loss.

Public names are resolved on first use, through one literal table; only `grow` needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.model.growth.families import FAMILIES as FAMILIES
    from headway.model.growth.schedule import growth_schedule as growth_schedule
    from headway.model.runtime.grow import grow as grow

PUBLIC: dict[str, str] = {
    "FAMILIES": "headway.model.growth.families:FAMILIES",
    "grow": "headway.model.runtime.grow:grow",
    "growth_schedule": "headway.model.growth.schedule:growth_schedule",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
