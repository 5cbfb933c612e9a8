"""Operators in fewer bits: products of named modules in bf16 or int8, everything around them as it was.

A lowered operator takes and returns what the original does, in its dtype;
parameters stay the float32 masters, and their gradients float32. bf16: both
sides are cast, multiplied, cast back. int8: the forward multiplies whole
numbers, the backward is bf16 with the quantised input, as in QSync:

    x [n, in]  one scale per row, max|x| / 127         w [out, in]  one scale per output, max|w| / 127
    y = (q_x q_w^T) s_x s_w^T + b                      products of int8 are summed in int32: exact

    dx = dy w        dw = dy^T (q_x s_x)               operands in bf16

>>> sorted(LOWERED)
['bf16', 'int8']
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.overrides import TorchFunctionMode

from headway.runtime.calls.patches import Undo

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [..., in] and w [out, in] -> [..., out]."""

UNITS = 32
"""A device's int8 product takes sizes that are multiples of 8, and more than 16 rows: both hold for multiples of 32."""


def bf16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x w^T, multiplied in bf16, in the dtype of x."""
    return F.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype)


def int8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x w^T, multiplied in int8, in the dtype of x; the backward is bf16 (module docstring)."""
    product: torch.Tensor = _Int8Product.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own has no types
    return product


LOWERED: dict[str, Product] = {"bf16": bf16_product, "int8": int8_product}
"""Precision -> its product."""


@cache
def int8_works(device: str = "cpu") -> str:
    """Return why the int8 product does not work on a device; '' where it does. Tried once, on small numbers."""
    try:
        lhs = torch.arange(-16 * UNITS, 16 * UNITS, device=device).remainder(200).sub(100).view(UNITS, UNITS)
        product = torch._int_mm(lhs.to(torch.int8), lhs.t().to(torch.int8))
    except (AttributeError, RuntimeError) as cause:
        return f"this torch has no int8 product on {device}: {str(cause).splitlines()[0]}"
    exact = lhs.double() @ lhs.t().double()
    return "" if torch.equal(product.double(), exact) else f"the int8 product on {device} is not exact"


def quantised_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers [n, k] int8 and the scale [n, 1] of each row, rounded to nearest; rows of zeros have 1."""
    scale = x.abs().amax(1, keepdim=True).float() / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(x / scale).clamp_(-127, 127).to(torch.int8), scale


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply whole numbers; keep the quantised input, a quarter of its bytes."""
        rows, scales = quantised_rows(x.reshape(-1, x.shape[-1]))
        columns, factors = quantised_rows(weight)
        ctx.save_for_backward(rows, scales, weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        whole_numbers = _multiplied(rows, columns)
        return (whole_numbers * scales * factors.t()).to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of both, multiplied in bf16."""
        rows, scales, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0]).bfloat16()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight.bfloat16()).to(ctx.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.t() @ (rows * scales).bfloat16()).to(weight.dtype)
        return of_x, of_weight


def _multiplied(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return rows [n, k] times columns [m, k] transposed, int32; on a device padded to what its product takes."""
    n, m = rows.shape[0], columns.shape[0]
    if rows.device.type != "cpu":
        rows, columns = (
            F.pad(part_of, (0, -part_of.shape[1] % UNITS, 0, -part_of.shape[0] % UNITS)) for part_of in (rows, columns)
        )
    return torch._int_mm(rows, columns.t())[:n, :m]


DENIED = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.Softmax2d,
    nn.modules.loss._Loss, nn.Embedding,
)  # fmt: skip
"""Modules that are never lowered: norms, softmax, losses; and look-ups, which multiply nothing."""


def cannot_lower(module: nn.Module, precision: str) -> str:
    """Return why a module is not computed in a precision; '' where it can be."""
    kind_name = type(module).__name__
    if isinstance(module, DENIED):
        return f"{kind_name} is never lowered: norms, softmax, losses and embeddings keep float32"
    if precision == "float32":
        return ""
    if precision == "int8" and isinstance(module, nn.Conv2d):
        return "convolutions are computed in bf16 or float32, not in int8"
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dtype != torch.float32]
    if weights:
        return f"its weights are {weights[0].dtype}, not float32"
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    return int8_works(device) if precision == "int8" else ""


def lower(module: nn.Module, precision: str) -> Undo:
    """Compute a module's products in a precision from now on; returns what takes it back, without a trace.

    A Linear's and a Conv2d's product; of any other module the `torch.matmul` calls of its own forward.
    """
    before = vars(module).get("forward")
    original = module.forward
    product, owner = LOWERED[precision], cast(Any, module)  # typed as what a module may have

    def linear(x: torch.Tensor) -> torch.Tensor:
        """Stand in for `Linear.forward`."""
        y = product(x, owner.weight)
        return y if owner.bias is None else y + owner.bias

    def convolution(x: torch.Tensor) -> torch.Tensor:
        """Stand in for `Conv2d.forward`, with its padding."""
        y: torch.Tensor = owner._conv_forward(x.bfloat16(), owner.weight.bfloat16(), None).to(x.dtype)
        return y if owner.bias is None else y + owner.bias[:, None, None]

    def products(*args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with other products."""
        with _Matmuls(product):
            return original(*args, **kwargs)

    if type(module) is nn.Linear:
        forward: Callable[..., Any] = linear
    else:
        forward = convolution if type(module) is nn.Conv2d else products
    module.forward = forward

    def undo() -> None:
        """Put back what was there."""
        if before is not None:
            module.forward = before
        elif vars(module).get("forward") is forward:
            del module.forward

    return undo


MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
"""Calls that a module's own forward multiplies with."""


class _Matmuls(TorchFunctionMode):
    """Two activations multiplied: batches of matrices go one by one through the product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the products of float32 matrices; everything else is as it was."""
        if func not in MATMULS or kwargs or any(x.dtype != torch.float32 or x.ndim < 2 for x in args):
            return func(*args, **(kwargs or {}))
        lhs, rhs = args
        if self.product is bf16_product:
            return func(lhs.bfloat16(), rhs.bfloat16()).to(lhs.dtype)
        batch = (lhs[..., 0, 0] + rhs[..., 0, 0]).shape
        pairs = zip(
            lhs.expand(*batch, *lhs.shape[-2:]).reshape(-1, *lhs.shape[-2:]),
            rhs.expand(*batch, *rhs.shape[-2:]).reshape(-1, *rhs.shape[-2:]),
            strict=True,
        )
        products = torch.stack([self.product(one_lhs, one_rhs.t()) for one_lhs, one_rhs in pairs])
        return products.view(*batch, lhs.shape[-2], rhs.shape[-1])
