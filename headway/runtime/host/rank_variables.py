"""Which rank a process is, as the launch line that started it says in its environment: one table for all readers.

The launcher (`launch.py`) and the recording inside the rank
(`bootstrap.py`) both ask here, so that they always agree. It loads nothing:
every rank imports it when its recording starts.

>>> number({"PMI_RANK": "2", "PMI_SIZE": "4"}, "rank"), number({}, "rank")
(2, None)
"""

from __future__ import annotations

from collections.abc import Mapping

SOURCES = {
    "rank": (
        "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK",
        "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK",
    ),
    "world_size": (
        "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "MV2_COMM_WORLD_SIZE",
        "JSM_NAMESPACE_SIZE",
    ),
    "local_rank": (
        "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID",
        "FLUX_TASK_LOCAL_ID", "MV2_COMM_WORLD_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_RANK", "PMI_LOCAL_RANK",
    ),
    "local_world_size": (
        "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
        "PALS_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE", "PMI_LOCAL_SIZE",
    ),
    "group_rank": ("GROUP_RANK", "CROSS_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK", "PALS_NODEID"),
    "attempt": ("TORCHELASTIC_RESTART_COUNT",),
    "max_restarts": ("TORCHELASTIC_MAX_RESTARTS",),
}  # fmt: skip
"""Fact -> the variables that say it, in order of trust: torch's own, DeepSpeed's, Slurm, Open MPI, PMI (MPICH),
PALS (Cray), Flux, MVAPICH, JSM (jsrun)."""


def number(env: Mapping[str, str], fact: str) -> int | None:
    """Return what the environment says of a fact of `SOURCES`; None when no variable says it."""
    for name in SOURCES[fact]:
        text = env.get(name, "")
        if text.lstrip("-").isdigit():
            return int(text)
    return None
