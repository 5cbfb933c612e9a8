"""Ranks that want the same read each byte once between them, and pass on what they read.

Each reader's share of a plan is cut into buckets. While a bucket goes around
(one all-gather per round, on the group's own backend), the next one is being
read. A reader that fails says so in its bucket, so that all ranks raise and
none waits. Sizes are bytes.

>>> import numpy as np
>>> _placed([Read("f", 0, 24, ())])
([], 0)

Which ranks hold equal copies of a plain tensor, and whose buffers are stored.

>>> holders = ReplicaHolders({"norm": torch.nn.BatchNorm1d(2)}, [1, 3])
>>> holders["norm.running_mean"], holders["norm.weight"]
((1,), [1, 3])

What the ranks of a job agree on once or rarely, through the store that they met at: no collective, no barrier.

The attempt, at the first save; the step of the next save, one save ahead; at
a restore, which step and whether all ranks succeeded. A rank reads what rank
0 wrote, most of the time long before. Without a process group there is one
rank, and nothing to agree on.

>>> agreement = Agreement("/ckpts")
>>> agreement.rank, agreement.world_size, agreement.word("restore", lambda: "40")
(0, 1, '40')
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import _get_default_store

from headway.checkpoint.layout.fetch import RangeFetcher, fetch
from headway.checkpoint.layout.reads import Read, ReadPlan, ShardTransfer
from headway.core.errors import BackgroundError, DamageError, FormatError, HeadwayError, InputError
from headway.core.units import KIB, MIB
from headway.storage.stores import url_of

BUCKET_BYTES = 16 * MIB
"""What one reader contributes to a round."""

HEAD_BYTES = 4 * KIB
"""Head of a bucket: length of a failure's message, 0 for none, and the message."""

ALIGN = 16
"""Elements begin at multiples of this in a bucket: the largest element there is."""

Put = Callable[[ShardTransfer, torch.Tensor], None]
"""Takes the elements of a transfer, [*box.lengths], on the group's device."""


def says_damage(error: BaseException) -> bool:
    """Tell whether an error means that a checkpoint cannot be used; any other is the caller's, or ours."""
    return isinstance(error, (DamageError, FormatError, OSError, EOFError))


@contextmanager
def agreed(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Do something that may fail on one rank only, and let all ranks of `group` raise when it does on any.

    What failed here is raised as it is; what failed elsewhere as `DamageError` where it was damage, else as
    `HeadwayError`, with the rank's message.
    """
    if group is None or group.size() == 1:
        yield
        return
    error: BaseException | None = None
    try:
        yield
    except BaseException as found:
        error = found
    told: list[tuple[str, bool] | None] = [None] * group.size()
    mine = None if error is None else (str(error) or type(error).__name__, says_damage(error))
    dist.all_gather_object(told, mine, group=group)
    if error is not None:
        raise error
    for rank, failure in enumerate(told):
        if failure is not None:
            text, is_damage = failure
            kind = DamageError if is_damage else HeadwayError
            raise kind(f"another rank of the group could not go on. Look at its error: rank {rank}: {text}")


def exchange(
    plan: ReadPlan, fetcher: RangeFetcher, put: Put, group: dist.ProcessGroup, *, num_threads: int | None = None
) -> None:
    """Do this rank's share of `plan`, and hand on everybody's elements. All ranks of `group` call it.

    Raises `InputError` when the ranks want different things, `DamageError` on all of them when one could not read.
    """
    me, device = group.rank(), _device(group)
    buckets = [list(_buckets(plan.of(reader))) for reader in range(plan.group)]
    _check_same(plan, group, device)
    width = max((_placed(bucket)[1] for share in buckets for bucket in share), default=0)
    mine = [torch.empty(HEAD_BYTES + width, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    everyone = torch.empty(plan.group * (HEAD_BYTES + width), dtype=torch.uint8, device=device)
    rounds = max(map(len, buckets))
    with ThreadPoolExecutor(1, thread_name_prefix="headway-exchange") as pool:

        def begin(turn: int) -> Future[None]:
            bucket = buckets[me][turn] if turn < len(buckets[me]) else []
            return pool.submit(_fill, mine[turn % 2], bucket, fetcher, num_threads)

        following = begin(0)
        for turn in range(rounds):
            following.result()
            if turn + 1 < rounds:
                following = begin(turn + 1)
            dist.all_gather_into_tensor(everyone, mine[turn % 2].to(device), group=group)
            for reader, part in enumerate(everyone.view(plan.group, -1)):
                _raise_failure(part, reader)
                _hand_on(part[HEAD_BYTES:], buckets[reader][turn] if turn < len(buckets[reader]) else [], put)


def _buckets(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Cut one reader's reads, in order, into runs of about `BUCKET_BYTES` of elements."""
    bucket: list[Read] = []
    size = 0
    for read in reads:
        num_bytes = sum(transfer.num_bytes for transfer in read.transfers)
        if bucket and size + num_bytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(read)
        size += num_bytes
    if bucket:
        yield bucket


def _placed(bucket: Sequence[Read]) -> tuple[list[tuple[ShardTransfer, int]], int]:
    """Return where each transfer's elements begin in a bucket, and how long the bucket is."""
    found, at = [], 0
    for read in bucket:
        for transfer in read.transfers:
            found.append((transfer, at))
            at += -(-transfer.num_bytes // ALIGN) * ALIGN
    return found, at


def _fill(memory: torch.Tensor, bucket: Sequence[Read], fetcher: RangeFetcher, num_threads: int | None) -> None:
    """Read a bucket into `memory`, or leave the message of the failure in its head."""
    room = memory.numpy()
    room[:8] = 0
    places = {id(transfer): at for transfer, at in _placed(bucket)[0]}

    def place(transfer: ShardTransfer, elements: NDArray[Any]) -> None:
        at = HEAD_BYTES + places[id(transfer)]
        target = room[at : at + transfer.num_bytes].view(elements.dtype).reshape(elements.shape)
        np.copyto(target, elements)

    try:
        if bucket:
            fetch(bucket, fetcher, place, num_threads=num_threads)
    except Exception as cause:
        message = str(cause).encode()[: HEAD_BYTES - 8]
        room[:8].view(np.int64)[0] = max(len(message), 1)
        room[8 : 8 + len(message)] = np.frombuffer(message, np.uint8)


def _raise_failure(part: torch.Tensor, reader: int) -> None:
    """Raise `DamageError` when a reader's bucket tells of a failure."""
    length = int(part[:8].view(torch.int64))
    if length:
        message = bytes(part[8 : 8 + length].cpu().numpy()).decode(errors="replace")
        raise DamageError(f"reader {reader} of the group failed: {message}")


def _hand_on(part: torch.Tensor, bucket: Sequence[Read], put: Put) -> None:
    """Give the elements of one reader's bucket to whoever wants them."""
    for transfer, at in _placed(bucket)[0]:
        kind: torch.dtype = getattr(torch, transfer.piece.dtype)
        put(transfer, part[at : at + transfer.num_bytes].view(kind).view(transfer.box.lengths))


def _check_same(plan: ReadPlan, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `InputError` unless all ranks of the group made this same plan."""
    digest = hashlib.blake2b(repr((plan.want, plan.reads)).encode(), digest_size=8).digest()
    told = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    everyone = torch.empty(plan.group, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(everyone, told, group=group)
    if len(set(everyone.tolist())) > 1:
        raise InputError(
            "the ranks of the group do not want the same tensors, or read different checkpoints. Pass a group of "
            "ranks that hold equal copies, or none."
        )


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return a device on which the group gathers."""
    on_cuda = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


# Which ranks hold equal copies of a plain tensor, and whose buffers are stored.


class ReplicaHolders(Mapping[str, Sequence[int]]):
    """Name of a plain tensor -> the ranks that hold equal copies of it; a name that is not here: all ranks.

    An object whose tensors only some ranks hold says which, as `holders` (a stage of a pipeline does).
    Of a module's buffers the first holder's are stored. Running statistics differ between ranks, and none are the
    right ones; data parallelism trains with the first rank's, which it sends to the others before each forward.
    """

    def __init__(self, objects: Mapping[str, Any], holders: Sequence[int] | None) -> None:
        self.first = min(holders or (0,))
        """The rank whose buffers are stored."""
        self._holders = holders
        self._declared = {
            name: tuple(thing.holders)
            for name, thing in objects.items()
            if hasattr(thing, "holders") and not isinstance(thing, torch.nn.Module)
        }
        modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        self._buffers = {
            f"{name}.{key}"
            for name, module in modules.items()
            for key, buffer in module.named_buffers()
            if type(buffer) in (torch.Tensor, torch.nn.Buffer)
        }

    def __getitem__(self, name: str) -> Sequence[int]:
        """Return the holders of a tensor; raises `KeyError` where they are all ranks."""
        if name in self._buffers:
            return (self.first,)
        declared = self._declared.get(name.partition(".")[0])
        if declared is not None:
            return declared
        if self._holders is None:
            raise KeyError(name)
        return self._holders

    def __eq__(self, other: object) -> bool:
        """Whether every name has the same holders."""
        if not isinstance(other, ReplicaHolders):
            return False
        return (other._holders, other._buffers, other._declared) == (self._holders, self._buffers, self._declared)

    def __iter__(self) -> Iterator[str]:
        """Go over the buffers: other names are not known beforehand."""
        return iter(self._buffers)

    def __len__(self) -> int:
        """Return how many buffers there are."""
        return len(self._buffers)

    def without_buffers(self, name: str, state: Any) -> Any:
        """Return the state of the object `name` without buffers that another rank stores."""
        if not any(fqn.startswith(f"{name}.") for fqn in self._buffers):
            return state
        return {key: value for key, value in state.items() if f"{name}.{key}" not in self._buffers}


LONGEST_S = 1800.0
"""How long ranks wait for each other at a restore: reading a large checkpoint may take them unlike times."""

POLL_S = 0.005

KEPT_WORDS = 64
"""Words on a subject that stay in the store. A save needs every rank, so none is that many saves behind."""


class Agreement:
    """The words of one Checkpointer; every rank makes its Checkpointers of one root in the same order."""

    def __init__(self, root: str) -> None:
        """Raise `InputError` where there are other ranks but no process group to meet them through."""
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world_size = dist.get_world_size() if joined else 1
        others = os.environ.get("WORLD_SIZE", "1")
        if not joined and others not in ("", "1"):
            raise InputError(
                f"WORLD_SIZE is {others}, but there is no process group: ranks cannot know each other's checkpoints. "
                "Call torch.distributed.init_process_group() before the first save or restore."
            )
        self._store: Any = _get_default_store() if self.world_size > 1 else None
        self._prefix, self._counts = "", dict[str, int]()
        if self._store is not None:
            place = hashlib.blake2b(os.fsencode(url_of(root) or os.path.realpath(root)), digest_size=8).hexdigest()
            number = self._store.add(f"headway/ckpt/{place}/rank-{self.rank}", 1)
            self._prefix = f"headway/ckpt/{place}/{number}"
        self.attempt = self.word("attempt", lambda: uuid.uuid4().hex[:16])
        """Name of this attempt of the job."""

    def word(self, subject: str, say: Callable[[], str]) -> str:
        """Return what rank 0 says on `subject`, the next time it is asked: it calls `say`, the others wait for it."""
        key = self._key(subject)
        if self.rank == 0:
            word = say()
            if self._store is not None:
                self._store.set(key, word)
                if self._counts[subject] > KEPT_WORDS:
                    self._store.delete_key(self._place(subject, self._counts[subject] - KEPT_WORDS))
            return word
        return str(self._store.get(key).decode())

    def failure(self, subject: str, mine: str | None) -> str | None:
        """Return the failure of some rank, None when all succeeded; `mine` is this one's. Waits for all of them."""
        if self._store is None:
            return mine
        key = self._key(subject)
        if mine is not None:
            self._store.set(f"{key}/failed", f"rank {self.rank}: {mine}")
        until, num_done = time.monotonic() + LONGEST_S, self._store.add(f"{key}/done", 1)
        while num_done < self.world_size:
            if time.monotonic() > until:
                raise BackgroundError(
                    f"{num_done} of {self.world_size} ranks finished their restore within {LONGEST_S:g} s. "
                    "Look at the others; start the job again."
                )
            time.sleep(POLL_S)
            num_done = self._store.add(f"{key}/done", 0)
        return str(self._store.get(f"{key}/failed").decode()) if self._store.check([f"{key}/failed"]) else None

    def numbers(self, subject: str, mine: int) -> list[int] | None:
        """Return what each rank said first on `subject`, None until all have; this one says `mine`. Never waits."""
        if self._store is None:
            return [mine]
        key = f"{self._prefix}/{subject}"
        if subject not in self._counts:
            self._counts[subject] = 1
            self._store.set(f"{key}/{self.rank}", str(mine))
            self._store.add(f"{key}/said", 1)  # answered: the number is there before this rank goes on
        if self._store.add(f"{key}/said", 0) < self.world_size:
            return None
        return [int(self._store.get(f"{key}/{rank}")) for rank in range(self.world_size)]

    def _key(self, subject: str) -> str:
        """Return the place of the next word on a subject; ranks ask in the same order."""
        self._counts[subject] = self._counts.get(subject, 0) + 1
        return self._place(subject, self._counts[subject])

    def _place(self, subject: str, count: int) -> str:
        return f"{self._prefix}/{subject}/{count}"
