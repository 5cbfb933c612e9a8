"""Failures of a training job: who failed, what to do then, how fast the job goes on, and what all that costs.

Public names are resolved on first use, through one literal table; none of them needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.fault.backup import backup_peers as backup_peers
    from headway.fault.backup import dual_phase as dual_phase
    from headway.fault.backup import standby_size as standby_size
    from headway.fault.fleet import Scenario as Scenario
    from headway.fault.fleet import simulate as simulate
    from headway.fault.incidents import Suspicion as Suspicion
    from headway.fault.incidents import suspects as suspects
    from headway.fault.supervise import ACTIONS as ACTIONS
    from headway.fault.supervise import decide as decide
    from headway.fault.torch_drill import FAULTS as FAULTS
    from headway.trace.recording.incident import Incident as Incident

PUBLIC: dict[str, str] = {
    "ACTIONS": "headway.fault.supervise:ACTIONS",
    "FAULTS": "headway.fault.torch_drill:FAULTS",
    "Incident": "headway.trace.recording.incident:Incident",
    "Scenario": "headway.fault.fleet:Scenario",
    "Suspicion": "headway.fault.incidents:Suspicion",
    "backup_peers": "headway.fault.backup:backup_peers",
    "decide": "headway.fault.supervise:decide",
    "dual_phase": "headway.fault.backup:dual_phase",
    "simulate": "headway.fault.fleet:simulate",
    "standby_size": "headway.fault.backup:standby_size",
    "suspects": "headway.fault.incidents:suspects",
}
"""Public name -> "module:function"."""

__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
