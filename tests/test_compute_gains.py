"""What edits of a few lines make of the kernels of a step, beside what was measured of two models on an H200."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from headway.compute import classify
from headway.compute.advise import causes, classes_json, propose, words
from headway.compute.gains import Scale, StepKernels, behind, fused_update, gains_of, step_kernels
from headway.cost.specs import Ceilings, ceilings_of, keep, path_of_measured
from headway.ledger.answers.ledger import Ledger
from headway.ledger.booking.account import KernelTimes
from headway.plan.proposal import Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.rings.rank_tables import ComputeFacts, ModelFacts, OptimizerFacts
from tests.paths import ROOT
from tests.runs_made import RunMaker

MS = 1_000_000
NAMES = {
    "float32 matrix": "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)",
    "matrix": "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_tn_align4>(Params)",
    "convolution": "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32",
    "attention": "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>)",
    "normalisation": "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>",
    "elementwise": "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >",
    "optimizer": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4> >",
    "reduction": "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >",
    "layout": "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true>",
    "copy": "Memcpy DtoD (Device -> Device)", "cast": "triton_poi_fused__to_copy_0",
}  # fmt: skip
GPT2_MS = {"float32 matrix": 125.9, "attention": 19.14, "normalisation": 5.43, "elementwise": 3.03, "optimizer": 2.75,
           "reduction": 1.93, "copy": 0.9, "cast": 0.82}  # fmt: skip
RESNET_MS = {"normalisation": 10.81, "convolution": 5.78, "elementwise": 4.93, "matrix": 4.92, "layout": 3.43,
             "reduction": 0.82, "optimizer": 0.77, "float32 matrix": 0.06, "copy": 0.05}  # fmt: skip
GPT2 = ModelFacts(name="Gpt2", num_elements=124_439_808, parameter_dtypes={"float32": 124_439_808})
RESNET = ModelFacts(
    name="ResNet", num_elements=25_557_032, parameter_dtypes={"float32": 25_557_032}, num_convolution_weights=53
)
ADAMW = OptimizerFacts("AdamW", num_tensors=148, num_elements=124_439_808, device_type="cuda")
H200 = Ceilings(
    flops_per_s={"fp32": 51e12, "tf32": 413e12, "bf16": 786e12, "fp16": 758e12}, bytes_per_s=4.23e12, is_measured=True
)


def times(by_class: dict[str, float], steps: int = 3) -> KernelTimes:
    """The kernels of a step, ms by class, as windows of several steps show them."""
    ns = {NAMES[name]: round(value * steps * MS) for name, value in by_class.items()}
    return KernelTimes(ns, dict.fromkeys(ns, 10 * steps), steps)


def facts_of(model: ModelFacts, **more: object) -> ComputeFacts:
    return structs.replace(
        ComputeFacts(models=(model,), optimizers=(ADAMW,), matmul_precision="highest", cudnn_benchmark=False), **more
    )


def step_of(by_class: dict[str, float]) -> StepKernels:
    step = step_kernels(times(by_class))
    assert step is not None
    return step


@pytest.mark.parametrize(
    ("model", "by_class", "remedy", "measured"),
    [  # whole runs on an H200 with torch 2.11; `headway bench try_on_device`
        (GPT2, GPT2_MS, "compute.tf32", 160.7 / 66.5), (GPT2, GPT2_MS, "compute.autocast", 160.7 / 42.3),
        (GPT2, GPT2_MS, "compute.compile", 1.019), (RESNET, RESNET_MS, "compute.autocast", 32.64 / 30.37),
        (RESNET, RESNET_MS, "compute.channels_last", 32.64 / 30.19), (RESNET, RESNET_MS, "compute.compile", 1.22),
        (RESNET, RESNET_MS, "compute.cudnn_benchmark", 1.037),
    ],
)  # fmt: skip
def test_what_was_measured_lies_in_what_is_predicted(model, by_class, remedy, measured):
    scale = dict(gains_of(step_of(by_class), H200, facts_of(model)))[remedy]

    assert isinstance(scale, Scale)
    assert 1 / scale.slow <= measured <= 1 / scale.fast


@given(st.dictionaries(st.sampled_from(sorted(NAMES)), st.floats(0.01, 100), min_size=1))
def test_ranges_are_in_order_and_only_casts_make_a_step_longer(by_class):
    step = step_of(by_class)
    assert step.total_s == pytest.approx(sum(by_class.values()) / 1e3, rel=1e-3)
    for name, scale in gains_of(step, H200, facts_of(RESNET)):
        if isinstance(scale, Scale):
            assert 0 < scale.fast <= scale.likely <= scale.slow
            assert scale.slow <= 1.05 or name == "compute.autocast"  # casts may take longer than what they save
    assert behind(step, {}) == (1.0, 1.0, 1.0)


def test_a_fused_update_takes_what_its_bytes_take_at_best():
    scale = fused_update(step_of({"optimizer": 2.75}), H200, ADAMW)
    bound = 28 * 124_439_808 / 4.23e12 / 2.75e-3

    assert bound < scale.fast < scale.likely < scale.slow < 1
    assert fused_update(step_of({"optimizer": 2.75}), H200, structs.replace(ADAMW, name="LBFGS")) is None


@pytest.mark.parametrize(
    ("facts", "remedy", "reason"),
    [
        (facts_of(GPT2, matmul_precision="high"), "compute.tf32", "already"),
        (facts_of(structs.replace(GPT2, autocast="bfloat16")), "compute.autocast", "itself"),
        (facts_of(structs.replace(GPT2, parameter_dtypes={"bfloat16": 1})), "compute.autocast", "itself"),
        (facts_of(structs.replace(GPT2, is_compiled=True)), "compute.compile", "compiles"),
        (facts_of(structs.replace(RESNET, num_channels_last=53)), "compute.channels_last", "already"),
        (facts_of(RESNET, cudnn_benchmark=True), "compute.cudnn_benchmark", "already"),
    ],
)
def test_what_a_script_does_already_is_not_proposed(facts, remedy, reason):
    assert reason in dict(gains_of(step_of(RESNET_MS), H200, facts))[remedy]


def run_with(by_class: dict[str, float], facts: ComputeFacts) -> tuple[Ledger, Program, Setup]:
    """A run on a device that is at work all the time, with a window."""
    made = RunMaker(ranks=1, steps=60, compute_ns=100 * MS, fetch_ns=0, transfer_ns=0, iter_ns=0, optimizer_ns=0).make()
    ledger = Ledger.of(made)
    known = structs.replace(ledger.facts, compute=facts, device_type="NVIDIA H200")
    program = Program.from_trace(made.trace, made.meta)
    program = replace(program, facts=structs.replace(program.facts, compute=facts, device_type="NVIDIA H200"))
    return replace(ledger, facts=known, kernels=times(by_class)), program, Setup.from_facts(known)


def test_precision_is_the_first_cause_of_a_float32_transformer_and_its_proposal_needs_a_grant(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ledger, program, setup = run_with(GPT2_MS, facts_of(GPT2))
    rows = {row.name: row for row in propose(ledger, program, setup)}
    named = sorted(causes(ledger), key=lambda cause: -cause.lost_device_s)
    autocast = rows["compute.autocast"]

    assert autocast.allow == "lossy"
    assert autocast.interval[0] < 3.8 < autocast.interval[1]
    assert isinstance(rows["compute.fused_optimizer"], Refusal)  # 1 % of a step
    assert named[0].cause == "compute.precision"
    assert "torch.autocast" in named[0].script
    assert "float32 matrix 79 %" in words(ledger)


def test_the_classes_of_a_run_add_up_to_its_useful_time():
    ledger, _, _ = run_with(RESNET_MS, facts_of(RESNET))
    rows = classes_json(ledger, flops_per_step=1e12, dtype="tf32")

    assert sum(row["device_s"] for row in rows) == pytest.approx(ledger.ledger_ns["useful"] / 1e9)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    # 1e12 operations in 10.76 ms of products: 93 of 413 TFLOP/s, most of them in TF32
    [fraction] = {row["fraction_of_bound"] for row in rows if row["bound"] == "compute"}
    assert fraction == pytest.approx(1e12 / 10.76e-3 / (ceilings_of("NVIDIA H200").flops_per_s["tf32"]), rel=0.01)


def test_without_a_window_the_way_to_one_is_said():
    ledger, program, setup = run_with(GPT2_MS, facts_of(GPT2))
    [row] = propose(replace(ledger, kernels=KernelTimes()), program, setup)

    assert isinstance(row, Refusal)
    assert "--window-at" in row.reason
    assert classes_json(replace(ledger, kernels=KernelTimes())) == []


def test_odd_sizes_of_matrix_products_are_named():
    ledger, _, _ = run_with({"matrix": 10.0}, facts_of(structs.replace(GPT2, autocast="bfloat16")))
    odd = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_tn_align2>(Params)"
    found = list(causes(replace(ledger, kernels=KernelTimes({**ledger.kernels.ns, odd: 10 * MS}, {}, 3))))

    assert [cause.cause for cause in found] == ["compute.alignment"]
    assert "50,304" in found[0].fix


def test_of_a_trace_kernels_tell_what_they_can_without_the_scripts_settings():
    """Conversions of layout beside convolutions; those beside embeddings are no convolution's."""
    for by_class, named in ((RESNET_MS, ["compute.layout"]), ({"matrix": 8.0, "layout": 2.0}, []), (GPT2_MS, [])):
        ledger, _, _ = run_with(by_class, facts_of(RESNET))
        of_trace = replace(ledger, facts=structs.replace(ledger.facts, compute=None, device_type=None))

        assert [cause.cause for cause in causes(of_trace)] == named


def test_rates_are_kept_by_device_and_a_damaged_file_counts_as_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not ceilings_of("NVIDIA H200").is_measured
    assert ceilings_of("nobody's device") is None
    keep("nobody's device", H200)
    keep("NVIDIA H200", H200)
    assert ceilings_of("nobody's device") == ceilings_of("NVIDIA H200") == H200
    path_of_measured().write_bytes(b"\xff{")
    assert not ceilings_of("NVIDIA H200").is_measured


def test_names_that_an_h200_gave_are_of_the_classes_that_were_read_from_them():
    """Nine small models in four precisions, eager and compiled, torch 2.11 with CUDA 13; names are cut."""
    rows = [line.split("\t") for line in (ROOT / "tests" / "data" / "kernel_names.tsv").read_text().splitlines()]
    right = sum(classify(name) == wanted for wanted, name in rows)

    assert len(rows) > 400
    assert right >= 0.98 * len(rows)
