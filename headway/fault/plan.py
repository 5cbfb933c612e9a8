"""What to prepare for failures: how often to save, how many hosts in reserve, where copies go.

The interval and the ETTR are those of `headway.ledger.answers.metrics`: exponential
failures with mean `mtbf_s`, which may strike in saves and restarts too.

>>> found = prepare(mtbf_s=11_124.0, restart_s=600.0, save_s=10.0)
>>> round(found.interval_s), round(found.ettr, 3), round(found.ettr_first_order, 3)
(465, 0.908, 0.906)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.fault.backup import backup_peers, standby_size
from headway.ledger.answers.metrics import ettr, ettr_first_order, optimal_interval_s

LONGEST_S = 1e10
"""Some 300 years: times of a job are shorter."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """The answer of `headway fault plan`."""

    interval_s: float
    """Work between saves, s: as asked for, or what maximises `ettr`."""

    ettr: float
    """Expected: 1 / (wall seconds per useful second)."""

    ettr_first_order: float
    """By the first-order form."""

    standby_hosts: int | None = None
    """Hosts in reserve; None where no number of hosts was given."""

    backup_peer: list[int] | None = None
    """Rank -> the rank that holds its copy; None without a mesh."""

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return asdict(self)


def prepare(
    *, mtbf_s: float, restart_s: float, save_s: float, interval_s: float | None = None, hosts: int | None = None,
    p_daily: float | None = None, mesh: Mesh | None = None, ranks_per_host: int | None = None,
) -> Preparation:  # fmt: skip
    """Return what to prepare. Raises `InputError` on values out of range, and where one of a pair is missing."""
    if (hosts is None) != (p_daily is None):
        raise InputError("hosts and p_daily belong together: the number of hosts, and the chance that one fails a day.")
    if (mesh is None) != (ranks_per_host is None):
        raise InputError("mesh and ranks_per_host belong together. Pass both, such as tp=8,pp=4,dp=16 and 8.")
    given = {"mtbf_s": mtbf_s, "restart_s": restart_s, "save_s": save_s, "interval_s": interval_s or 0.0}
    for name, value in given.items():
        if value > LONGEST_S:
            raise InputError(f"{name} is {value:.3g}; it must be at most {LONGEST_S:.0g} seconds. Pass seconds.")
    if interval_s is None:
        interval_s = optimal_interval_s(mtbf_s, save_s=save_s)
    values = {"restart_s": restart_s, "interval_s": interval_s, "save_s": save_s}
    return Preparation(
        interval_s,
        ettr(mtbf_s, **values),
        ettr_first_order(mtbf_s, **values),
        standby_size(hosts, p_daily) if hosts is not None and p_daily is not None else None,
        backup_peers(mesh, ranks_per_host) if mesh is not None and ranks_per_host is not None else None,
    )
