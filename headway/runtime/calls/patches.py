"""Every function that headway replaces, in one literal table: the only monkey-patching in the library.

A patch names its target, the factory of its wrapper, and a self-test that the
wrapper must pass before it goes in. A patch that cannot be made is one line
on stderr and a lower coverage; `undo` puts the original back. Remedies patch
through `replace_attribute` too, by their `Context`.

>>> undo = replace_attribute("colorsys:rgb_to_yiq", lambda original: lambda *rgb: original(*rgb))
>>> import colorsys; colorsys.rgb_to_yiq.__name__
'<lambda>'
>>> undo(); colorsys.rgb_to_yiq.__name__
'rgb_to_yiq'
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from headway.core.errors import InputError
from headway.core.machine.interruptions import pass_on
from headway.runtime.calls import (
    probe_comm,
    probe_device,
    probe_functional,
    probe_host,
    probe_input,
    probe_model,
    probe_state,
    probe_step,
)
from headway.runtime.calls import probe_device as probe_copy
from headway.runtime.calls import probe_device as probe_sync
from headway.runtime.calls import probe_functional as probe_pipeline
from headway.runtime.calls import probe_step as probe_gradient
from headway.runtime.host.device import host_has_devices
from headway.runtime.recorder import timers
from headway.runtime.recorder.probes import Probes, timers_off

Undo = Callable[[], None]
Wrapper = Callable[[Any, Probes], Any]


def same_face(wrapped: Any, original: Any) -> None:
    """Self-test of most wrappers: a function that presents itself as the original; raises `InputError` otherwise."""
    function = wrapped.__func__ if isinstance(wrapped, staticmethod) else wrapped
    if not callable(function) or getattr(function, "__wrapped__", None) is not original:
        raise InputError(f"{original!r} was wrapped by {function!r}, which does not replace it. Report this.")


@dataclass(frozen=True, slots=True)
class Patch:
    """One function to replace, or one list of callbacks to join."""

    target: str
    """'module:attribute.attribute' of what is replaced (or passed to `register`)."""

    wrapper: Wrapper | None = None
    """(original, probes) -> replacement."""

    register: Callable[[Any, Probes], Undo] | None = None
    """Instead of a wrapper: hook into the target by its own means; returns the undo."""

    self_test: Callable[[Any, Any], None] = same_face
    """(replacement, original) -> None; raises when the replacement must not go in."""

    needs: str = ""
    """Words: 'device' only where the host has one, 'timers' only where they are not switched off; '' everywhere."""

    copies: tuple[str, ...] = ()
    """Modules that import the function by name; their copy is replaced too when they are there already."""

    stands: bool = False
    """Whether the replacement calls what the original would, in its place: it adds no frame to the stack."""

    optional: bool = False
    """Whether a version of torch without the target is no reason for a warning."""

    @property
    def module(self) -> str:
        """The module whose import makes this patch possible."""
        return self.target.partition(":")[0]


_DIST = ("torch.distributed",)
_DCP = ("torch.distributed.checkpoint",)
_C10D = "torch.distributed.distributed_c10d:"
_HOOKS = "torch.optim.optimizer:register_optimizer_step_post_hook"
_LOADER = "torch.utils.data.dataloader:"
_DYNAMO = "torch._dynamo.callback:CompilationCallbackHandler."
_FUNCTIONAL = "torch.distributed._functional_collectives:"
_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase."
_FETCH = "torch.utils.data._utils.fetch:"

PATCHES: dict[str, Patch] = {
    # Steps.
    "optimizer.step": Patch("torch.optim.optimizer:Optimizer.profile_hook_step", probe_step.profile_hook_step),
    "optimizer.step.existing": Patch("torch.optim.optimizer:Optimizer", register=probe_step.join_existing),
    "GradScaler.step": Patch("torch.amp.grad_scaler:GradScaler.step", probe_step.scaler_step),
    "segment.backward": Patch("torch.autograd:backward", timers.backward, needs="timers"),
    "segment.backward.device": Patch("torch.autograd:backward", probe_device.device_backward,
                                     needs="device timers"),
    "segment.forward.device": Patch(_LOADER + "_BaseDataLoaderIter.__next__", probe_device.batch_ready,
                                    needs="device timers"),
    "segment.update.device": Patch(_HOOKS, register=probe_device.join_updates, needs="device timers"),
    # What the steps are made of.
    "forward": Patch("torch:nn.Module.__call__", probe_model.module_call, needs="timers", stands=True),
    "mode": Patch("torch:nn.Module.train", probe_model.module_train, needs="timers"),
    "segment.grad": Patch("torch:autograd.grad", probe_gradient.autograd_grad, needs="timers"),
    "segment.grad.func": Patch("torch:_functorch.eager_transforms.grad_and_value_impl", probe_gradient.func_grad,
                               needs="timers", optional=True),
    "graph.replay": Patch("torch.cuda.graphs:CUDAGraph.replay", probe_gradient.graph_replay, needs="device timers",
                          optional=True),
    "graph.replay.any": Patch("torch.accelerator.graphs:Graph.replay", probe_gradient.graph_replay,
                              needs="device timers", optional=True),
    "graph.capture": Patch("torch.cuda.graphs:CUDAGraph.capture_begin", probe_gradient.graph_capture,
                           needs="device timers", optional=True),
    "graph.capture.any": Patch("torch.accelerator.graphs:Graph.capture_begin", probe_gradient.graph_capture,
                               needs="device timers", optional=True),
    # Input.
    "DataLoader.__init__": Patch(_LOADER + "DataLoader.__init__", probe_input.loader_init),
    "DataLoader.__iter__": Patch(_LOADER + "DataLoader.__iter__", probe_input.loader_iter),
    "DataLoader.__next__": Patch(_LOADER + "_BaseDataLoaderIter.__next__", probe_input.loader_next),
    "DataLoader.worker": Patch(_LOADER + "_MultiProcessingDataLoaderIter._process_data", probe_input.process_data,
                               optional=True),
    "fetcher": Patch(_FETCH + "_BaseDatasetFetcher.__init__", probe_input.fetcher_init),
    "input.load": Patch(_FETCH + "_MapDatasetFetcher.fetch", probe_input.fetch),
    "input.load.iterable": Patch(_FETCH + "_IterableDatasetFetcher.fetch", probe_input.fetch),
    "input.transfer.to": Patch("torch._tensor:Tensor.to", probe_copy.to_device, needs="device"),
    "input.transfer.cuda": Patch("torch._tensor:Tensor.cuda", probe_copy.to_device, needs="device"),
    "input.transfer.copy_": Patch("torch._tensor:Tensor.copy_", probe_copy.copy_in, needs="device"),
    # Waits for the device.
    **{f"host.sync.{name}": Patch(f"torch._tensor:Tensor.{name}", probe_sync.read, needs="device", optional=True)
       for name in probe_sync.READS},
    **{f"host.sync.{target}": Patch(target, probe_sync.synchronize, needs="device", optional=True)
       for target in probe_sync.SYNCHRONIZES},
    # Communication.
    "init_process_group": Patch(_C10D + "init_process_group", probe_comm.init_group, copies=_DIST),
    "new_group": Patch(_C10D + "new_group", probe_comm.new_group, copies=_DIST),
    "Work.wait": Patch(_C10D + "Work.wait", probe_comm.work_wait),
    **{name: Patch(_C10D + name, probe_comm.collective, copies=_DIST, optional=True)
       for name in probe_comm.COLLECTIVES_SEEN},
    **{name: Patch(_C10D + name, probe_comm.point_to_point, copies=_DIST, optional=True)
       for name in probe_comm.POINT_TO_POINT},
    "P2POp": Patch(_C10D + "P2POp", register=probe_comm.join_p2p, optional=True),
    **{f"functional.{name}": Patch(_FUNCTIONAL + name, probe_functional.launch, optional=True)
       for name in probe_functional.LAUNCHES},
    "functional.launched": Patch(_FUNCTIONAL + "_maybe_wrap_tensor", probe_functional.launched, optional=True),
    "functional.wait": Patch(_FUNCTIONAL + "wait_tensor", probe_functional.wait_tensor, optional=True),
    **{f"style.{name}": Patch(f"torch.distributed.tensor.parallel.style:{name}._apply", probe_functional.style_apply,
                              optional=True) for name in probe_functional.STYLES},
    **{f"stage.{name}": Patch(_STAGE + name, wrapper, optional=True) for name, wrapper in probe_pipeline.PARTS.items()},
    "pipeline": Patch("torch.distributed.pipelining.schedules:PipelineScheduleSingle.__init__",
                      probe_pipeline.schedule_init, optional=True),
    "comm.wait": Patch("torch.nn.parallel.distributed:DistributedDataParallel.__init__", probe_comm.ddp_init),
    # State.
    "torch.save": Patch("torch.serialization:save", probe_state.save(1, "f"), copies=("torch",)),
    "torch.load": Patch("torch.serialization:load", probe_state.load, copies=("torch",)),
    "dcp.save": Patch(_DCP[0] + ".state_dict_saver:save", probe_state.dcp_save, copies=_DCP),
    "dcp.async_save": Patch(_DCP[0] + ".state_dict_saver:async_save", probe_state.dcp_save, copies=_DCP),
    "dcp.load": Patch(_DCP[0] + ".state_dict_loader:load", probe_state.load, copies=_DCP),
    "safetensors.save_file": Patch("safetensors.torch:save_file", probe_state.save(1, "filename")),
    "safetensors.load_file": Patch("safetensors.torch:load_file", probe_state.load),
    "os.fsync": Patch("os:fsync", probe_state.fsync),
    "os.replace": Patch("os:replace", probe_state.rename),
    "os.rename": Patch("os:rename", probe_state.rename),
    # The host.
    "gc": Patch("gc:callbacks", register=probe_host.join_gc),
    "gc.collect": Patch("gc:collect", probe_host.collect),
    "logging": Patch("logging:Logger.callHandlers", probe_host.call_handlers),
    "torch.compile.start": Patch(_DYNAMO + "run_start_callbacks", probe_host.compile_start, optional=True),
    "torch.compile": Patch(_DYNAMO + "run_end_callbacks", probe_host.compile_end, optional=True),
}  # fmt: skip
"""Name -> patch. The names are the keys of `patches` in RUN/tables, and what HEADWAY_BREAK takes."""


SUPPORTS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids")
"""Sets of functions by which `shutil` asks what a function of `os` can do: a replacement can do the same."""


def replace_attribute(target: str, wrapper: Callable[[Any], Any], *, copies: Sequence[str] = ()) -> Undo:
    """Replace 'module:path' by `wrapper(original)` and return the undo; the module is imported if need be.

    Modules named in `copies` that are imported and hold the same object under the same name get the replacement too.

    Raises `InputError` when there is no such attribute. Works for functions, methods and static methods.
    """
    module_name, _, path = target.partition(":")
    owner: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
    *parents, name = path.split(".")
    try:
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)
    except AttributeError as cause:
        raise InputError(
            f"there is no {target} to patch: {cause}. Use a version of the library that has it."
        ) from cause
    own = vars(owner).get(name, _INHERITED)
    replacement = wrapper(original)
    if isinstance(original, BuiltinFunctionType) and isinstance(owner, ModuleType):
        replacement.__module__ = module_name  # `os.rename` says `posix`, where a pickle of it would not find this one
        replacement.__annotations__ = {}  # a builtin has none
    setattr(owner, name, replacement)
    for able in SUPPORTS if owner is os else ():
        if original in getattr(os, able):
            getattr(os, able).add(replacement)
    holders = [sys.modules[copy] for copy in copies if copy in sys.modules]
    holders = [holder for holder in holders if vars(holder).get(name) is original]
    for holder in holders:
        setattr(holder, name, replacement)

    def undo() -> None:
        """Put back what was there, unless somebody else has replaced it since."""
        for holder in holders:
            if vars(holder).get(name) is replacement:
                setattr(holder, name, original)
        if vars(owner).get(name) is not replacement:
            return
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


_INHERITED = object()


def install(name: str, probes: Probes) -> Undo | None:
    """Put one patch of the table in; None, and a warning, when that is impossible."""
    patch = PATCHES[name]
    if ("device" in patch.needs and not host_has_devices()) or ("timers" in patch.needs and timers_off()):
        return None
    try:
        undo = _install(name, patch, probes)
    except Exception as cause:
        pass_on(cause)
        if not (patch.optional and isinstance(cause, InputError)):
            probes.failed(name, cause)
        return None
    probes.tables["patches"][name] = "ok"
    return undo


def _install(name: str, patch: Patch, probes: Probes) -> Undo:
    broken = os.environ.get("HEADWAY_BREAK", "").split(",")
    if name in broken or "all" in broken:
        raise RuntimeError(f"HEADWAY_BREAK={os.environ['HEADWAY_BREAK']}: this patch fails on purpose")
    if patch.register is not None:
        target: Any = importlib.import_module(patch.module)
        for part in patch.target.partition(":")[2].split("."):
            target = getattr(target, part)
        return patch.register(target, probes)
    wrapper = patch.wrapper
    if wrapper is None:
        raise InputError(f"patch {name} has neither wrapper nor register. Give it one of them.")

    def tested(original: Any) -> Any:
        replacement = wrapper(original, probes)
        patch.self_test(replacement, original)
        if isinstance(replacement, FunctionType) and not patch.stands:
            timers.hidden(replacement)
        return replacement

    return replace_attribute(patch.target, tested, copies=patch.copies)


def install_for(module: str, probes: Probes) -> list[Undo]:
    """Put in every patch whose target lives in `module`, which has been executed; return the undos."""
    undos = [install(name, probes) for name, patch in PATCHES.items() if patch.module == module]
    return [undo for undo in undos if undo is not None]
