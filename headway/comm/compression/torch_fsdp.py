"""Gradients of FSDP2 travel compressed: a reduce-scatter of packets in place of torch's, for dense codecs.

`fully_shard` reduces the gradients of a group of parameters as one flat tensor, a part per rank. Each part is encoded,
all parts go to their owners in one all-to-all, and an owner adds what it decodes in the order of ranks:

    rank r   [part 0][part 1]..  -> packets ->  owner q: sum or mean of D(packet) of ranks 0, 1, ..

What an owner has is its shard, so nothing is sent back, and no rank has to end with the bits of another one. Nothing
is left out either: of the codecs only those whose error is rounding are taken, and no residuals are kept. A NaN or
infinity on one rank, or a number beyond half precision under `half`, makes the group's gradients NaN on all, as with a
plain sum; whether such a step counts is the script's choice, as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from headway.comm.compression.torch_codecs import Codec, codec_of
from headway.comm.compression.torch_push_pull import FLAG
from headway.core.closing import Closing
from headway.core.errors import InputError
from headway.runtime.lane import SCATTERED
from headway.runtime.quantize import is_finite
from headway.trace.rings.ring import warn

CODECS = ("half", "bfloat16", "int8")
"""Codecs that need no residual."""

SETTER = "set_custom_reduce_scatter"
"""Method of an FSDPModule that not every torch has."""

SHARES = {"RedOpType.SUM": False, "RedOpType.AVG": True}
"""Operation that FSDP2 asks for -> whether it is a mean."""


def sharded_modules(model: Any) -> list[Any]:
    """Return the modules of `model` that `fully_shard` has sharded."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not isinstance(model, torch.nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def _group(module: Any) -> Any:
    """Return what FSDP2 keeps of the parameters of a sharded module; None where they travel with another module's."""
    return getattr(module._get_fsdp_state(), "_fsdp_param_group", None)


def _has_own_reduction(module: Any) -> bool:
    """Say whether somebody has set a custom reduce-scatter of a sharded module; torch's own classes are no such one."""
    reduce = getattr(_group(module), "_reduce_scatter_comm", None)
    return reduce is not None and not type(reduce).__module__.startswith("torch.")


def _has_replicas(module: Any) -> bool:
    """Say whether the shards of a module are replicated, on a hybrid mesh: FSDP2 all-reduces them between replicas."""
    mesh = getattr(_group(module), "mesh_info", None)
    return getattr(mesh, "shard_process_group", None) is not None and hasattr(mesh, "replicate_process_group")


class ShardedCompression(Closing):
    """What `compress` returns for a model of FSDP2; it keeps no residuals."""

    def __init__(self, modules: Sequence[Any], plan: object, *, min_bytes: int) -> None:
        """Take over the reduce-scatter of `modules`; every rank calls it. Raises `InputError` as `compress`."""
        if plan not in CODECS:
            raise InputError(
                f"the plan for FSDP2 is {plan!r}; its parameters are reduced together and keep no residuals, so choose "
                f"one of: {', '.join(CODECS)}."
            )
        own = [type(module).__name__ for module in modules if _has_own_reduction(module)]
        if own:
            raise InputError(
                f"{own[0]} has a custom reduce-scatter already. FSDP2 takes one; compress before, or instead."
            )
        missing = [type(module).__name__ for module in modules if not hasattr(module, SETTER)]
        if missing:
            raise InputError(f"FSDP2 of torch {torch.__version__} has no {SETTER}. Use DistributedDataParallel.")
        plans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(plans, (plan, min_bytes))
        unlike = [rank for rank, other in enumerate(plans) if other != plans[0]]
        if unlike:
            raise InputError(
                f"ranks {unlike} compress otherwise than rank 0; rank {dist.get_rank()} has {plan!r}, min_bytes "
                f"{min_bytes}. Give all ranks the same plan."
            )
        self._reduce = _ReduceScatter(codec_of(str(plan)), min_bytes)
        if any(_has_replicas(module) for module in modules):
            warn("comm.compress: the mesh has replicas; between them gradients are summed uncompressed")
        for module in modules:
            module.set_custom_reduce_scatter(self._reduce)

    @property
    def stats(self) -> dict[str, float]:
        """Return groups of parameters reduced so far, bytes sent by this rank, and bytes of the gradients of them."""
        reduce = self._reduce
        return {"groups": reduce.groups, "sent_bytes": reduce.sent_bytes, "gradient_bytes": reduce.gradient_bytes}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there are no residuals."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returns. Raises `InputError` where there is more: it is of DistributedDataParallel."""
        if state:
            raise InputError(f"FSDP2 keeps no residuals, and the state has {sorted(state)}. Begin without a state.")

    def close(self) -> None:
        """Send plain from now on, on every rank alike."""
        self._reduce.codec = None


class _ReduceScatter:
    """What FSDP2 calls in place of a reduce-scatter, in one order on all ranks."""

    def __init__(self, codec: Codec, min_bytes: int) -> None:
        self.codec: Codec | None = codec
        self.min_bytes = min_bytes
        self.groups = self.sent_bytes = self.gradient_bytes = 0
        self._total = torch.empty(0)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write this rank's part [n] of the sum or mean of all `input_tensor` [ranks * n] into `output_tensor`."""
        size = input_tensor.numel() * input_tensor.element_size()
        if self.codec is None or size < self.min_bytes or not size:
            work: dist.Work | None = SCATTERED(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return work
        word = str(op)
        if word not in SHARES:
            word = "a scaled sum" if word.startswith("<") else word
            raise InputError(
                f"FSDP2 asks for {word}; compressed gradients are summed or averaged. Set no divide factor."
            )
        ranks, n = group.size(), output_tensor.numel()
        parts = input_tensor.view(ranks, n).float()
        finite = is_finite(parts) and self.codec.fits(parts.view(-1))
        parts = parts if finite else torch.zeros_like(parts)
        encoded = torch.stack([self.codec.encode(part, 0) for part in parts])
        packets = torch.cat([encoded.new_full((ranks, FLAG), not finite), encoded], 1)
        arrived = torch.empty_like(packets)
        dist.all_to_all_single(arrived, packets, group=group)
        self.groups += 1
        self.sent_bytes += packets.numel()
        self.gradient_bytes += size
        if self._total.numel() < n or self._total.device != arrived.device:
            self._total = torch.empty(n, device=arrived.device)
        total = self._total[:n].zero_()
        for packet in arrived[:, FLAG:]:
            self.codec.add(total, packet, 1.0 / ranks if SHARES[word] else 1.0)
        output_tensor.copy_(total)
        if bool(arrived[:, 0].any()):
            output_tensor.fill_(float("nan"))
        return None
