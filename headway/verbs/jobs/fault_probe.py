"""`headway fault probe`: does every device of this host compute the same bits?"""

from __future__ import annotations

from typing import Any

from rich.text import Text

from headway.core.units import format_seconds
from headway.fault.torch_self_check import SelfCheckResult, check
from headway.report.paper import draw
from headway.verbs.shared.output import emit


def probe(*, nproc_per_node: str | None = None, timeout_s: float = 60.0, json: bool = False) -> int:
    """Train a tiny fixed model on every rank of this host; exit 3 when one fails, or ends with other bits than most.

    Example: `headway fault probe --nproc-per-node 4`

    Parameters
    ----------
    nproc_per_node
        Ranks: a number, auto, cpu or gpu; one per device by default, two where there is none.
    timeout_s
        Seconds after which a rank that has not answered has failed.
    json
        Print one JSON object instead of text.
    """
    found = check(nproc_per_node, timeout_s=timeout_s)
    answer: dict[str, Any] = {
        "schema": "headway.fault-probe/1", "ranks": len(found.digests) + len(found.failed), "equal": not found.odd,
        "odd": found.odd, "digests": {str(rank): digest for rank, digest in found.digests.items()},
        "failed": {str(rank): why for rank, why in found.failed.items()}, "seconds": found.seconds,
    }  # fmt: skip
    emit(answer, lambda screen: draw([Text(line) for line in _lines(found)], **screen), as_json=json)
    return 3 if found.odd else 0


def _lines(found: SelfCheckResult) -> list[str]:
    ranks = len(found.digests) + len(found.failed)
    if not found.odd:
        return [f"all {ranks} ranks end with the same bits ({format_seconds(found.seconds)})"]
    lines = [f"rank {rank}: {why}" for rank, why in found.failed.items()]
    lines += [
        f"rank {rank}: other bits than most ({found.digests[rank]})" for rank in found.odd if rank in found.digests
    ]
    return [f"{len(found.odd)} of {ranks} ranks are suspected", *lines]
