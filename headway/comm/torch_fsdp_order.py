"""'comm.order' for FSDP2, without touching the script: the next module's all-gather starts while this one computes.

FSDP2 gathers the parameters of a module when its forward begins, and waits for
them there. The first forward of each sharded model shows the order in which
its modules run; from then on each prefetches those that follow it, in forward
and in backward, by FSDP2's own `set_modules_to_forward_prefetch` and
`set_modules_to_backward_prefetch`. The same numbers are gathered and summed,
only sooner: results stay the same bit for bit.

That needs modules that run one after the other, each once, always alike: any
other order is refused. So is a script that changes parameters of a module within a
forward, before that module runs. A later forward that leaves the order gives
back what was gathered in vain, before anybody could use it, and ends the
prefetching.

With `early` the first all-gathers of a step start right after the update
(MegaScale: its first all-gather runs while the data is loaded):

    without  | update | loader ... | gather 0 | forward 0 ...
    early    | update | loader ... | forward 0 ...
             link     | gather 0 |

Parameters that have changed when the forward begins are gathered anew, and
nothing is gathered early from then on.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headway.comm.remedies import OrderParameters
from headway.runtime.calls.patches import replace_attribute
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy, on_scaled_loss

NAME = "comm.order"

_FSDP = "torch.distributed.fsdp"
_HOME = f"{_FSDP}._fully_shard._fully_shard"
_COPIES = (_FSDP, f"{_FSDP}._fully_shard", "torch.distributed._composable.fsdp", "torch.distributed._composable")
SETTERS = ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
"""Methods of an FSDPModule by which a script can say its own order."""


def order(parameters: OrderParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    watch = _Watch(parameters.ahead, context.note, context.guarded, early=parameters.early)
    context.undos.append(replace_attribute(f"{_HOME}:fully_shard", context.guarded(watch.shards), copies=_COPIES))
    registers = context.guarded(watch.registers)
    context.undos.append(replace_attribute(f"{_HOME}:register_fsdp_forward_method", registers, copies=_COPIES))
    for setter in SETTERS:
        context.patch(f"{_HOME}:FSDPModule.{setter}", watch.sets)
    context.undos.append(watch.undo)
    if parameters.early:
        updated = context.hook(lambda optimizer, args, kwargs: watch.updated())
        context.undos.append(register_optimizer_step_post_hook(updated).remove)
        # A rank alone may skip an update then: it would gather later than the others.
        on_scaled_loss(context, lambda: watch.end_early("the script scales its loss: ranks may skip updates"))
    return watch.outcome()


class _Watch:
    """Sees sharded modules run, and sets what each prefetches."""

    def __init__(
        self,
        ahead: int,
        note: Callable[[Applied | RefusedRemedy], None],
        guarded: Callable[[Any], Callable[[Any], Any]],
        *,
        early: bool = False,
    ) -> None:
        self.ahead, self.note, self.guarded = ahead, note, guarded
        self.chains: dict[int, _Chain | None] = {}
        """Root -> the order that it prefetches in; None = it was refused or given up."""
        self.reasons: list[str] = []
        """Why a model has no order, each reason once."""
        self._never = ""
        """Why no model may have one."""
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._handles: list[Any] = []
        self._running: list[int] = []
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._versions: dict[int, list[int]] = {}
        """Module -> how often its parameters had been written when the forward began."""
        self._ahead_now = False
        """Whether modules of the forward that runs are gathered ahead."""
        self._own = False
        """Whether a setter is called from here, not by the script."""
        self._wants_early = early
        self._gathering: dict[int, list[int]] = {}
        """Module that is gathered for the next step -> how often its parameters had been written by then."""
        self._early_facts: dict[str, Any] = {"early": 0} if early else {}

    def outcome(self) -> Applied | RefusedRemedy:
        """Return what is known so far: refused once every model that ran is."""
        chains = [chain for chain in self.chains.values() if chain is not None]
        if self.reasons and not chains:
            return RefusedRemedy(NAME, self.reasons[-1])
        facts: dict[str, Any] = {"ahead": self.ahead, "models": len(chains)}
        facts["modules"] = sum(len(chain.forward) for chain in chains)
        return Applied(NAME, facts | self._early_facts | ({"refused": list(self.reasons)} if self.reasons else {}))

    def undo(self) -> None:
        """Watch no more, and prefetch as before."""
        for handle in self._handles:
            handle.remove()
        self._drop_early(self._gathering)
        for root in list(self.chains):
            self._set(root, {}, {})
        self.chains.clear()

    def shards(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `fully_shard`: look at the modules that it returns."""

        @functools.wraps(original)
        def fully_shard(*args: Any, **kwargs: Any) -> Any:
            """Shard, and watch the modules run."""
            sharded = original(*args, **kwargs)
            together = list(sharded) if isinstance(sharded, (list, tuple)) else [sharded]
            if len(together) > 1:
                self._end(f"{len(together)} modules are sharded as one: they have no place in an order of modules")
            for module in together if len(together) == 1 else ():
                self._watch(module)
            return sharded

        return fully_shard

    def sets(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a setter of FSDPModule: a script that says its own order keeps it."""

        @functools.wraps(original)
        def setter(module: Any, modules: Any) -> Any:
            """Set what is prefetched."""
            if not self._own:
                self._end("the script sets its own order of prefetching, which the plan respects")
            return original(module, modules)

        return setter

    def registers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `register_fsdp_forward_method`: such a method gathers ahead without any hook of the module."""

        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            """Register the method, and prefetch nothing."""
            self._end("the script registers forward methods of its own: what they run is not seen")
            return original(*args, **kwargs)

        return register

    def _watch(self, module: Any) -> None:
        import torch

        compiling = torch.compiler.is_compiling
        self._modules[id(module)] = weakref.ref(module)

        # Functions, not methods: hooks are copied with a module, and a copied method would copy the watch.
        def begins(module: Any, args: Any) -> None:
            if not compiling() and id(module) in self._modules and not _in_backward():
                if not self._running:
                    self._forward_begins()
                    self._early_ends(module)
                elif self._versions.get(id(module)) != _versions(module):
                    self._edited(module)
                self._running.append(id(module))
                self._begun.append(id(module))

        def ends(module: Any, args: Any, result: Any) -> None:
            if not compiling() and id(module) in self._running and not _in_backward():
                del self._running[self._running.index(id(module)) :]
                self._ended.append(id(module))
                if not self._running:
                    self._forward_ended(module)

        def nothing(*_: Any) -> None:
            """Stand for what the hooks replace."""

        self._handles.append(module.register_forward_pre_hook(self.guarded(lambda _: begins)(nothing)))
        self._handles.append(module.register_forward_hook(self.guarded(lambda _: ends)(nothing), always_call=True))

    def _forward_begins(self) -> None:
        """Note how the parameters are before any of them is gathered."""
        self._begun, self._ended = [], []
        alive = {key: module for key, ref in self._modules.items() if (module := ref()) is not None}
        self._versions = {key: _versions(module) for key, module in alive.items()}
        self._ahead_now = any(chain is not None for chain in self.chains.values())

    def updated(self) -> None:
        """Start the first all-gathers of the next step: the parameters have just been updated."""
        if not self._wants_early or self._never:
            return
        if self._gathering:  # of an update that no forward followed
            self._drop_early(self._gathering)
            self.end_early("parameters are updated twice without a forward")
            return
        for chain in [chain for chain in self.chains.values() if chain is not None]:
            for key in chain.forward[: 1 + self.ahead]:
                if (module := self._modules[key]()) is not None:
                    self._gathering[key] = _versions(module)
                    module.unshard(async_op=True)  # what waits for it is the module's own forward
        if self._early_facts["early"] < len(self._gathering):
            self._early_facts["early"] = len(self._gathering)  # modules of a step
            self.note(self.outcome())

    def _early_ends(self, outermost: Any) -> None:
        """Gather anew what has been written since it was gathered early; the forward of `outermost` has begun."""
        stale = [key for key, before in self._gathering.items() if self._versions.get(key) != before]
        if stale and self._gathering.pop(id(outermost), None) is not None:
            for group in outermost._get_fsdp_state()._fsdp_param_groups:
                group._to_sharded()
            outermost.unshard()
        # Of a forward of some modules alone the others are not used: nobody would look at them again.
        self._drop_early(stale if self.chains.get(id(outermost)) else set(self._gathering) - {id(outermost)})
        if stale:
            self.end_early("the script changes parameters between an update and the next forward")
        self._gathering.clear()

    def _drop_early(self, keys: Iterable[int]) -> None:
        """Free what was gathered for the next step of some modules."""
        for key in list(keys):
            if self._gathering.pop(key, None) is not None and (module := self._modules[key]()) is not None:
                module.unshard()
                module.reshard()

    def end_early(self, reason: str) -> None:
        """Gather nothing early any more; modules are gathered ahead as before."""
        if self._wants_early:
            self._wants_early = False
            self._early_facts["early_ended"] = reason
            self.note(self.outcome())

    def _edited(self, module: Any) -> None:
        """Gather the parameters of a module anew that the script has changed since this forward began, and end."""
        if self._ahead_now:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._to_sharded()
            module.unshard()
        if not self._never:
            self._end("the script changes parameters while a forward runs: gathered ahead they would be old")

    def _forward_ended(self, outermost: Any) -> None:
        """Look at a whole forward: learn the order from the first one, hold later ones against it."""
        try:
            known = self.chains.get(id(outermost))
            if known is not None and known.forward == self._begun:
                return
            self._give_back()
            if id(outermost) not in self.chains and self._is_root(outermost):
                self._learn(outermost)
        except Exception as cause:
            self._end(f"{type(cause).__name__}: {cause}")

    def _learn(self, root: Any) -> None:
        """Set the order that the first forward of `root` shows, or say why there is none."""
        self.chains[id(root)] = None
        inside = [id(module) for module in root.modules() if id(module) in self._modules]
        if reason := self._never or _why_no_chain(inside, self._begun):
            self._refuse(reason)
            return
        chain = self.chains[id(root)] = _Chain(list(self._begun), self._ended[::-1], self.ahead)
        self._set(id(root), chain.follows(chain.forward), chain.follows(chain.backward))
        self.note(self.outcome())

    def _give_back(self) -> None:
        """After a forward out of order: free what was gathered and not used, and end that model's prefetching."""
        follows = {key: after for chain in self.chains.values() if chain for key, after in chain.ahead_of().items()}
        pending: dict[int, None] = {}
        for key in self._begun:
            pending.pop(key, None)
            pending |= dict.fromkeys(follows.get(key, ()))
        for key in pending:
            if (module := self._modules[key]()) is not None:
                # Parameters gathered now would be stale by the time that it runs.
                module.unshard()
                module.reshard()
        for root, chain in list(self.chains.items()):
            if chain and set(self._begun) & set(chain.forward):
                self._stop(root, "its modules ran in another order later")

    def _is_root(self, module: Any) -> bool:
        """Say whether no other sharded module holds this one."""
        others = (other for key, ref in self._modules.items() if key != id(module) and (other := ref()) is not None)
        return not any(inner is module for other in others for inner in other.modules())

    def _stop(self, root: int, reason: str) -> None:
        self._set(root, {}, {})
        self.chains[root] = None
        self._refuse(reason)

    def _end(self, reason: str) -> None:
        """Prefetch nothing any more, in no model."""
        self._never = self._never or reason
        for root, chain in list(self.chains.items()):
            if chain is not None:
                self._stop(root, reason)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.note(self.outcome())

    def _set(self, root: int, forward: Mapping[int, Sequence[int]], backward: Mapping[int, Sequence[int]]) -> None:
        """Set what each module of a model prefetches; nothing for those that are not named."""
        chain = self.chains.get(root)
        modules = {key: module for key in (chain.forward if chain else ()) if (module := self._modules[key]())}
        self._own = True
        try:
            for key, module in modules.items():
                for name, follows in zip(SETTERS, (forward, backward), strict=True):
                    getattr(module, name)([modules[other] for other in follows.get(key, ()) if other in modules])
        finally:
            self._own = False
        if (top := modules.get(root)) is not None and next(top.parameters()).device.type == "cpu":
            # There are no streams: only a collective that is not waited for where it is queued runs beside compute.
            top._set_unshard_async_op(bool(forward))


class _Chain:
    """The modules of one model (by id) in the order in which they run."""

    def __init__(self, forward: list[int], backward: list[int], ahead: int) -> None:
        self.forward, self.backward, self.ahead = forward, backward, ahead

    def follows(self, chain: Sequence[int]) -> dict[int, Sequence[int]]:
        """Return module -> those that come next."""
        return {key: chain[at + 1 : at + 1 + self.ahead] for at, key in enumerate(chain)}

    def ahead_of(self) -> dict[int, Sequence[int]]:
        """Return module -> those that its forward gathers ahead."""
        return self.follows(self.forward)


def _versions(module: Any) -> list[int]:
    """Return how often each parameter that a sharded module gathers has been written on this rank."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    sharded = [param.sharded_param for group in groups for param in group.fsdp_params]
    # A write through the DTensor shows in its own version alone, one of its local part in that one's.
    return [version for param in sharded for version in (param._version, param.to_local()._version)]


def _why_no_chain(inside: Sequence[int], begun: Sequence[int]) -> str:
    """Say why the modules that a forward began are no chain of those inside the model; '' when they are."""
    if len(inside) < 2:
        return "the model is sharded as a whole: there is no next module to gather"
    times = Counter(begun)
    most = max(times.values())
    if most > 1:
        return f"a sharded module ran {most} times in one forward: the modules are no chain"
    missing = sum(key not in times for key in inside)
    if missing:
        return f"{missing} of {len(inside)} sharded modules did not run in the first forward: the modules are no chain"
    return ""


def _in_backward() -> bool:
    """Say whether autograd runs on this thread: a forward then is activation checkpointing's, not the script's."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
