"""Bytes at rest: checkpoints that commit atomically, are known to be intact, and survive the loss of what holds them.

Public names are resolved on first use, through one literal table; none of them needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.lab.afr import AfrModel as AfrModel
    from headway.lab.fleet import DiskFleet as DiskFleet
    from headway.lab.fleet_sim import Dgroup as Dgroup
    from headway.lab.nvm_controller import NvmStats as NvmStats
    from headway.lab.nvm_controller import simulate_nvm as simulate_nvm
    from headway.lab.nvm_design import NvmDesign as NvmDesign
    from headway.lab.schemes import mttdl_hours as mttdl_hours
    from headway.lab.schemes import mttdl_parallel_hours as mttdl_parallel_hours
    from headway.lab.schemes import tolerated_afr as tolerated_afr
    from headway.storage.boxes import flat_to_boxes as flat_to_boxes
    from headway.storage.checks.verification import verify as verify
    from headway.storage.redundancy.erasure import RS as RS
    from headway.storage.regions.dirty import DirtyTracker as DirtyTracker
    from headway.storage.regions.protected import ProtectedRegion as ProtectedRegion

PUBLIC: dict[str, str] = {
    "flat_to_boxes": "headway.storage.boxes:flat_to_boxes",
    "AfrModel": "headway.lab.afr:AfrModel",
    "Dgroup": "headway.lab.fleet_sim:Dgroup",
    "DirtyTracker": "headway.storage.regions.dirty:DirtyTracker",
    "DiskFleet": "headway.lab.fleet:DiskFleet",
    "mttdl_hours": "headway.lab.schemes:mttdl_hours",
    "mttdl_parallel_hours": "headway.lab.schemes:mttdl_parallel_hours",
    "NvmDesign": "headway.lab.nvm_design:NvmDesign",
    "NvmStats": "headway.lab.nvm_controller:NvmStats",
    "simulate_nvm": "headway.lab.nvm_controller:simulate_nvm",
    "ProtectedRegion": "headway.storage.regions.protected:ProtectedRegion",
    "RS": "headway.storage.redundancy.erasure:RS",
    "tolerated_afr": "headway.lab.schemes:tolerated_afr",
    "verify": "headway.storage.checks.verification:verify",
}
"""Every lazily loaded public name -> "module:attribute"."""


__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
