"""Applies remedies of compute inside a rank.

`compute.fused_optimizer`: the update of torch's optimizers is one function each, which is told the form: fused,
foreach, or neither, and then loops over the tensors on a CPU and takes foreach on a CUDA device. Only this word
changes: what the script's optimizer holds, and what it saves, stays as it is. A fused update on a device wants its
counts of steps there, and an optimizer that was not made for it holds them on the host: it is given copies, which are
counted on beside the optimizer's own.

Torch's fused updates on a CPU go through the memory of each tensor as it lies, so a gradient or a state that lies in
another order than its parameter (channels last beside channels first) would be added to the wrong numbers: such
updates are left to the loop.

`compute.tf32` and `compute.cudnn_benchmark` are flags of torch's, set before the script computes and put back as they
were; a script that sets them itself later has the last word. Reading or setting them starts no driver.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from headway.core.remedies import NoParameters
from headway.runtime.host.device import kinds_in_use
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.recorder.probes import NEVER
from headway.runtime.script.compute_facts import can_be_fused

NAME = "compute.fused_optimizer"

UPDATES = ("torch.optim.adam:adam", "torch.optim.adamw:adamw", "torch.optim.sgd:sgd", "torch.optim.adagrad:adagrad")
"""Functions of updates with a fused form; their first arguments are lists: parameters, gradients, states."""

FUSED_ON = {"cpu": ("adam", "adamw", "sgd", "adagrad"), "cuda": ("adam", "adamw", "sgd")}
"""Type of device -> the updates that torch 2.6 and later can fuse there."""

STEP_LISTS = {"adam": 5, "adamw": 5}
"""Update -> place of the list of counts of steps among its arguments."""

LOOKED_AT = 4
"""Steps after which it is known whether the script has such an optimizer."""

Update = Callable[..., None]
Tensors = Sequence[torch.Tensor | None]


def fuse_optimizer(parameters: NoParameters, context: Context) -> Applied:
    """Install 'compute.fused_optimizer'."""
    del parameters
    form = _FusedForm(context)
    for target in UPDATES:
        context.patch(target, form.around)
    on_optimizer_steps(context, form.stepped)
    return Applied(NAME, form.facts)


class _FusedForm:
    """Says for the script which form its updates have."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.facts: dict[str, int] = {"updates": 0}
        """How many updates, of a group of parameters each, were fused."""
        self.num_steps = 0
        self._counts: dict[int, _DeviceCounts] = {}  # `id` of a group's first parameter -> its counts
        self._looks: dict[int, _FusedLook] = {}  # the same -> what was looked at before

    def around(self, original: Update) -> Update:
        """Wrap an update of torch's."""

        @functools.wraps(original)
        def update(*lists: Tensors, **options: object) -> None:
            """Update the parameters, fused where that can be."""
            is_chosen = options.get("fused") is not None or options.get("foreach") is not None
            is_bound = options.get("differentiable") or options.get("capturable") or torch.compiler.is_compiling()
            device_type = "" if is_chosen or is_bound else self._device_of(original.__name__, lists)
            if not device_type:
                original(*lists, **options)
                return
            self.facts["updates"] += 1
            index = STEP_LISTS.get(original.__name__)
            if device_type == "cuda" and index is not None:
                counts = self._counts.setdefault(id(lists[0][0]), _DeviceCounts())
                lists = (*lists[:index], counts.of(lists[index], lists[0]), *lists[index + 1 :])
            original(*lists, **{**options, "fused": True, "foreach": False})

        return update

    def _device_of(self, update: str, lists: Sequence[Tensors]) -> str:
        """Return what `_fused_on` does; .8 us a parameter where it has looked at the same before, 5 us else."""
        parameters = lists[0] if lists else ()
        if not parameters or (look := self._looks.get(id(parameters[0]))) is None or not look.holds_for(lists):
            device_type = _fused_on(update, lists)
            if device_type and all(parameter is not None and parameter.is_contiguous() for parameter in parameters):
                self._looks[id(parameters[0])] = _FusedLook(device_type, lists)
            return device_type
        return look.device_type

    def stepped(self, _: int) -> int:
        """Say after some steps that there is nothing to fuse, where that is so."""
        self.num_steps += 1
        if self.num_steps < LOOKED_AT and not self.facts["updates"]:
            return 1
        if not self.facts["updates"]:
            reason = (
                "no optimizer of the script leaves its form to torch and updates dense, real tensors of one device "
            )
            self.context.note(RefusedRemedy(NAME, f"{reason}that lie in memory as their gradients and states do"))
        else:
            self.context.note(Applied(NAME, self.facts))
        return NEVER


class _DeviceCounts:
    """Counts of steps on the device beside those that an optimizer holds on the host; both are counted on.

    The host's are the truth: where the script has put others there, or changed them, the device's are made anew. A
    change shows in `_version`, which each operation in place counts on.
    """

    def __init__(self) -> None:
        self._of: Sequence[torch.Tensor | None] = ()
        self._versions: list[int] = []
        self._on_device: list[torch.Tensor] = []

    def of(self, counts: Tensors, parameters: Tensors) -> Tensors:
        """Return the counts for a fused update, which adds one to them, and add one to the host's `counts`."""
        on_host = [count for count in counts if count is not None]
        if not on_host or any(count.device.type != "cpu" for count in on_host) or len(on_host) != len(counts):
            return counts
        same = len(on_host) == len(self._of) and all(map(operator.is_, on_host, self._of))
        if not same or [count._version for count in on_host] != self._versions:
            devices = [parameter.device for parameter in parameters if parameter is not None]
            self._on_device = [count.to(device, copy=True) for count, device in zip(on_host, devices, strict=True)]
            self._of = on_host
        torch._foreach_add_(on_host, 1)
        self._versions = [count._version for count in on_host]
        return self._on_device


class _FusedLook:
    """What an update of a group that lies in order was looked at for: gradients are new each time, the rest stays.

    A parameter or a state that lies elsewhere, as behind `parameter.data = ...`, may lie otherwise too.
    """

    def __init__(self, device_type: str, lists: Sequence[Tensors]) -> None:
        self.device_type = device_type
        self._pointers = _pointers(lists)
        self._dtypes = [None if parameter is None else parameter.dtype for parameter in lists[0]]

    def holds_for(self, lists: Sequence[Tensors]) -> bool:
        """Say whether these are what was looked at, with gradients that lie in order as their parameters do."""
        if len(lists[1]) != len(self._dtypes):
            return False
        for gradient, dtype in zip(lists[1], self._dtypes, strict=True):
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
                return False
            if gradient.dtype is not dtype or not gradient.is_contiguous():
                return False
        return _pointers(lists) == self._pointers


def _pointers(lists: Sequence[Tensors]) -> list[list[int]]:
    """Return where parameters and states lie."""
    return [[0 if part is None else part.data_ptr() for part in parts] for parts in (lists[0], *lists[2:])]


def _fused_on(update: str, lists: Sequence[Tensors]) -> str:
    """Return the type of the device on which all parameters, the first list, can be fused; '' where they cannot.

    A list of what is not used is empty. On a device, states of other types (counts on the host) are looked at apart.
    """
    types = {parameter.device.type for parameter in lists[0] if parameter is not None} if lists else set()
    device_type = types.pop() if len(types) == 1 else ""
    if update not in FUSED_ON.get(device_type, ()):
        return ""
    for states in lists:  # torch begins a state for all its parameters, or for none
        if 0 < sum(state is None for state in states) < len(states):
            return ""
    for parameter, *others in zip(*filter(None, lists), strict=True):
        if parameter is None or not can_be_fused(parameter, others):
            return ""
    return device_type


def tf32(parameters: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'compute.tf32': products of float32 numbers by the matrix units of a CUDA device. Lossy."""
    del parameters
    return _set_flag("compute.tf32", torch.backends.cuda.matmul, "allow_tf32", context)


def cudnn_benchmark(parameters: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install 'compute.cudnn_benchmark': cuDNN times its kernels for each shape, and takes the fastest."""
    del parameters
    return _set_flag("compute.cudnn_benchmark", torch.backends.cudnn, "benchmark", context)


def _set_flag(name: str, owner: object, flag: str, context: Context) -> Applied | RefusedRemedy:
    """Set a flag of a CUDA device's libraries; refused where it is set, and later where no device computed."""
    try:
        before = getattr(owner, flag)
    except RuntimeError as cause:  # where the newer of torch's two interfaces has set it, the older one refuses
        return RefusedRemedy(name, f"the script sets its precisions itself ({str(cause).splitlines()[0]})")
    if before:
        return RefusedRemedy(name, "it is on already")
    setattr(owner, flag, True)
    context.undos.append(lambda: setattr(owner, flag, before))
    facts = {"before": before}

    def stepped(_: int) -> int:
        """Say behind the first step whether there is a device that the flag is for."""
        if "cuda" not in kinds_in_use():
            context.fail(name, "the script computes on no CUDA device")
        return NEVER

    on_optimizer_steps(context, stepped)
    return Applied(name, facts)


def on_optimizer_steps(context: Context, function: Callable[[int], int]) -> None:
    """Call `function(id)` behind a step of the optimizer with that `id`; it returns the steps until its next call.

    What else counts as a step is left out: before the first backward transforms that are modules do, for example.
    """
    latest = [0]

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        latest[0] = id(optimizer)

    def listener(_: int) -> int:
        """Act out of torch's loop over hooks, which bears no change of them."""
        optimizer, latest[0] = latest[0], 0
        return function(optimizer) if optimizer else 1

    context.undos.append(register_optimizer_step_post_hook(context.hook(note)).remove)
    context.listen(listener)
