"""FLOPs of models by hand formulas, and the class of kernels by their names."""

import gzip
import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.compute import CLASSES, classify, count_flops
from headway.core.errors import InputError
from tests.paths import ROOT

BY_CLASS: dict[str, tuple[str, ...]] = {
    "matrix": (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(Params)",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_nn_align8>(Params)",
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn",
        "ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_tn",
        "turing_h1688gemm_256x128_ldg8_tn",
        "volta_h884gemm_256x64_ldg8_tn",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize128x64x32_stage3_warpsize2x2x1_ffma",
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x16x1_SN_1LDSB0",
        "Cijk_Alik_Bljk_HHS_BH_MT256x128x64_MI32x32x8x1",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>",
        "triton_tem_fused_mm_12",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, __nv_bfloat16, float, __nv_bfloat16>",
        "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_sm100f",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu",
        "internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, false, true>",
    ),
    "float32 matrix": (
        "ampere_sgemm_128x64_tn",
        "volta_sgemm_32x128_nt",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)",
        "Cijk_Ailk_Bljk_SB_MT64x64x16_SN_K1",
    ),
    "attention": (
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x64x64_4x1x1",
        "void at::native::(anonymous namespace)::masked_mha_kernel",
        "sage_fwd",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "kernel_unified_attention_2d",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<bf16>",
    ),
    "convolution": (
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, 0, 0, int, float>",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>",
        "cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3>",
        "igemm_fwd_gtcx2_nhwc_bf16_bx0_ex0_bt256x128x32",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>",
        "void cutlass_cudnn_train::Kernel<cutlass_cudnn_train::reduction::kernel::ReduceSplitK<float>>",
    ),
    "normalisation": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>",
        "void at::native::batch_norm_collect_statistics_channels_last_kernel",
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false, false>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float>",
        "triton_per_fused_native_layer_norm_3",
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(vllm::_typeConvert<c10::BFloat16>)",
        "MIOpenBatchNormFwdTrainSpatial",
        "triton_red_fused_add_mean_mul_pow_rsqrt_0",
        "triton_per_fused_add_clone_convolution_native_layer_norm_slice_view_5",
    ),
    "reduction": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        "triton_red_fused_sum_7",
        "void cub::DeviceScanKernel<cub::AgentScanPolicy<128, 15, long>>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>",
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>",
        "triton_red_fused__to_copy_convolution_backward_2",
        "void rocprim::detail::trampoline_kernel<convert_binary_result_type_wrapper<Sum>>",
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3",
        "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<c10::BFloat16>, LoadWithCast<2>>",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<MulFunctor<float>>>",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>",
        "triton_poi_fused_add_gelu_2",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>",
        "triton_poi_fused__to_copy_convolution_silu_3",
        "triton_poi_fused_addmm_gelu_view_15",
        "SubTensorOpWithScalar1d",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*, c10::BFloat16*)",
        "void at::native::(anonymous namespace)::upsample_nearest2d_out_frame<c10::BFloat16>",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>",
    ),
    "cast": (
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIterato",
        "triton_poi_fused__to_copy_4",
        "void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>",
        "void tensorrt_llm::kernels::quantize_with_block_size<__nv_bfloat16, 32>(flashinfer::QuantizationSFLayout)",
    ),
    "layout": (
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)0>",
        "void cudnn::ops::nhwcToNchwKernel<__half, __half, float, true, false, (cudnnKernelDataType_t)0>",
        "batched_transpose_32x32_dword",
        "Im2d2Col_v2",
        "transpose_NCHW2CNHW_V2_2D_WG_off64",
        "triton_poi_fused_clone_transpose_21",
    ),
    "copy": (
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "__amd_rocclr_copyBuffer",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 3, 128, 1>",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>",
    ),
    "other": (
        "[memory]",
        "at::cuda::(anonymous namespace)::spin_kernel(long)",
        "",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "rcclGenericKernel_1(ncclDevKernelArgs)",
        "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16>",
    ),
}  # fmt: skip
NAMES = {name: kind for kind, names in BY_CLASS.items() for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_of_the_class_that_its_library_named_it_for(name):
    assert classify(name) == NAMES[name]


@given(st.text())
def test_any_name_has_a_class(name):
    assert classify(name) in CLASSES


@pytest.mark.slow
def test_kernels_of_recorded_traces_are_nearly_all_known():
    folder = ROOT.parent / "shared" / "data" / "kineto"
    if not folder.is_dir():
        pytest.skip("the traces are not beside this checkout")
    names = set()
    for path in folder.rglob("*.json.gz"):
        rows = json.loads(gzip.decompress(path.read_bytes())).get("traceEvents", [])
        names |= {
            row["name"] for row in rows if str(row.get("cat", "")).lower().startswith(("kernel", "gpu_mem", "mem"))
        }
    unknown = [name for name in names if classify(name) == "other"]

    assert len(names) > 300
    assert len(unknown) <= 0.02 * len(names)


def linear(rows: int, wide: int, out: int, first: bool = False) -> int:
    """Forward, gradient of the weight, and of the input unless it is the model's own."""
    return 2 * rows * wide * out * (2 if first else 3)


def convolved(batch: int, out: int, size: int, wide: int, kernel: int, first: bool = False, groups: int = 1) -> int:
    return 2 * batch * out * size * size * (wide // groups) * kernel * kernel * (2 if first else 3)


class Block(torch.nn.Module):
    """A transformer's block: fused attention, a feed-forward of four times the width."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after attention and feed-forward."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Language(torch.nn.Module):
    """GPT-2 (causal) or BERT: embeddings, blocks, tied or own head."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, causal: bool = True) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.Sequential(*[Block(width, heads, causal) for _ in range(layers)])
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        return self.head(self.blocks(self.tokens(tokens)))


def language_flops(layers: int, width: int, vocabulary: int, batch: int, tokens: int) -> int:
    """PaLM, appendix B, with torch's rule for fused attention: its backward is 2.5 times its forward."""
    rows = batch * tokens
    return layers * (3 * 2 * rows * 12 * width * width + int(3.5 * 4 * batch * tokens * tokens * width)) + linear(
        rows, width, vocabulary
    )


class UNet(torch.nn.Module):
    """Two levels down and up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up, self.leave = torch.nn.ConvTranspose2d(32, 16, 2, stride=2), torch.nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the same size."""
        first = self.enter(x)
        return self.leave(torch.cat([first, self.up(self.down(first))], 1))


class Bottleneck(torch.nn.Module):
    """Three convolutions and a shortcut (He et al., 2016)."""

    def __init__(self, wide: int, inner: int, stride: int) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        self.path = torch.nn.Sequential(
            conv(wide, inner, 1, bias=False), torch.nn.BatchNorm2d(inner), torch.nn.ReLU(),
            conv(inner, inner, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(inner), torch.nn.ReLU(),
            conv(inner, 4 * inner, 1, bias=False), torch.nn.BatchNorm2d(4 * inner),
        )  # fmt: skip
        same = wide == 4 * inner and stride == 1
        self.shortcut = torch.nn.Identity() if same else conv(wide, 4 * inner, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both ways."""
        return torch.relu(self.path(x) + self.shortcut(x))


def resnet50() -> torch.nn.Module:
    blocks: list[torch.nn.Module] = [torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), torch.nn.MaxPool2d(3, 2, 1)]
    wide = 64
    for level, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            blocks.append(Bottleneck(wide, 64 << level, 2 if level and not number else 1))
            wide = 4 * (64 << level)
    return torch.nn.Sequential(*blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(wide, 1000))


def vision_transformer() -> torch.nn.Module:
    patches = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 8, 8), torch.nn.Flatten(2))
    blocks = torch.nn.Sequential(*[Block(64, 4, causal=False) for _ in range(2)])

    class Vision(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.blocks, self.head = patches, blocks, torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.patches(x).transpose(1, 2)).mean(1))

    return Vision()


MODELS = {
    "MLP": (
        lambda: torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)),
        (torch.zeros(32, 100),), linear(32, 100, 200, first=True) + linear(32, 200, 10),
    ),
    "CNN": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, padding=1, groups=2)
        ),
        (torch.zeros(4, 3, 16, 16),), convolved(4, 8, 16, 3, 3, first=True) + convolved(4, 16, 16, 8, 3, groups=2),
    ),
    # 4.09 G multiply-adds forward at 224 x 224 (He et al., 2016); the first convolution has no gradient of its input.
    "ResNet-50": (
        resnet50, (torch.zeros(2, 3, 224, 224),),
        int(2 * 2 * 3 * 4.089e9) - 2 * 2 * 64 * 112 * 112 * 3 * 49,
    ),
    "LSTM": (
        lambda: torch.nn.LSTM(32, 64, num_layers=2, batch_first=True), (torch.zeros(4, 10, 32),),
        40 * (3 * 2 * 4 * 64 * (32 + 64 + 64 + 64) - 2 * 4 * 64 * 32),
    ),
    "GPT-2": (
        lambda: Language(2, 64, 4, 500), (torch.zeros(2, 32, dtype=torch.long),), language_flops(2, 64, 500, 2, 32)
    ),
    "BERT": (
        lambda: Language(3, 96, 6, 300, causal=False), (torch.zeros(2, 24, dtype=torch.long),),
        language_flops(3, 96, 300, 2, 24),
    ),
    "ViT": (
        vision_transformer, (torch.zeros(2, 3, 32, 32),),
        2 * (3 * 2 * 2 * 16 * 12 * 64 * 64 + int(3.5 * 4 * 2 * 16 * 16 * 64))
        + convolved(2, 64, 4, 3, 8, first=True) + linear(2, 64, 10),
    ),
    "UNet": (
        UNet, (torch.zeros(2, 3, 32, 32),),
        convolved(2, 16, 32, 3, 3, first=True) + convolved(2, 32, 16, 16, 3) + convolved(2, 16, 32, 32, 1)
        + convolved(2, 3, 32, 32, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_of_the_hand_formula(name):
    make, inputs, expected = MODELS[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}

    assert count_flops(model, *inputs) == pytest.approx(expected, rel=0.02)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_cost_no_gradient_and_recomputation_is_no_work_of_the_model():
    class Recomputed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.inner = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, self.enter(x), use_reentrant=False)

    frozen = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    frozen[0].requires_grad_(False)
    x = torch.zeros(8, 64)

    assert count_flops(frozen, x) == 2 * 8 * 64 * 64 * 3  # forward of both, and the second weight's gradient
    assert count_flops(Recomputed(), x) == linear(8, 64, 64, first=True) + linear(8, 64, 64)


def test_what_a_model_returns_counts_wherever_it_lies():
    @dataclass
    class Answer:
        scores: torch.Tensor

    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 32)

        def forward(self, x):
            return {"answers": [Answer(self.layer(x))]}

    assert count_flops(Nested(), torch.zeros(8, 64)) == linear(8, 64, 32, first=True)


def test_what_cannot_run_is_one_error():
    with pytest.raises(InputError, match="operations of Linear cannot be counted"):
        count_flops(torch.nn.Linear(4, 4), torch.zeros(3, 5))
