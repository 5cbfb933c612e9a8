"""Floor 5, communication: DDP's buckets and flags, compressed gradients, matmuls that hide collectives, faster links.

Public names are resolved on first use, through one literal table; all but `OPTIONS` and `OVERLAPS` need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.comm.compression.apply import compress as compress
    from headway.comm.compression.options import OPTIONS as OPTIONS
    from headway.comm.compression.torch_codecs import CODECS as CODECS
    from headway.comm.compression.torch_lans import Lans as Lans
    from headway.comm.overlap.torch_ring import ag_matmul as ag_matmul
    from headway.comm.overlap.torch_ring import matmul_rs as matmul_rs
    from headway.comm.skew.advise import SkewController as SkewController
    from headway.comm.skew.torch_replica import loose as loose
    from headway.comm.skew.torch_replica import swap_norm as swap_norm
    from headway.comm.skew.torch_rules import LOOSE as LOOSE
    from headway.cost.collectives import OVERLAPS as OVERLAPS

EXACT_RANKS = 2
"""Of so many ranks the sum of gradients is the same in any order."""

PUBLIC: dict[str, str] = {
    "CODECS": "headway.comm.compression.torch_codecs:CODECS",
    "OPTIONS": "headway.comm.compression.options:OPTIONS",
    "Lans": "headway.comm.compression.torch_lans:Lans",
    "compress": "headway.comm.compression.apply:compress",
    "OVERLAPS": "headway.cost.collectives:OVERLAPS",
    "ag_matmul": "headway.comm.overlap.torch_ring:ag_matmul",
    "matmul_rs": "headway.comm.overlap.torch_ring:matmul_rs",
    "LOOSE": "headway.comm.skew.torch_rules:LOOSE",
    "SkewController": "headway.comm.skew.advise:SkewController",
    "loose": "headway.comm.skew.torch_replica:loose",
    "swap_norm": "headway.comm.skew.torch_replica:swap_norm",
}
"""Public name -> "module:attribute"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
