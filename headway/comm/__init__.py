"""Floor 5, communication: DDP's buckets and flags, compressed gradients, the order of all-gathers, faster links.

Public names are resolved on first use, through one literal table; all but `OPTIONS` need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.comm.options import OPTIONS as OPTIONS
    from headway.comm.runtime.codecs.table import CODECS as CODECS
    from headway.comm.runtime.compress import compress as compress
    from headway.comm.runtime.lans import Lans as Lans

EXACT_RANKS = 2
"""Of so many ranks the sum of gradients is the same in any order."""

PUBLIC: dict[str, str] = {
    "CODECS": "headway.comm.runtime.codecs.table:CODECS",
    "OPTIONS": "headway.comm.options:OPTIONS",
    "Lans": "headway.comm.runtime.lans:Lans",
    "compress": "headway.comm.runtime.compress:compress",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
