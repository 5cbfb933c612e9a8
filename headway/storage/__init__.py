"""Bytes at rest: checkpoints that commit atomically, are known to be intact, and survive the loss of what holds them.

Public names are resolved on first use, through one literal table; none of them needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.storage.afr import AfrModel as AfrModel
    from headway.storage.boxes import flat_to_boxes as flat_to_boxes
    from headway.storage.dirty import DirtyTracker as DirtyTracker
    from headway.storage.erasure import RS as RS
    from headway.storage.fleet import Fleet as Fleet
    from headway.storage.fleet_sim import Dgroup as Dgroup
    from headway.storage.nvm import NvmStats as NvmStats
    from headway.storage.nvm import simulate_nvm as simulate_nvm
    from headway.storage.nvm_design import NvmDesign as NvmDesign
    from headway.storage.protected import ProtectedRegion as ProtectedRegion
    from headway.storage.schemes import mttdl_hours as mttdl_hours
    from headway.storage.schemes import mttdl_parallel_hours as mttdl_parallel_hours
    from headway.storage.schemes import tolerated_afr as tolerated_afr
    from headway.storage.verification import verify as verify

PUBLIC: dict[str, str] = {
    "flat_to_boxes": "headway.storage.boxes:flat_to_boxes",
    "AfrModel": "headway.storage.afr:AfrModel",
    "Dgroup": "headway.storage.fleet_sim:Dgroup",
    "DirtyTracker": "headway.storage.dirty:DirtyTracker",
    "Fleet": "headway.storage.fleet:Fleet",
    "mttdl_hours": "headway.storage.schemes:mttdl_hours",
    "mttdl_parallel_hours": "headway.storage.schemes:mttdl_parallel_hours",
    "NvmDesign": "headway.storage.nvm_design:NvmDesign",
    "NvmStats": "headway.storage.nvm:NvmStats",
    "simulate_nvm": "headway.storage.nvm:simulate_nvm",
    "ProtectedRegion": "headway.storage.protected:ProtectedRegion",
    "RS": "headway.storage.erasure:RS",
    "tolerated_afr": "headway.storage.schemes:tolerated_afr",
    "verify": "headway.storage.verification:verify",
}
"""Every lazily loaded public name -> "module:attribute"."""


__getattr__, __dir__ = lazily(__name__, PUBLIC)
