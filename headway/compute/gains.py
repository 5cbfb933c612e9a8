"""What an edit of a few lines makes of the kernels of a step: seconds of each class -> seconds behind the edit.

    step      | float32 matrix            | attention | normalisation | elementwise | optimizer |
    autocast  | x .13  | casts on top     | x .22     | x .85         | x .65       | x 1       |
    compile   | x 1                       | x 1       | x .5          | x .5        | x 1       |   chains become one

A product takes max(operations / rate, bytes / bandwidth). On a faster unit it keeps a share of its efficiency: large
products on an H200 reach 95 % of the float32 units' rate, 46 % of TF32's and half of bfloat16's, because what feeds
the units did not become faster (GPT-2, docs/devices.md). Each factor is a range (fast, likely, slow); what the host's
launches allow is the replay's to say.

Sources: the roofline model (Williams et al., CACM 2009); factors without another source were measured on an H200.

Which kind of work a kernel of a device does, told by its name.

Libraries name their kernels by what they compute and how: cuBLAS and CUTLASS
write tile, dtype and instruction into the name, cuDNN and ROCm's libraries the
operation, PyTorch the functor that runs elementwise, inductor the operators
that it fused. The first rule that a name meets decides, so the rules go from
the particular to the general:

    sm90_xmma_fprop_implicit_gemm_bf16bf16...   convolution   (its product is one, but the operator is not)
    sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn...   matrix        (matrix units)
    ampere_sgemm_128x64_tn                      float32 matrix
    at::native::vectorized_elementwise_kernel   elementwise, a cast where its functor converts

Sources: names as the CUDA and ROCm builds of torch 2.1 to 2.13, cuBLAS 11 and 12, cuDNN 8 and 9, FlashAttention 2 and
3, Triton and inductor give them, in traces of A100, H100, H200, B200, MI210, MI250 and MI300.

>>> classify("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN"), classify("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)")
('matrix', 'communication')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from headway.core.units import NS_PER_S
from headway.cost.specs import Ceilings
from headway.ledger.booking.account import KernelTimes
from headway.trace.rings.rank_tables import ComputeFacts, ModelFacts, OptimizerFacts

CLASSES = (
    "matrix", "float32 matrix", "attention", "convolution", "normalisation", "reduction", "elementwise", "optimizer",
    "cast", "layout", "copy", "communication", "other",
)  # fmt: skip
"""Every class. A matrix product by matrix units (TF32 too) is `matrix`, one by the plain float32 units the second."""

RULES: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|rccl|oneccl|multimem_|symm_?mem|(one|two)_shot_all_reduce|nvshmem|mscclpp|"
                      r"all_?(reduce|gather|to_?all)_kernel|reduce_?scatter_kernel"),
    # What inductor fused around a product names the product too, which has a kernel of its own.
    ("normalisation", r"^triton_(poi|red|per|spl)_.*(norm|softmax|welford|loss|entropy|mean.*rsqrt)"),
    ("reduction", r"^triton_(red|per|spl)_|^triton_poi_.*(scatter|index_put|pool|gather)"),
    ("layout", r"^triton_poi_(?!.*_(mul|div|sub|pow|exp|neg|where|gelu|silu|relu|tanh)_).*(permute|transpose)"),
    ("copy", r"^triton_poi_fused_cat_\d"),
    ("cast", r"^triton_poi_.*_to_copy_\d+$"),
    ("elementwise", r"^triton_poi_"),
    ("copy", r"^\[?mem(cpy|set)|\bmem(cpy|set)(32|async|post)?\b|copybuffer|fillbuffer|__amd_rocclr_(copy|fill)|"
             r"cat_?array_?batched_?copy|roll_cuda|flip_kernel|recat_copy|reshape_and_cache|kv_?cache_?(copy|store)|"
             r"store_kv_?cache|copy_page"),
    ("optimizer", r"multi_?tensor_?apply|fused_?(adam|sgd|lamb|adagrad)|adamw?_?(kernel|math|update)|amp_non_finite|"
                  r"amp_update_scale|lpnorm|_foreach_"),
    ("normalisation", r"rms_?norm"),
    ("cast", r"\bquantize_with|_quant_kernel|fp8_quant"),
    ("attention", r"flash|fmha|\bmha_|_mha|attention|attn|cutlass[fb]_|sdpa|sage_fwd|paged_kv|mla_|compute_dot_do_o|"
                  r"convert_dq_"),
    ("matrix", r"rnn_blockpersist"),
    ("elementwise", r"elementwise_[bf]p|elemwise_?rnn|persistrnn_addbias|rotary|rope_|subtensorop"),
    ("convolution", r"conv(?!ert)|implicit_?gemm|dgrad|wgrad|fprop|winograd|fft2d|[sh]cudnn_|cask_cudnn|"
                    r"cutlass\w*_cudnn|igemm|depthwise|xdlops_(fwd|bwd|wrw)|cudnn_(infer|train)_\w+_(scudnn|hcudnn|int8)"),
    ("layout", r"nchw\w*to\w*nhwc|nhwc\w*to\w*nchw|nchwaddpadding|nhwcaddpadding|permute|"
               r"transpose(?!params)|im2d?2?col|col2im|batched_?transpose|tensortransform|flip_filter"),
    ("reduction", r"rocprim|hipcub"),
    ("cast", r"direct_copy|(?<!index_)copy_kernel|float_?to_?|_to_float|bfloat16_copy|(?<!broad)cast_kernel|convert|"
             r"quantize|hfp8|fp8_qparam"),
    ("normalisation", r"(layer|batch|group|instance)_?norm|rowwisemoments|bn_(fw|bw)|softmax|welford|"
                      r"compute(backward)?(fused)?(params|internalgradients)|gamma_?beta|local_response_norm|lrn_|nll_loss|cross_entropy"),
    ("reduction", r"embedding|\breduce_kernel|cub::|thrust|radix|topk|sort|scan_|cumsum|"
                  r"histogram|pool|index(_|ing_|select|put|add|func)|gather|scatter|nonzero|masked_select|bincount|argm(ax|in)|"
                  r"norm_?reduce|_segments|partial_segment|partials_per_segment|write_indices|segment_(reduce|sum)|_sum_kernel|sum_functor|"
                  r"moe::dev::finalize"),
    ("matrix", r"(gemv|dot_kernel|reduce_1block).*(bfloat16|half)"),
    ("float32 matrix", r"sgemm|ffma|simt_(s|f32|d)|(gemm|cutlass)\w*_simt|sgemv|gemv\w*.*<.*\bfloat, float, float|"
                       r"gemmk1_kernel<float|splitk\w*kernel<.*\bfloat, float, float|cijk_.*_sb_(?!.*(xf32|mi\d))"),
    ("matrix", r"(?<!fb)gemm(?!_gpu)|gemv|cutlass|xmma|wgmma|nvjet|cijk_|s16816|s1688|s884|h884|cublas|hipblas|splitk|"
               r"triton_(mm|bmm|tem)|dot_kernel|matmul|^bmm_"),
    ("reduction", r"reduce|mean_kernel|accumulate|offsets_range|_sum"),
    ("elementwise", r"elementwise|vectorized|unrolled|fill_?(functor|kernel)|distribution|dropout|philox|upsample|"
                    r"clamp|gelu|relu|silu|sigmoid|tanh|(add|mul|where)_kernel|arange|tri[lu]_|bernoulli|glu_(backward_)?kernel|"
                    r"op_?tensor|scalepackedtensor|activation"),
)  # fmt: skip
"""Class and the names that are of it: the first one that holds. Adding a library is adding to a line."""

_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in RULES)

TF32 = re.compile(r"tf32|s1688|xf32")
"""A product of float32 numbers by matrix units."""


@lru_cache(maxsize=1 << 14)
def classify(kernel_name: str) -> str:
    """Return the class of a kernel, one of `CLASSES`; 'other' for a name that says nothing.

    >>> [classify(name) for name in ("sm80_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize128x64", "ampere_sgemm_64x64_nn")]
    ['matrix', 'float32 matrix']
    >>> classify("triton_per_fused_native_layer_norm_3"), classify("my_kernel")
    ('normalisation', 'other')
    """
    name = kernel_name.lower()
    for class_name, pattern in _COMPILED:
        if pattern.search(name):
            return "matrix" if class_name == "float32 matrix" and TF32.search(name) else class_name
    return "other"


PRODUCTS = ("matrix", "float32 matrix", "attention", "convolution")
"""Classes that multiply: what MFU counts."""

PASSES = ("elementwise", "normalisation", "reduction", "cast")
"""Classes that pass over memory, and that a compiler fuses."""

UPDATE_BYTES = {"Adam": 28, "AdamW": 28, "SGD": 20}
"""Optimizer -> bytes that a fused update of one float32 number reads and writes: parameter, gradient and states."""

CAST_BYTES = 12
"""Bytes per parameter that autocast moves in a step: its copy in half the bytes, and the gradient's way back."""


class Scale(NamedTuple):
    """Time of a class behind an edit / before it: where all goes well, likely, and where it does not."""

    fast: float
    likely: float
    slow: float

    def of(self, ratio: float) -> Scale:
        """Return the factor of a class whose units become faster by 1 / `ratio`, capped: no kernel becomes slower."""
        return Scale(*(min(1.0, ratio * factor) for factor in self))


LEAST = 0.05
"""Share of a step below which no edit is believed to bring it."""

ON_FASTER_UNITS = Scale(1.1, 1.9, 3.0)
"""1 / efficiency that is left on units several times as fast."""

SAME_UNITS = Scale(1.0, 1.4, 1.9)
"""The same from TF32 to bfloat16, which is up to twice as fast."""


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The kernels of one step of one device, by class."""

    seconds: Mapping[str, float]
    """Class -> s."""

    count: Mapping[str, int]
    """Class -> launches."""

    unaligned_s: float
    """s of matrix products whose sizes are odd, or not multiples of 8 bytes: 'align1' and 'align2' in their names."""

    @property
    def total_s(self) -> float:
        """All of them."""
        return sum(self.seconds.values())

    def share(self, *names: str) -> float:
        """Return the share of some classes."""
        return sum(self.seconds.get(name, 0.0) for name in names) / max(self.total_s, 1e-12)


def step_kernels(kernels: KernelTimes) -> StepKernels | None:
    """Return the kernels of a mean step by class; None where no window showed any."""
    if not kernels.num_steps or not kernels.ns:
        return None
    seconds, count = dict[str, float](), dict[str, int]()
    unaligned_s = 0.0
    for name, ns in kernels.ns.items():
        class_name, mean_s = classify(name), ns / kernels.num_steps / NS_PER_S
        seconds[class_name] = seconds.get(class_name, 0.0) + mean_s
        count[class_name] = count.get(class_name, 0) + kernels.count.get(name, 0)
        if class_name == "matrix" and (
            "align1>" in name or "align2>" in name or "align1_" in name or "align2_" in name
        ):
            unaligned_s += mean_s
    ordered = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    return StepKernels(
        ordered, {name: round(value / kernels.num_steps) for name, value in count.items()},
        unaligned_s,
    )  # fmt: skip


def behind(step: StepKernels, scales: Mapping[str, Scale], extra_s: float = 0.0) -> Scale:
    """Return the device's time behind an edit / before it; `extra_s` comes on top, half of it where all goes well."""
    parts = []
    for index, more in enumerate((0.5, 1.0, 2.0)):
        seconds = sum(value * (scales[name][index] if name in scales else 1.0) for name, value in step.seconds.items())
        parts.append(max((seconds + more * extra_s) / step.total_s, LEAST))
    return Scale(*parts)


def tf32(step: StepKernels, ceilings: Ceilings) -> Scale:
    """Products of float32 numbers by matrix units: 10 bits of mantissa."""
    ratio = ceilings.flops_per_s["fp32"] / ceilings.flops_per_s["tf32"]
    return behind(step, {"float32 matrix": ON_FASTER_UNITS.of(ratio)})


def bfloat16(step: StepKernels, ceilings: Ceilings, model: ModelFacts) -> Scale:
    """Autocast: products in bfloat16, passes over half the bytes, norms and losses in float32 as before."""
    rates = ceilings.flops_per_s
    from_fp32 = ON_FASTER_UNITS.of(rates["fp32"] / rates["bf16"])
    from_tf32 = SAME_UNITS.of(rates["tf32"] / rates["bf16"])
    scales = {
        "float32 matrix": from_fp32, "matrix": from_tf32, "convolution": from_tf32,
        "attention": Scale(0.12, 0.22, 0.4), "elementwise": Scale(0.5, 0.65, 1.0),
        "normalisation": Scale(0.6, 0.85, 1.05), "layout": Scale(0.5, 0.7, 1.0), "reduction": Scale(0.5, 0.8, 1.0),
    }  # fmt: skip
    casts_s = CAST_BYTES * model.num_elements / ceilings.bytes_per_s
    return behind(step, scales, casts_s + 0.1 * (step.share("elementwise", "normalisation")) * step.total_s)


def compiled(step: StepKernels) -> Scale:
    """Passes over memory that follow each other become one."""
    return behind(step, dict.fromkeys((*PASSES, "copy"), Scale(0.25, 0.5, 0.9)))


def channels_last(step: StepKernels) -> Scale:
    """No conversions of layout, and the kernels of matrix units that read it as it is."""
    return behind(step, {
        "layout": Scale(0.0, 0.15, 0.6), "convolution": Scale(0.75, 0.93, 1.0),
        "normalisation": Scale(0.75, 0.95, 1.05),
    })  # fmt: skip


def autotuned(step: StepKernels) -> Scale:
    """The fastest of cuDNN's kernels for each shape: its choice without looking is a few per cent behind."""
    return behind(step, dict.fromkeys(("convolution", "layout"), Scale(0.7, 0.93, 1.0)))


def update_bound_s(ceilings: Ceilings, optimizer: OptimizerFacts) -> float | None:
    """Return what memory lets a fused update take, s; None for an update that is not known."""
    size = UPDATE_BYTES.get(optimizer.name)
    return None if size is None else size * optimizer.num_elements / ceilings.bytes_per_s


def fused_update(step: StepKernels, ceilings: Ceilings, optimizer: OptimizerFacts) -> Scale | None:
    """One pass over parameters, gradients and states in place of one for each operator; None for an unknown update."""
    bound_s, seconds = update_bound_s(ceilings, optimizer), step.seconds.get("optimizer", 0.0)
    if bound_s is None or not seconds:
        return None
    return behind(step, {"optimizer": Scale(1.05, 1.2, 1.6).of(bound_s / seconds)})


def gains_of(step: StepKernels, ceilings: Ceilings, facts: ComputeFacts) -> Iterator[tuple[str, Scale | str]]:
    """Yield each remedy of compute with the device's time behind it / before it, or why it is not for this run."""
    models = facts.models
    if len(models) != 1:
        return
    [model] = models
    is_plain = set(model.parameter_dtypes) == {"float32"}
    convolves = step.share("convolution", "layout") > 0 and model.num_convolution_weights > 0
    if facts.matmul_precision not in ("highest", None):
        yield "compute.tf32", "products of float32 numbers use the matrix units already"
    elif "tf32" not in ceilings.flops_per_s or model.autocast:
        yield "compute.tf32", "autocast computes the products" if model.autocast else "this device has no units for it"
    else:
        yield "compute.tf32", tf32(step, ceilings)
    if model.autocast or not is_plain:
        yield "compute.autocast", "the script chooses its precision itself"
    elif "bf16" not in ceilings.flops_per_s or "tf32" not in ceilings.flops_per_s:
        yield "compute.autocast", "this device has no units for bfloat16"
    else:
        yield "compute.autocast", bfloat16(step, ceilings, model)
    yield "compute.compile", "the script compiles the model itself" if model.is_compiled else compiled(step)
    if not convolves:
        return
    last = model.num_channels_last == model.num_convolution_weights
    yield "compute.channels_last", "its convolutions lie so already" if last else channels_last(step)
    yield "compute.cudnn_benchmark", "it is on already" if facts.cudnn_benchmark else autotuned(step)
