"""Input data: where its time goes, what wins it back, and a loader whose place in the data survives anything.

Public names are resolved on first use, through one literal table; only those of the loader need torch.

>>> import headway.data
>>> headway.data.permute.__module__
'headway.data.order'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.data.order import permute as permute
    from headway.data.runtime.loader import DataLoader as DataLoader
    from headway.data.runtime.loader import DatasetChangedError as DatasetChangedError

PUBLIC: dict[str, str] = {
    "DataLoader": "headway.data.runtime.loader:DataLoader",
    "DatasetChangedError": "headway.data.runtime.loader:DatasetChangedError",
    "permute": "headway.data.order:permute",
}
"""Every lazily loaded public name -> "module:attribute"."""


def __getattr__(name: str) -> object:
    """Resolve a public name on first use (PEP 562)."""
    target = PUBLIC.get(name)
    if target is None:
        raise AttributeError(f"module 'headway.data' has no attribute {name!r}; it has: {', '.join(sorted(PUBLIC))}")
    module, attribute = target.split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*globals(), *PUBLIC])
