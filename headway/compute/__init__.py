"""What useful time could be: the operations of a model, and what the kernels of a device are.

Public names are resolved on first use, through one literal table; only `count_flops` needs torch.

>>> sorted(PUBLIC)
['CLASSES', 'classify', 'count_flops']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.compute.gains import CLASSES as CLASSES
    from headway.compute.gains import classify as classify
    from headway.compute.torch_flops import count_flops as count_flops

PUBLIC: dict[str, str] = {
    "CLASSES": "headway.compute.gains:CLASSES",
    "classify": "headway.compute.gains:classify",
    "count_flops": "headway.compute.torch_flops:count_flops",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
