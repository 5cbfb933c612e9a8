"""headway finds where a training job's accelerator time goes, and wins it back.

Importing this package loads nothing heavy: every public name below is
resolved on first use, through one literal table.

>>> import headway
>>> headway.Trace.__module__
'headway.trace.events.trace'
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headway.core.tables import lazily

if TYPE_CHECKING:
    from headway.checkpoint.engine import Checkpointer as Checkpointer
    from headway.checkpoint.policy import CheckpointPolicy as CheckpointPolicy
    from headway.core.errors import HeadwayError as HeadwayError
    from headway.data.fleet.torch_fleet import Fleet as Fleet
    from headway.integrations.notebook import open_run as open_run
    from headway.integrations.notebook import run as run
    from headway.ledger.answers.ledger import Ledger as Ledger
    from headway.plan.planner import Plan as Plan
    from headway.plan.proposal import Proposal as Proposal
    from headway.plan.setup import Setup as Setup
    from headway.runtime.in_rank.annotate import epoch as epoch
    from headway.runtime.in_rank.annotate import evaluation as evaluation
    from headway.runtime.in_rank.annotate import log_to as log_to
    from headway.runtime.in_rank.annotate import steps as steps
    from headway.runtime.in_rank.annotate import timer as timer
    from headway.sim.graph.dag import Dag as Dag
    from headway.trace.events.trace import Trace as Trace

__version__ = "0.1.0"

PUBLIC: dict[str, str] = {
    "CheckpointPolicy": "headway.checkpoint.policy:CheckpointPolicy",
    "Checkpointer": "headway.checkpoint.engine:Checkpointer",
    "Dag": "headway.sim.graph.dag:Dag",
    "Fleet": "headway.data.fleet.torch_fleet:Fleet",
    "HeadwayError": "headway.core.errors:HeadwayError",
    "Ledger": "headway.ledger.answers.ledger:Ledger",
    "Plan": "headway.plan.planner:Plan",
    "Proposal": "headway.plan.proposal:Proposal",
    "Setup": "headway.plan.setup:Setup",
    "Trace": "headway.trace.events.trace:Trace",
    "checkpoint": "headway.checkpoint",
    "data": "headway.data",
    "epoch": "headway.runtime.in_rank.annotate:epoch",
    "evaluation": "headway.runtime.in_rank.annotate:evaluation",
    "log_to": "headway.runtime.in_rank.annotate:log_to",
    "open_run": "headway.integrations.notebook:open_run",
    "run": "headway.integrations.notebook:run",
    "steps": "headway.runtime.in_rank.annotate:steps",
    "storage": "headway.storage",
    "timer": "headway.runtime.in_rank.annotate:timer",
}
"""Every lazily loaded public name -> "module:attribute", or a room's "module"."""

logging.getLogger(__name__).addHandler(logging.NullHandler())


__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
