"""Where people run their training: notebooks, and the trainers of other libraries.

Importing this package loads no trainer: each callback is made when its name
is first used, and imports its own library then. docs/notebooks-and-trainers.md
shows how to use them.

>>> import sys, headway.integrations
>>> sorted(headway.integrations.PUBLIC)
['KerasCallback', 'LightningCallback', 'TransformersCallback']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.integrations.keras import KerasCallback as KerasCallback
    from headway.integrations.lightning import LightningCallback as LightningCallback
    from headway.integrations.transformers import TransformersCallback as TransformersCallback

PUBLIC: dict[str, str] = {
    "KerasCallback": "headway.integrations.keras:KerasCallback",
    "LightningCallback": "headway.integrations.lightning:LightningCallback",
    "TransformersCallback": "headway.integrations.transformers:TransformersCallback",
}
"""Callback -> "module:class". Its library must be installed; headway does not ask for it."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
