"""'comm.overlap' for tensor parallelism, without touching the script: linears of sharded rows use the chosen forms.

`ColwiseParallel` with rows that are sharded gathers them in a hook before the linear, `RowwiseParallel` whose result is
sharded by rows scatters the sum in a hook after it. Where the plan names a form for the shape of that matmul, the first
hook leaves the rows as they are, and the linear itself is `ag_matmul` or `matmul_rs`:

    x [Shard(1)] -> hook: all-gather -> linear ->          x [Shard(1)] -> hook ->  ag_matmul ->
    x -> linear -> [Partial] -> hook: reduce-scatter       x -> matmul_rs -> [Shard(1)] -> hook

Gathered rows are multiplied as before; sums are added in another order, so it needs a grant. Everything else stays
plain: other layouts, uneven weights, autocast, torch.compile, other modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from headway.comm.overlap.torch_ring import ag_matmul, chunk_rows, has_symm_mem, matmul_rs
from headway.comm.remedies import OverlapParameters
from headway.cost.collectives import GATHER, PLAIN, SCATTER, SYMM_MEM, MatmulShape
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy

NAME = "comm.overlap"
STYLES = {"ColwiseParallel": GATHER, "RowwiseParallel": SCATTER}
"""Style of torch's tensor parallelism -> what its collective does."""


Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear whose rows are gathered before it, or scattered after it."""

    way: str
    """`ag` or `rs`."""
    mesh: DeviceMesh
    """Device mesh of one axis."""
    rows: Shard
    """The sharded dimension of the rows."""


def overlap(parameters: OverlapParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    watch = _Linears(parameters.shapes, context)
    for style, way in STYLES.items():
        context.patch(f"torch.distributed.tensor.parallel.style:{style}._apply", functools.partial(watch.applies, way))
    context.patch("torch.nn.modules.linear:Linear.forward", watch.forward)
    context.undos.append(watch.known.clear)
    return Applied(NAME, watch.facts)


class _Linears:
    """The linears of a script that may overlap, and which form each matmul takes."""

    def __init__(self, shapes: dict[str, str], context: Context) -> None:
        self.shapes, self.context = shapes, context
        self.facts: dict[str, Any] = {"shapes": shapes, "modules": 0, "in_use": []}
        self.known: WeakKeyDictionary[torch.nn.Module, Linear] = WeakKeyDictionary()

    def applies(self, way: str, original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        """Wrap `_apply` of a style: its hook before the linear asks first whether to gather."""

        @functools.wraps(original)
        def apply(style: Any, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
            rows = _sharded_rows(style.input_layouts if way == GATHER else style.output_layouts)
            if rows is None or type(module) is not torch.nn.Linear or mesh.ndim != 1 or mesh.size() < 2:
                return original(style, module, mesh)
            gathers, linear = style._prepare_input_fn, Linear(way, mesh, rows)

            def prepare(
                layouts: Placements, desired: Placements, mod: torch.nn.Module, inputs: Sequence[object],
                device_mesh: DeviceMesh,
            ) -> object:  # fmt: skip
                x: Any = inputs[0]
                if way == GATHER and mod in self.known and not isinstance(x, DTensor):
                    x = DTensor.from_local(x, device_mesh, layouts, run_check=False)
                if way == GATHER and mod in self.known and self.form(linear, mod, x) is not None:
                    return x
                return gathers(layouts, desired, mod, inputs, device_mesh)

            style._prepare_input_fn = prepare  # of this instance: the module's hook takes it from there
            try:
                made: torch.nn.Module = original(style, module, mesh)
            finally:
                del style._prepare_input_fn
            self.known[made] = linear
            self.facts["modules"] += 1
            self.context.note(Applied(NAME, self.facts))
            return made

        return apply

    def forward(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap the forward of linears."""

        @functools.wraps(original)
        def forward(module: torch.nn.Linear, x: object) -> object:
            linear = self.known.get(module)
            if linear is not None and isinstance(x, DTensor) and (forms := self.form(linear, module, x)) is not None:
                return _multiplied(linear, module, x, forms)
            return original(module, x)

        return forward

    def form(self, linear: Linear, module: torch.nn.Module, x: DTensor) -> tuple[str, str] | None:
        """Return the forms of forward and backward for an input; None where the linear stays as it is."""
        dim, size, weight = linear.rows.dim, linear.mesh.size(), module.weight
        expected: Placement = linear.rows if linear.way == GATHER else Shard(x.dim() - 1)
        if (
            torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
            or not isinstance(weight, DTensor) or x.placements != (expected,) or not 0 <= dim < x.dim() - 1
            or x.dtype != weight.dtype or weight.shape[0 if linear.way == GATHER else 1] % size
            or x._local_tensor.shape[dim] != (chunk_rows(x.shape[dim], size)[linear.mesh.get_local_rank()]
                                           if linear.way == GATHER else x.shape[dim])
        ):  # fmt: skip
            return None
        local = weight.to_local()
        shape = MatmulShape(linear.way, x.shape[:-1].numel(), local.shape[1], local.shape[0])
        forms = self.shapes.get(str(shape), PLAIN), self.shapes.get(str(shape.backward), PLAIN)
        if set(forms) == {PLAIN} or (SYMM_MEM in forms and (x.shape[dim] % size or not has_symm_mem(x.device))):
            return None
        if str(shape) not in self.facts["in_use"]:
            self.facts["in_use"].append(str(shape))
            self.context.note(Applied(NAME, self.facts))
        return forms


def _sharded_rows(layouts: Placements) -> Shard | None:
    """Return the layout where it is a shard of a leading dimension."""
    first = layouts[0] if len(layouts) == 1 else None
    return first if isinstance(first, Shard) and first.dim >= 0 else None


def _multiplied(linear: Linear, module: Any, x: DTensor, forms: tuple[str, str]) -> DTensor:
    """Return what the linear and its hook give: [.., n], sharded by columns after a gather, by rows after a scatter."""
    dim, group, size = linear.rows.dim, linear.mesh.get_group(), linear.mesh.size()
    weight, bias = module.weight.to_local(), None if module.bias is None else module.bias.to_local()
    # The sharded dimension comes first: then the rows of a rank are neighbours. Free where it is first, or alone.
    local = x.to_local().movedim(dim, 0)
    between = local.shape[1:-1]
    counts = chunk_rows(x.shape[dim], size)
    rows = [between.numel() * count for count in counts]
    flat = local.reshape(-1, local.shape[-1])
    if linear.way == GATHER:
        y = ag_matmul(flat, weight.t(), group, form=forms[0], backward=forms[1], rows=rows)
        y = y if bias is None else y + bias
        count, placement = x.shape[dim], Shard(x.dim() - 1)
    else:
        y = matmul_rs(flat, weight.t(), group, form=forms[0], backward=forms[1], rows=rows, bias=bias)
        count, placement = counts[linear.mesh.get_local_rank()], linear.rows
    y = y.reshape(count, *between, weight.shape[0]).movedim(0, dim).contiguous()
    shape = torch.Size([*x.shape[:-1], module.weight.shape[0]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, linear.mesh, (placement,), run_check=False, shape=shape, stride=stride)
