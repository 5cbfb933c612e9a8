"""'fault.warm' and 'fault.interval' inside a rank.

Warm attempts are the launcher's doing: `headway run` starts a process that has imported torch wherever it is not asked
to start cold, so a rank only says that it is so. The interval is that of a `headway.Checkpointer` whose saves follow
its policy (`attach`, `step`, `maybe_save`): the policy is given the measured time between failures and saves where that
loses least. What a script saves by itself stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from headway.fault.remedies import INTERVAL, WARM, IntervalParameters, WarmParameters
from headway.runtime.in_rank.remedy import Applied, Context

CHECKPOINTER = "headway.checkpoint.engine:Checkpointer.__init__"


def warm(parameters: WarmParameters, context: Context) -> Applied:
    """Say that later attempts are forked from a process that has imported torch."""
    del parameters, context
    return Applied(WARM, {"later_attempts": "forked from a process that has imported torch"})


def follow_failures(parameters: IntervalParameters, context: Context) -> Applied:
    """Let the policies of checkpointers that are made from now on follow the failure rate."""
    facts: dict[str, float] = {"mtbf_s": parameters.mtbf_s, "checkpointers": 0}

    def making(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(made: Any, *args: object, **kwargs: object) -> None:
            original(made, *args, **kwargs)
            made._policy.mode, made._policy.mtbf_s = "goodput", parameters.mtbf_s
            facts["checkpointers"] += 1

        return init

    context.patch(CHECKPOINTER, making)
    return Applied(INTERVAL, facts)
