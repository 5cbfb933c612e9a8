"""Which kind of work a kernel of a device does, told by its name.

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
from functools import lru_cache

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
