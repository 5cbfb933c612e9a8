"""Gradients of data-parallel models travel compressed: `compress`, or the remedy 'comm.compress'.

`compress(model, plan)` registers a communication hook, whose buckets a thread with a process group of its own reduces
(`headway.runtime.lane`, `torch_push_pull`). `plan` is the name of a codec, or a mapping from patterns over parameter
names to names; a parameter that no pattern matches travels raw.

    compression = compress(model, {"*.weight": "topk:0.01"})
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer, compression=compression)

The remedy registers it at a model's first forward, only where the script has no hook; a script that registers one
later gets the buckets from then on. A step in which any gradient of any rank is NaN, infinite or beyond the range of
its codec is skipped on all: gradients become NaN, as with a plain sum, residuals stay, and the optimizer finds no
gradients.

>>> CompressParameters("topk:2.5")
Traceback (most recent call last):
headway.core.errors.InputError: topk:2.5: k is '2.5'; write a fraction in (0, 1], or a count of numbers above 1, for \
example 0.01.

Gradients of FSDP2 travel compressed: a reduce-scatter of packets in place of torch's, for dense codecs.

`fully_shard` reduces the gradients of a group of parameters as one flat tensor, a part per rank. Each part is encoded,
all parts go to their owners in one all-to-all, and an owner adds what it decodes in the order of ranks:

    rank r   [part 0][part 1]..  -> packets ->  owner q: sum or mean of D(packet) of ranks 0, 1, ..

What an owner has is its shard, so nothing is sent back, and no rank has to end with the bits of another one. Nothing
is left out either: of the codecs only those whose error is rounding are taken, and no residuals are kept. A NaN or
infinity on one rank, or a number beyond half precision under `half`, makes the group's gradients NaN on all, as with a
plain sum; whether such a step counts is the script's choice, as ever.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headway.comm.compression.torch_codecs import Codec, codec_of
from headway.comm.compression.torch_push_pull import FLAG, BucketLayout, PushPull, cut
from headway.comm.remedies import CompressParameters
from headway.comm.torch_buckets import BucketFn, HookedModels
from headway.core.errors import Closing, InputError
from headway.cost.codecs import MIN_BYTES, read_codec
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.lane import SCATTERED, CollectiveLane, separate_group
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


NAME = "comm.compress"

Plan = str | Mapping[str, str]
"""Codec of all parameters, or pattern over names -> codec; the first pattern that matches decides."""


def compress(
    model: Any, plan: Plan, *, feedback: bool = True, two_way: bool = True, min_bytes: int = MIN_BYTES
) -> GradientCompression | ShardedCompression:
    """Compress the gradients of `model` from its next backward on; every rank calls it.

    It is a DistributedDataParallel, or has modules sharded by FSDP2 (codecs half, bfloat16 and int8,
    for all parameters, without residuals and sent one way, whatever `feedback` and `two_way` say).

    feedback
        Keep what a biased codec leaves out and add it to the next gradient.
    two_way
        Compress the answer of owners too; otherwise every rank gets the packets of all, which suits few ranks.
    min_bytes
        Smaller gradients travel raw.

    Raises `InputError` for an invalid plan, a model that is neither or has a hook already, and where ranks were given
    different plans: in backward, of FSDP2 at once.
    """
    sharded = sharded_modules(model)
    if sharded:
        check_plan(plan, min_bytes)
        return ShardedCompression(sharded, plan, min_bytes=min_bytes)
    return GradientCompression(model, plan, feedback=feedback, two_way=two_way, min_bytes=min_bytes)


class GradientCompression(Closing):
    """What `compress` returns: its state is saved and restored with `state_dict` and `load_state_dict`."""

    def __init__(
        self, model: Any, plan: Plan, *, feedback: bool, two_way: bool, min_bytes: int,
        lane: CollectiveLane | None = None, failed: Callable[[str], None] = lambda reason: None,
    ) -> None:  # fmt: skip
        """Take over the buckets of `model`, by way of `lane` or one of its own; `failed` learns why that has ended."""
        check_plan(plan, min_bytes)
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise InputError(
                f"a {type(model).__name__} has no hook for gradients that compression could use. Wrap the model in "
                "DistributedDataParallel, or shard it with fully_shard."
            )
        if getattr(model, "_comm_hooks", None):
            raise InputError("the model has a communication hook already. DDP takes one; compress before, or instead.")
        unreal = next((name for name, p in model.module.named_parameters() if p.is_complex()), None)
        if unreal is not None:
            raise InputError(f"{unreal} is complex: gradients of such parameters are not compressed. Leave them plain.")
        bags = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        sparse = next(
            (name for name, one in model.module.named_modules() if isinstance(one, bags) and one.sparse), None
        )
        if sparse is not None:
            raise InputError(f"{sparse} has sparse gradients, which are not compressed. Pass it sparse=False.")
        # No reference to the model: the reducer of the model holds this, where no garbage collection looks.
        self._model, self.plan, self.min_bytes = weakref.ref(model), plan, min_bytes
        self._failed = failed
        self._names = {id(p): name for name, p in model.module.named_parameters()}
        # All of them: one that was frozen after the model was wrapped is in a bucket all the same.
        self._sizes = {name: p.numel() for name, p in model.module.named_parameters()}
        self._codecs = {name: self._codec(name) for name in self._sizes}
        group = self._plain_group = model.process_group
        self._pull = PushPull(group.size(), group.rank(), feedback=feedback, two_way=two_way)
        self._layouts: dict[tuple[str, ...], BucketLayout] = {}
        self._checked = False
        self.skipped = 0
        self._skips = False
        self.successor: Callable[[Any], Future[torch.Tensor]] | None = None
        """Who reduces buckets from now on, once this does not."""
        self._lane, self._own = lane or lane_of(model), lane is None
        before = weakref.WeakMethod(self._before_update)
        self._hook = register_optimizer_step_pre_hook(lambda *_: one() if (one := before()) is not None else None)
        weakref.finalize(model, self._hook.remove)
        # torch looks at the annotations of a hook, which it wants unquoted: this one has none.
        model.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))

    @property
    def stats(self) -> dict[str, float]:
        """Return steps, steps skipped, bytes sent by this rank per step, and bytes of its gradients."""
        steps = max(self._pull.steps, 1)
        return {
            "steps": self._pull.steps,
            "skipped": self.skipped,
            "sent_bytes_per_step": self._pull.sent_bytes / steps,
            "gradient_bytes": 4 * sum(self._sizes.values()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has left out so far, as sender and as owner, and the number of steps."""
        pull = self._pull
        return {"steps": pull.steps, "sent": pull.sent.state_dict(), "answered": pull.answered.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the residuals of this rank. Raises `InputError` where they are of another model or number of ranks."""
        pull, layout = self._pull, self._layout(self._sizes)
        sent = {unit.name: self._sizes[unit.name] for units in layout.partitions for unit in units}
        sent |= {name: self._sizes[name] for name in layout.shared}
        for residuals, side, sizes in ((pull.sent, "sent", sent), (pull.answered, "answered", layout.owned)):
            try:
                residuals.load(state.get(side, {}), sizes)
            except InputError as cause:
                raise InputError(f"rank {pull.rank}: {cause}") from None
        pull.steps = int(state["steps"])

    def close(self) -> None:
        """Send plain from now on, on every rank alike, and give the thread and its group up."""
        if self.successor is None:
            self.successor = lambda bucket: default_hooks.allreduce_hook(self._plain_group, bucket)
        self._hook.remove()
        if self._own:
            self._lane.close()

    def _codec(self, name: str) -> Codec | None:
        """Return the codec of a parameter, None where it travels raw."""
        if isinstance(self.plan, str):
            return codec_of(self.plan)
        return next((codec_of(codec) for glob, codec in self.plan.items() if fnmatch.fnmatchcase(name, glob)), None)

    def _layout(self, names: Iterable[str]) -> BucketLayout:
        """Return how gradients that come together are cut."""
        pull = self._pull
        tensors = [(name, self._sizes[name], self._codecs[name]) for name in names]
        return cut(tensors, pull.ranks, pull.rank, min_bytes=self.min_bytes, two_way=pull.two_way)

    def _reduce(self, bucket: Any) -> Future[torch.Tensor]:
        """Queue a bucket; called by DDP in the order of buckets, the same on all ranks."""
        reduced: Future[torch.Tensor]
        failure = self._pull.failure
        if bucket.index() == 0 and failure is not None and self.successor is None:  # now on all ranks
            self.close()
            self._failed(f"failed in use, and was undone: {type(failure).__name__}: {failure}")
        if self.successor is not None:
            reduced = self.successor(bucket)
            return reduced
        if bucket.index() == 0:
            self._skips = False
        whole: torch.Tensor = bucket.buffer()
        last, parameters = bucket.is_last(), bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        # Slices of the buffer, not bucket.gradients(): those have the strides of their parameters.
        gradients = dict(zip(names, whole.split_with_sizes([p.numel() for p in parameters]), strict=True))

        def work(group: dist.ProcessGroup) -> torch.Tensor:
            """Reduce the bucket; runs on the lane."""
            self._check_plans(group, whole.device)
            with torch.no_grad():
                if not self._pull.failure and names not in self._layouts:
                    try:
                        self._layouts[names] = self._layout(names)
                    except InputError as cause:  # on all ranks alike: it follows from the sizes
                        self._pull.failure = cause
                if not self._pull.failure:
                    self._pull.reduce(self._layouts[names], gradients, group, whole)
                if self._pull.failure:
                    dist.all_reduce(whole.div_(self._pull.ranks), group=group)
            if last and not self._pull.end_step():
                self.skipped += 1
                self._skips = True
                if self.skipped == 1:
                    warn("comm.compress: a gradient is NaN or infinite; such steps are skipped on all ranks")
            return whole

        reduced = self._lane.submit(work)
        return reduced

    def _check_plans(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Compare the plans of all ranks, once: packets of unlike codecs would be taken for one another."""
        if self._checked:
            return
        words = json.dumps([str(self.plan), self.min_bytes, self._pull.feedback, self._pull.two_way, self._sizes])
        own = torch.tensor([zlib.crc32(words.encode()), len(words)], device=device)
        found = [torch.empty_like(own) for _ in range(self._pull.ranks)]
        dist.all_gather(found, own, group=group)
        unlike = [rank for rank, row in enumerate(found) if not torch.equal(row, found[0])]
        if unlike:
            raise InputError(
                f"ranks {unlike} compress otherwise than rank 0; rank {self._pull.rank} has {self.plan!r}, "
                f"min_bytes {self.min_bytes}. Give all ranks the same plan and the same model."
            )
        self._checked = True

    def _before_update(self) -> None:
        """Take away the gradients of a step that is skipped: optimizers pass parameters without one over."""
        model = self._model() if self._skips else None
        for parameter in model.module.parameters() if model is not None else ():
            parameter.grad = None


def check_plan(plan: object, min_bytes: object = MIN_BYTES) -> None:
    """Raise `InputError` for what is not a plan."""
    if not isinstance(plan, (str, Mapping)) or not plan:
        raise InputError(f"the plan is {plan!r}; name a codec such as 'topk:0.01', or map patterns to codecs.")
    for name in [plan] if isinstance(plan, str) else plan.values():
        read_codec(name)
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
        raise InputError(f"min_bytes is {min_bytes!r}; give a whole number of bytes, 0 or more.")


def compression(parameters: CompressParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    watch = _Models(parameters, context)
    watch.install()
    context.undos.append(watch.end)
    return Applied(NAME, watch.facts)


class _Models(HookedModels[GradientCompression]):
    """The models of a script: each is compressed from its first forward on."""

    def __init__(self, parameters: CompressParameters, context: Context) -> None:
        super().__init__(NAME, context)
        self.options = parameters.to_json()
        self.plan = self.options.pop("codec")
        self.facts: dict[str, Any] = {"codec": self.plan, "models": 0, **self.options}
        self._lanes: list[tuple[Any, Any, CollectiveLane]] = []  # group and device of models, and what they share

    def hand_over(self, hook: GradientCompression, successor: BucketFn) -> None:
        """Send no more of the model."""
        hook.successor = successor
        hook.close()
        self.facts["models"] -= 1

    def begin(self, model: Any) -> None:
        """Compress the model, or note why not."""
        if getattr(model, "_comm_hooks", None):
            self.context.note(RefusedRemedy(NAME, "the script has a communication hook of its own"))
            return
        if model.process_group.size() < 2:
            self.context.note(RefusedRemedy(NAME, "one rank sends nothing"))
            return
        names = [name for name, _ in model.module.named_parameters()]
        if not isinstance(self.plan, str) and not any(fnmatch.filter(names, glob) for glob in self.plan):
            self.context.note(RefusedRemedy(NAME, f"no parameter has a name like {', '.join(self.plan)}"))
            return
        try:
            failed = functools.partial(self.context.fail, NAME)
            with self.registering():
                lane = self._lane(model)
                self.known[model] = GradientCompression(model, self.plan, **self.options, lane=lane, failed=failed)
        except InputError as reason:
            self.context.note(RefusedRemedy(NAME, str(reason)))
            return
        self.facts["models"] += 1
        self.facts["residuals"] = "in memory only: a restart begins without them"
        self.context.note(Applied(NAME, self.facts))

    def _lane(self, model: Any) -> CollectiveLane:
        """Return the lane of all models of a group: each has a thread and a communicator."""
        group, device = model.process_group, next(model.parameters()).device
        found = next((lane for known, on, lane in self._lanes if known is group and on == device), None)
        if found is None:
            self._lanes.append((group, device, found := lane_of(model)))
        return found

    def end(self) -> None:
        """Send plain from now on."""
        for hook in self.hooks:
            hook.close()
        for _, _, lane in self._lanes:
            lane.close()


def lane_of(model: Any) -> CollectiveLane:
    """Return a new lane over the ranks of a model; all of them call it."""
    ranks, device = dist.get_process_group_ranks(model.process_group), next(iter(model.module.parameters())).device
    group = separate_group("headway-compression", ranks=None if len(ranks) == dist.get_world_size() else ranks)
    return CollectiveLane(group, device=None if device.type == "cpu" else device)
