"""Failures of a training job: who failed, what to do then, how fast the job goes on, and what all that costs.

Public names are resolved on first use, through one literal table; none of them needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.fault.incident import Incident as Incident
    from headway.fault.ladder import ACTIONS as ACTIONS
    from headway.fault.ladder import decide as decide

PUBLIC: dict[str, str] = {
    "ACTIONS": "headway.fault.ladder:ACTIONS",
    "Incident": "headway.fault.incident:Incident",
    "decide": "headway.fault.ladder:decide",
}
"""Public name -> "module:function"."""

__getattr__, __dir__ = lazily(__name__, PUBLIC)
