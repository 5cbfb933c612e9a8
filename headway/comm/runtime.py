"""The remedy 'comm.bucket': another bucket size for DistributedDataParallel, without touching the script.

A bucket is all-reduced as soon as its gradients are there: small ones start
early and pay latency often, large ones the reverse. Every sum is over the
same gradients; with more than two ranks the backend may add them in another
order, so only up to two ranks are results promised to stay the same bit for
bit (`bit_exact` in the facts).

>>> bucket({"bucket_mb": 0}, context=None)
Traceback (most recent call last):
headway.core.errors.InputError: bucket_mb is 0; a bucket needs a positive number of MiB. Plan another size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from headway.core.errors import InputError
from headway.runtime.remedy import Applied, Context, Refused

NAME = "comm.bucket"
DDP_INIT = "torch.nn.parallel.distributed:DistributedDataParallel.__init__"


def bucket(parameters: Mapping[str, Any], context: Context) -> Applied | Refused:
    """Install the remedy.

    Parameters: bucket_mb (MiB, torch's `bucket_cap_mb`), respect_explicit (bool, default False: a size that the
    script names itself is replaced too). Raises `InputError` when bucket_mb is not a positive number.
    """
    size = parameters.get("bucket_mb")
    if not isinstance(size, (int, float)) or isinstance(size, bool) or not size > 0:
        raise InputError(f"bucket_mb is {size!r}; a bucket needs a positive number of MiB. Plan another size.")
    respect = bool(parameters.get("respect_explicit", False))
    facts: dict[str, Any] = {"bucket_mb": size, "models": 0, "kept_explicit": 0}

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807  # the name it has in torch
            """Construct with the plan's bucket size."""
            bound = signature.bind(*args, **kwargs)
            if respect and bound.arguments.get("bucket_cap_mb") is not None:
                facts["kept_explicit"] += 1
            else:
                bound.arguments["bucket_cap_mb"] = size
                facts["models"] += 1
            original(*bound.args, **bound.kwargs)
            facts["bit_exact"] = bound.arguments["self"].process_group.size() <= 2
            context.note(_outcome(facts))

        return __init__

    context.patch(DDP_INIT, wrapper)
    return Applied(NAME, facts)


def _outcome(facts: dict[str, Any]) -> Applied | Refused:
    """Return what is known after a model was constructed."""
    if facts["models"]:
        return Applied(NAME, facts)
    return Refused(NAME, "the script names its own bucket size, which the plan respects")
