"""Messages between the stages of a pipeline: activations and gradients, point to point, named by edge and micro-batch.

A message is posted by both ends without waiting; who uses its tensors waits
for them. On gloo a tag tells messages apart, so that the order of posts does
not matter. NCCL has no tags: each direction of each kind has a communicator of
its own there, in which both ends post in one order (`headway.sim.pipeline.lower`).

The first message of an edge from each rank is led by a header: types, shapes, and which of
its tensors want a gradient. Later ones must be like it. A gradient is like the
activation that it belongs to.

    header of an edge     [number of tensors, (type, wants a gradient, dims, size ..) of each]
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from headway.core.errors import InputError
from headway.parallel.torch_elastic_groups import LostPeerError
from headway.runtime.lane import separate_group

TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""Types that a message may hold; the header has their index."""

HEADER_SIZE = 512
"""Numbers in a header."""

MOST_TAG = 1 << 30

ACTIVATION, GRADIENT = 0, 1


class MessageName(NamedTuple):
    """What a message carries."""

    channel: int
    """`ACTIVATION` or `GRADIENT`."""

    source: int
    """Stage that makes it."""

    target: int
    """Stage that uses it."""

    microbatch: int
    """Micro-batch, counted on over the steps."""

    def __str__(self) -> str:
        """Return it in words."""
        what = "gradient" if self.channel == GRADIENT else "activation"
        return f"{what} of micro-batch {self.microbatch} from stage {self.source} to {self.target}"


class TensorForm(NamedTuple):
    """What is known of a tensor before it comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    wants_gradient: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> TensorForm:
        """Return that of a tensor."""
        return cls(value.dtype, tuple(value.shape), value.requires_grad)


@dataclass(slots=True)
class _Posted:
    """A message that was posted."""

    peer: int
    tensors: list[torch.Tensor]
    works: list[dist.Work]


class StageMessages:
    """The ends of all messages on one rank."""

    def __init__(
        self, num_stages: int, *, device: torch.device, timeout_s: float, group: dist.ProcessGroup | None = None
    ) -> None:
        """Make the communicators, or take a `group`; every rank of a job of several does."""
        self._num_stages, self._device = num_stages, device
        self._timeout = timedelta(seconds=timeout_s)
        self.forms: dict[tuple[int, int], tuple[TensorForm, ...]] = {}
        """Edge -> the tensors of its activations, once the first has been there."""
        self._headed: set[tuple[int, int, int]] = set()  # (source, target, peer) whose header was sent
        self._heard: set[tuple[int, int, int]] = set()  # the same, received
        self._received: dict[MessageName, _Posted] = {}
        self._unknown: dict[MessageName, int] = {}
        self._sent: deque[tuple[MessageName, _Posted]] = deque()
        self._groups: dict[tuple[int, bool], dist.ProcessGroup] = {}
        if group is not None:
            self._groups = dict.fromkeys(itertools.product((ACTIVATION, GRADIENT), (False, True)), group)
        elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            lanes = list(itertools.product((ACTIVATION, GRADIENT), (False, True)))
            if dist.get_backend() == "nccl":
                self._groups = {lane: separate_group(f"headway-pipeline-{lane}") for lane in lanes}
            else:
                self._groups = dict.fromkeys(lanes, separate_group("headway-pipeline"))

    def send(self, name: MessageName, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Post a message; its tensors stay as they are until it is through.

        Raises `InputError` where an activation is unlike those before it on its edge.
        """
        works = []
        if name.channel == ACTIVATION:
            self.check_form(name, tensors)
            edge = name.source, name.target
            if (*edge, peer) not in self._headed:
                self._headed.add((*edge, peer))
                header = _header(name, self.forms[edge]).to(self._device)
                works.append(self._start(True, header, name._replace(microbatch=-1), peer))
                self._sent.append((name, _Posted(peer, [header], works)))
                works = []
        parts = [tensor.detach().contiguous() for tensor in tensors]
        works = [self._start(True, tensor, name, peer) for tensor in parts]
        self._sent.append((name, _Posted(peer, parts, works)))

    def check_form(self, name: MessageName, tensors: Sequence[torch.Tensor]) -> None:
        """Learn an edge's tensors from its first activation; raise `InputError` for a later one that differs."""
        forms = tuple(TensorForm.of(tensor) for tensor in tensors)
        expected = self.forms.setdefault((name.source, name.target), forms)
        if forms != expected:
            raise InputError(
                f"stage {name.source} makes {_words(forms)} for micro-batch {name.microbatch} and made "
                f"{_words(expected)} before; a pipeline passes one shape. Pad the batches, or drop the last, small one."
            )

    def post(self, name: MessageName, peer: int) -> None:
        """Post the receive of a message; of an edge's first one the header is awaited when it is taken."""
        forms = self._forms_of(name)
        if forms is None or self._lacks_header(name, peer):
            self._unknown[name] = peer
            return
        buffers = [torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms]
        works = [self._start(False, tensor, name, peer) for tensor in buffers]
        self._received[name] = _Posted(peer, buffers, works)

    def take(self, name: MessageName) -> list[torch.Tensor]:
        """Return the tensors of a message that was posted, once they are there.

        Raises `LostPeerError` naming edge, micro-batch and peer where they do not come in time, or the peer is gone.
        """
        if name in self._unknown:
            peer = self._unknown.pop(name)
            if self._forms_of(name) is None or self._lacks_header(name, peer):
                header = torch.zeros(HEADER_SIZE, dtype=torch.int64, device=self._device)
                head = name._replace(microbatch=-1)
                self._wait(name, _Posted(peer, [header], [self._start(False, header, head, peer)]), "receives")
                self._heard.add((name.source, name.target, peer))
                self.forms[name.source, name.target] = _read_header(header)
            self.post(name, peer)
        pending = self._received.pop(name)
        self._wait(name, pending, "receives")
        return pending.tensors

    def has(self, name: MessageName) -> bool:
        """Whether a message was posted and not taken."""
        return name in self._received or name in self._unknown

    def settle(self, count: int = 0) -> None:
        """Wait until all messages that were sent are through, but the last `count`; raises as `take` does."""
        while len(self._sent) > count:
            name, pending = self._sent.popleft()
            self._wait(name, pending, "sends")

    @property
    def num_unsettled(self) -> int:
        """Messages that were sent and may be under way."""
        return len(self._sent)

    def _lacks_header(self, name: MessageName, peer: int) -> bool:
        """Say whether the header of an activation's edge has not come from this peer; an edge may have several."""
        return name.channel == ACTIVATION and (name.source, name.target, peer) not in self._heard

    def _forms_of(self, name: MessageName) -> tuple[TensorForm, ...] | None:
        """Return what a message holds: of a gradient, the tensors of its activation that want one."""
        if name.channel == ACTIVATION:
            return self.forms.get((name.source, name.target))
        forms = self.forms.get((name.target, name.source))
        return None if forms is None else tuple(form for form in forms if form.wants_gradient)

    def _start(self, sends: bool, tensor: torch.Tensor, name: MessageName, peer: int) -> dist.Work:
        rank = dist.get_rank()
        group = self._groups[name.channel, (rank < peer) == sends]
        edge = (name.channel * self._num_stages + name.source) * self._num_stages + name.target
        edges = 2 * self._num_stages**2
        # Tag 0 of an edge is its header's; micro-batches far apart may share one, never two that are in flight.
        tag = edge + edges * (1 + name.microbatch % (MOST_TAG // edges - 1) if name.microbatch >= 0 else 0)
        try:
            work = (dist.isend if sends else dist.irecv)(tensor, peer, group=group, tag=tag)
        except RuntimeError as cause:
            raise self._lost(name, peer, "sends" if sends else "receives", cause) from cause
        assert work is not None
        return work

    def _wait(self, name: MessageName, pending: _Posted, verb: str) -> None:
        try:
            for work in pending.works:
                work.wait(self._timeout)
        except Exception as cause:
            raise self._lost(name, pending.peer, verb, cause) from cause

    def _lost(self, name: MessageName, peer: int, verb: str, cause: Exception) -> LostPeerError:
        reason = str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
        late = "imed out" in reason or "timeout" in reason.lower()
        what = f"did not answer within {self._timeout.total_seconds():g} s" if late else "is gone"
        return LostPeerError(
            f"rank {dist.get_rank()} {verb} the {name}, and rank {peer} {what} ({reason}). Look at that "
            "rank's error, and start the job again from its last checkpoint."
        )


def _header(name: MessageName, forms: Sequence[TensorForm]) -> torch.Tensor:
    numbers = [len(forms)]
    for form in forms:
        if form.dtype not in TYPES:
            raise InputError(f"the {name} has type {form.dtype}, which messages do not carry. Convert it in the stage.")
        numbers += [TYPES.index(form.dtype), int(form.wants_gradient), len(form.shape), *form.shape]
    if len(numbers) > HEADER_SIZE:
        raise InputError(f"the {name} has {len(forms)} tensors, too many for a message. Stack some of them.")
    return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)), dtype=torch.int64)


def _read_header(header: torch.Tensor) -> tuple[TensorForm, ...]:
    numbers = header.tolist()
    forms, offset = [], 1
    for _ in range(numbers[0]):
        code, wants, dims = numbers[offset : offset + 3]
        forms.append(TensorForm(TYPES[code], tuple(numbers[offset + 3 : offset + 3 + dims]), bool(wants)))
        offset += 3 + dims
    return tuple(forms)


def _words(forms: Sequence[TensorForm]) -> str:
    return " and ".join(f"{str(form.dtype).removeprefix('torch.')} {list(form.shape)}" for form in forms)
