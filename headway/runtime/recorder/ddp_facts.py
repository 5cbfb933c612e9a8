"""What a what-if needs to know of DistributedDataParallel: parameters, the order of their gradients, bucket limits.

A deep window sees that gradients became ready, not which and how large. DDP's
own logging data say in which order it rebuilt its buckets after the first
step; sizes are those of the parameters, in bytes. Noted at the end of a
window, on the training thread, under 'ddp' in RUN/tables/r<rank>.json.

>>> order_of({"rebuilt_per_bucket_param_indices": "5 4, 3 2 1 0"})
[5, 4, 3, 2, 1, 0]
>>> order_of({})
[]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.runtime.recorder.probes import Probes


def note_models(probes: Probes) -> None:
    """Write what is known of every living instance into the tables of this rank."""
    groups = probes.groups
    if groups is None:
        return
    models = [model for reference in groups.models if (model := reference()) is not None]
    probes.tables["ddp"] = [{"group": groups.of(model.process_group), **facts_of(model)} for model in models]


def facts_of(ddp: Any) -> dict[str, Any]:
    """Return the facts of one instance: sizes in bytes per parameter, `order` of readiness as indices into them."""
    import torch.distributed as dist

    ignored = getattr(ddp, "parameters_to_ignore", ())
    named = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored}
    parameters = list(named.values())
    logged = ddp._get_ddp_logging_data()
    cap = int(getattr(ddp, "bucket_bytes_cap", 0))
    default = bool(getattr(ddp, "bucket_bytes_cap_default", False))
    first = int(getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 20))
    return {
        "parameter_names": list(named),
        "parameter_bytes": [p.nbytes for p in parameters],
        "parameter_types": [str(p.dtype) for p in parameters],
        "order": order_of(logged),
        "first_bucket_bytes": first if default else cap,
        "bucket_bytes": cap,
        "default": default,
        "gradient_as_bucket_view": bool(getattr(ddp, "gradient_as_bucket_view", False)),
        "find_unused_parameters": bool(getattr(ddp, "find_unused_parameters", False)),
        "static_graph": bool(getattr(ddp, "static_graph", False)),
        "can_set_static_graph": graph_is_static(ddp, logged),
        "unused_bytes": logged.get("unused_parameter_size"),
    }


def graph_is_static(ddp: Any, logged: Mapping[str, Any]) -> bool:
    """Say whether DDP has seen every step use the same parameters so far; only its search for unused ones sees that.

    Its logging data say so once they changed, and otherwise when the model is destroyed: until then its reducer does.
    """
    told = logged.get("can_set_static_graph")
    ask = getattr(ddp.reducer, "_ddp_graph_static", None)
    return bool(told) if told is not None or ask is None else bool(ask())


def order_of(logged: Mapping[str, Any]) -> list[int]:
    """Return the indices of parameters in the order of DDP's rebuilt buckets, [] before it has rebuilt them."""
    text = str(logged.get("rebuilt_per_bucket_param_indices") or "")
    return [int(index) for index in text.replace(",", " ").split()]
