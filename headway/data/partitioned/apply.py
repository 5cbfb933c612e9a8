"""A partitioned cache over the ranks of a training job: addresses and the secret go through torch.distributed.

    images = over_ranks(FolderSource("/data/train"), capacity_bytes=20 * GB)
    loader = DataLoader(Pipeline(images).decode()..., ...)

Each rank is a host of its own, also where several ranks share a machine. Make
it on every rank, after `init_process_group`.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from typing import Any

import torch.distributed as dist

from headway.core.errors import InputError
from headway.data.bytes.source import Source
from headway.data.partitioned.partitioned import Partitioned
from headway.data.partitioned.peers import listen


def over_ranks(
    source: Source, *, capacity_bytes: int, seed: int = 0, address: str | None = None, wait_s: float = 60.0
) -> Partitioned:
    """Return `source` behind a cache of all ranks, started: `capacity_bytes` of memory on this rank.

    `address` is where other ranks reach this one (default: what this machine
    uses towards $MASTER_ADDR). Collective: every rank calls it. Raises
    `InputError` without torch.distributed or with an address that others
    cannot reach, `DataShareError` when ranks have different sources.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("torch.distributed is not set up. Call init_process_group first, or use Partitioned.")
    address = address or own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    token = _gathered(secrets.token_hex(16))[0]
    listener = listen(address, 0, token)
    host = f"[{address}]" if ":" in address else address
    addresses: list[str] = _gathered(f"{host}:{listener.port}")
    try:
        _check_reachable([where.rpartition(":")[0].strip("[]") for where in addresses])
        hosts = {f"rank {rank}": where for rank, where in enumerate(addresses)}
        cached = Partitioned(
            source, hosts=hosts, host=f"rank {dist.get_rank()}", capacity_bytes=capacity_bytes, token=token, seed=seed,
            listener=listener,
        )  # fmt: skip
    except BaseException:
        listener.close()
        raise
    return cached.start(wait_s)


def own_address(towards: str) -> str:
    """Return the address of this machine on the way to `towards` (nothing is sent). Raises `InputError`."""
    try:
        family, _, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise InputError(f"no way to {towards}: {error}. Pass address=, where other ranks reach this one.") from error
    return own


def _gathered(value: str) -> list[str]:
    """Return the value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _check_reachable(addresses: list[str]) -> None:
    """Raise `InputError` when some ranks can be reached from their own machine only, and others are elsewhere."""
    local = [_is_loopback(address) for address in addresses]
    if any(local) and not all(local):
        rank = local.index(True)
        raise InputError(
            f"rank {rank} has the address {addresses[rank]}, which other machines cannot reach. Pass address= there, "
            "or set $MASTER_ADDR to an address of the network."
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address == "localhost"
