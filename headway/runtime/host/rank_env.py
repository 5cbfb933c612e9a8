"""What a rank is started with: its command line, its environment, its port; and which rank the environment says it is.

The environment is the one torchrun gives, plus headway's own variables. Each
attempt gets a port of its own, held until the last rank is gone, so nobody
else is given it between the choice and rank 0's first listen.

>>> argv("train.py", ["--help", ""], Command())[2:]
('train.py', '--help', '')

Every launch line says that in variables of its own (`SOURCES`). The launcher (`launch.py`) and the recording inside
the rank (`bootstrap.py`) both ask `number`, so that they always agree.

>>> number({"PMI_RANK": "2", "PMI_SIZE": "4"}, "rank"), number({}, "rank")
(2, None)
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.core.errors import InputError
from headway.core.machine.host import host_cores
from headway.runtime.host.device import host_has_devices

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


INJECT = Path(__file__).resolve().parent.parent / "inject"
"""The folder that goes in front of PYTHONPATH: its sitecustomize starts the recording."""

COUNT = """
import torch
kind = getattr(torch, "accelerator", None) or torch.cuda
print(kind.device_count() if kind.is_available() else 0)
"""
"""Program that prints how many devices torch sees."""


@dataclass(frozen=True, slots=True)
class Command:
    """How the script is started."""

    module: bool = False
    """Run it as `python -m`."""

    no_python: bool = False
    """Run it as a program, without Python in front."""


def argv(script: str, arguments: Sequence[str], command: Command) -> tuple[str, ...]:
    """Return the command line of a rank, torchrun's: `python -u script arguments`, arguments untouched."""
    if command.no_python:
        return (script, *arguments)
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return (python, "-u", *(["-m"] if command.module else []), script, *arguments)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Where one rank stands among the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int = 0
    """Index of the host."""
    group_world_size: int = 1
    """Number of hosts."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    role: str = "default"
    role_rank: int | None = None
    """Rank within the role; the same as `rank` when there is one role."""
    role_world_size: int | None = None
    attempt: int = 0
    max_restarts: int = 0
    run_id: str = "none"


def torchrun_env(place: RankEnvironment, base: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun puts into a rank's environment (torch/distributed/elastic, local agent).

    `TORCHELASTIC_USE_AGENT_STORE` is False: rank 0 of each attempt opens a
    store of its own, so nothing of a dead attempt is left in it.
    """
    world, role_world = str(place.world_size), place.role_world_size
    env = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "GROUP_RANK": str(place.group_rank),
        "ROLE_RANK": str(place.rank if place.role_rank is None else place.role_rank),
        "ROLE_NAME": place.role,
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "ROLE_WORLD_SIZE": world if role_world is None else str(role_world),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if place.local_world_size > 1:
        env["OMP_NUM_THREADS"] = base.get("OMP_NUM_THREADS", "1")
    return env


def may_restart(environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether the launcher would start the job again, as it tells its ranks.

    >>> may_restart({"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}), may_restart({})
    (True, False)
    """
    count, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count.isdigit() and most.isdigit() and int(count) < int(most)


def without_interpreter(script: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Return whether a script is a module, and it: of `python train.py` and `python -m package` what they mean.

    `python` is the one that runs headway; another one's command is returned as it is.

    >>> without_interpreter([sys.executable, "-m", "package.train", "--lr", "1"])
    (True, ['package.train', '--lr', '1'])
    """
    program = shutil.which(script[0]) if len(script) > 1 and "python" in os.path.basename(script[0]) else None
    if program is None or os.path.dirname(program) != os.path.dirname(sys.executable):
        return False, script
    if script[1] == "-m" and len(script) > 2:
        return True, script[2:]
    return False, script if script[1].startswith("-") else script[1:]


ALONE = {"HEADWAY_RANK": "0"}
"""What tells a process without torchrun's variables, or with some that were meant for another, which rank it is."""


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's environment as ranks inherit it: without what an outer recording left there."""
    ours = (
        "HEADWAY_MAIN_PID",
        "HEADWAY_RINGS",
        "HEADWAY_PLAN",
        "HEADWAY_RANK",
        "HEADWAY_LOCAL_RANK",
        "HEADWAY_WARM_NOTE",
    )
    return {name: value for name, value in env.items() if name not in ours}


def headway_env(
    base: Mapping[str, str],
    *,
    run: Path,
    rings: Path,
    attempt: int,
    plan: Path | None = None,
    remedies: Mapping[str, str] | None = None,
    windows_fraction: float | None = None,
    window_at: int | None = None,
    verify: bool | None = None,
) -> dict[str, str]:
    """Return headway's own variables for a rank; PYTHONPATH keeps what the user had behind ours."""
    paths = [str(INJECT), *([base["PYTHONPATH"]] if base.get("PYTHONPATH") else [])]
    env = {
        "HEADWAY_RUN": str(run),
        "HEADWAY_RINGS": str(rings),
        "HEADWAY_ATTEMPT": str(attempt),
        "HEADWAY_WINDOWS": "" if windows_fraction is None else f"{windows_fraction:g}",
        "HEADWAY_REMEDIES": json.dumps(dict(remedies or {})),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if window_at is not None:
        env["HEADWAY_WINDOW_AT"] = str(window_at)
    if plan is not None:
        env["HEADWAY_PLAN"] = str(plan)
        env["HEADWAY_VERIFY"] = {None: "some", True: "all", False: ""}[verify]
    return env


class Port:
    """A TCP port reserved for rank 0's store: bound, never listening.

    A second socket may listen on it while it is held, because both ask for
    address reuse and ours does not listen; the kernel gives it to nobody else
    who asks for any free port.

    >>> with Port() as port: port.number > 0
    True
    """

    def __init__(self, wanted: int = 0) -> None:
        self.number = 0
        self._socket: socket.socket | None = None
        self._reserve(wanted)

    def _reserve(self, wanted: int) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            self._socket = _bound(family, wanted)
        except OSError:
            if family == socket.AF_INET:
                raise
            self._socket = _bound(socket.AF_INET, wanted)  # IPv6 is compiled in but switched off
        self.number = self._socket.getsockname()[1]

    def __enter__(self) -> Port:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the port back."""
        if self._socket is not None:
            self._socket.close()


def _bound(family: int, port: int) -> socket.socket:
    """Return a socket bound to `port` (0: any free one) on all addresses, not listening."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0 if port else 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("", port))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        made.close()
        raise
    return made


def check_host(host: str, what: str) -> None:
    """Raise `InputError` when `host` cannot be resolved: at once, instead of a wait or a silent localhost."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as cause:
        raise InputError(
            f"{what} {host!r} cannot be resolved ({cause.strerror or cause}). A host name must be known to this host. "
            "Check the spelling, or pass an IP address."
        ) from cause


MOST_RANKS = 4096
"""Ranks of one host, at most: more are a slip of the hand, and would take all memory."""


def num_processes(text: str | int | None) -> int:
    """Return how many ranks `--nproc-per-node` means (a number, 'auto', 'gpu', 'xpu', 'cpu', None); no torch here.

    Raises `InputError` on anything else, and for 'gpu' and 'xpu' without a device.
    """
    if text is None:
        return 1
    if isinstance(text, int) or text.removeprefix("-").isdigit():
        count = int(text)
        if not 1 <= count <= MOST_RANKS:
            raise InputError(
                f"--nproc-per-node is {count}; it must be from 1 to {MOST_RANKS:,}. Pass 1 for a single process."
            )
        return count
    if text not in ("auto", "gpu", "xpu", "cpu"):
        raise InputError(f"--nproc-per-node is {text!r}; it must be a number, auto, gpu, xpu or cpu. Pass a number.")
    devices = 0 if text == "cpu" else num_devices()
    if text in ("gpu", "xpu") and not devices:
        raise InputError(f"--nproc-per-node is {text!r} but torch sees no device. Pass a number, or 'cpu'.")
    return devices or host_cores()


def num_devices() -> int:
    """Return how many devices a rank would see, asked of torch in a child; 0 where the kernel knows none.

    torch alone knows what hides devices on each kind of accelerator (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES,
    ROCR_VISIBLE_DEVICES, ZE_AFFINITY_MASK, MIG); asking starts drivers, which the launcher must not hold.
    Raises `InputError` where torch cannot say.
    """
    if not host_has_devices():
        return 0
    env = {**inherited(os.environ), "HEADWAY": "off"}
    asked = subprocess.run([sys.executable, "-c", COUNT], env=env, capture_output=True, text=True, check=False)
    if asked.returncode or not asked.stdout.strip().isdigit():
        raise InputError(
            f"torch cannot count the devices of this host: {asked.stderr.strip().rpartition(chr(10))[2]!r}. "
            "Pass a number with --nproc-per-node, or mend torch: python -c 'import torch'"
        )
    return int(asked.stdout)


def parse_hosts(text: str | int) -> tuple[int, int]:
    """Return (fewest, most) hosts of torchrun's --nnodes, a number or 'min:max'; raises `InputError`.

    >>> parse_hosts("1:4"), parse_hosts(2)
    ((1, 4), (2, 2))
    """
    parts = str(text).split(":")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise InputError(f"--nnodes is {text!r}; it must be a number or min:max. Pass 1 for a single host.")
    low, high = int(parts[0]), int(parts[-1])
    if not 1 <= low <= high:
        raise InputError(f"--nnodes is {text!r}; it must hold 1 <= min <= max. Pass 1 for a single host.")
    return low, high


def host_of(endpoint: str) -> str:
    """Return the host of a rendezvous endpoint, without its port and brackets."""
    host = endpoint.rpartition(":")[0] if endpoint.count(":") == 1 or "]" in endpoint else endpoint
    return host.strip("[]")
