"""Memory of a transformer, and the parameters it counts, against published figures."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UnknownNameError
from headway.cost.transformer import (
    PRECISIONS,
    RECOMPUTE,
    Sharding,
    Transformer,
    layer_activation_bytes,
    training_memory,
)
from tests.refusals import refused

GPT_175B = Transformer(96, 12288, 96, sequence=2048, vocabulary=51200)
shardings = st.builds(
    Sharding, tp=st.sampled_from([1, 2, 8]), pp=st.sampled_from([1, 2, 4]), dp=st.integers(1, 8),
    stages_per_rank=st.sampled_from([1, 2]), sequence_parallel=st.booleans(), recompute=st.sampled_from(RECOMPUTE),
    zero_stage=st.integers(0, 3),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@given(sharding=shardings, microbatch_size=st.integers(1, 8))
def test_memory_grows_with_the_micro_batch_and_shrinks_with_sharing(precision, sharding, microbatch_size):
    def peak(change: dict, size: int = microbatch_size) -> float:
        arrangement = dataclasses.replace(sharding, **change)
        return training_memory(GPT_175B, arrangement, microbatch_size=size, precision=precision).peak_bytes

    assert peak({}, microbatch_size + 1) > peak({})
    assert peak({"tp": 2 * sharding.tp}) < peak({})
    assert peak({"zero_stage": 3}) <= peak({"zero_stage": 2}) <= peak({"zero_stage": 1}) <= peak({"zero_stage": 0})
    assert peak({"recompute": "full"}) < peak({"recompute": "selective"}) < peak({"recompute": "none"})


@given(shardings)
def test_fewer_micro_batches_than_stages_hold_less(sharding: Sharding) -> None:
    few = training_memory(GPT_175B, sharding, num_microbatches=1)
    many = training_memory(GPT_175B, sharding, num_microbatches=1000)

    assert few.activations_bytes <= many.activations_bytes
    assert many == training_memory(GPT_175B, sharding)


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "published"),
    [
        (2304, 24, 24, 1.7), (3072, 30, 32, 3.6), (4096, 36, 32, 7.5), (6144, 40, 48, 18.4), (8192, 48, 64, 39.1),
        (10240, 60, 80, 76.1), (12288, 80, 96, 145.6), (16384, 96, 128, 310.1), (20480, 105, 128, 529.6),
        (25600, 128, 160, 1008.0),
    ],
)  # fmt: skip
def test_the_model_sizes_of_the_megatron_paper_come_out(hidden, layers, heads, published: float) -> None:
    # arXiv 2104.04473, table 1: sequence 2048, vocabulary 51200; billions of parameters to one decimal.
    model = Transformer(layers, hidden, heads, sequence=2048, vocabulary=51200)

    assert model.num_parameters / 1e9 == pytest.approx(published, abs=0.051)


def test_public_models_have_exactly_their_published_number_of_parameters() -> None:
    llama = {"gated": True, "biases": False, "positions": False, "tied": False}

    assert Transformer(12, 768, 12, sequence=1024, vocabulary=50257).num_parameters == 124_439_808
    assert Transformer(32, 4096, 32, 4096, 32000, ffn=11008, **llama).num_parameters == 6_738_415_616
    assert Transformer(32, 4096, 32, 8192, 128256, ffn=14336, kv_heads=8, **llama).num_parameters == 8_030_261_248


@pytest.mark.parametrize(("layers", "hidden", "heads", "published"), [(96, 12288, 96, 70), (105, 20480, 128, 65)])
def test_selective_recomputation_saves_what_its_paper_says(layers, hidden, heads, published: int) -> None:
    # arXiv 2205.05198, section 5: 70 % of the activations of a 175 G model, 65 % of a 530 G one.
    model = Transformer(layers, hidden, heads, sequence=2048, vocabulary=51200)
    kept = [layer_activation_bytes(model, Sharding(recompute=name), 1) for name in ("selective", "none")]

    assert 100 * (1 - kept[0] / kept[1]) == pytest.approx(published, abs=0.6)


def test_adam_in_mixed_precision_takes_sixteen_bytes_per_parameter() -> None:
    memory = training_memory(GPT_175B, Sharding())
    state = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes

    # arXiv 1910.02054, section 3.1.
    assert state / GPT_175B.num_parameters == pytest.approx(16, rel=1e-6)


def test_the_activations_of_a_layer_follow_the_table_term_by_term() -> None:
    s, b, h, a, t = 2048, 4, 12288, 96, 8
    table = {
        (False, "none"): s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        (True, "none"): s * b * h * (34 / t + 5 * a * s / (h * t)),
        (True, "selective"): s * b * h * 34 / t,
        (False, "full"): s * b * h * 2,
    }
    for (sequence_parallel, recompute), expected in table.items():
        sharding = Sharding(tp=t, sequence_parallel=sequence_parallel, recompute=recompute)
        assert layer_activation_bytes(GPT_175B, sharding, b) == pytest.approx(expected)


test_bad_shapes_are_refused = refused(
    (lambda: Sharding(tp=0), r"tp is 0; give a whole number >= 1"),
    (lambda: Sharding(zero_stage=4), r"zero_stage is 4; choose 0, 1, 2 or 3"),
    (lambda: Sharding(recompute="ful"), r"unknown recompute 'ful'. Did you mean 'full'"),
    (lambda: training_memory(GPT_175B, Sharding(pp=7)), r"96 layers do not divide into 7 stages. Choose pp"),
    (lambda: training_memory(GPT_175B, Sharding(), microbatch_size=0), r"microbatch_size 0.*give numbers >= 1"),
    (lambda: Transformer(0, 8, 1, 1, 1), r"layers is 0; give a whole number >= 1"),
    (lambda: Transformer(1, 10, 3, 1, 1), r"do not divide. Make hidden a multiple of heads"),
    (lambda: Transformer(1, 8, 4, 1, 1, kv_heads=-1), r"kv_heads -1; give 0 for the default"),
)


def test_an_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown precision 'mixd'. Did you mean 'mixed'"):
        training_memory(GPT_175B, Sharding(), precision="mixd")
