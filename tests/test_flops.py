"""FLOPs, MFU and HFU against published rows."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from headway.core.errors import UnknownNameError
from headway.cost.specs import shipped
from headway.cost.transformer import RECOMPUTE, Transformer, flops_per_token, hardware_flops_per_token, mfu
from tests.paths import GOLDEN
from tests.refusals import refused

GPT_175B = Transformer(96, 12288, 96, sequence=2048, vocabulary=64000)
shapes = st.builds(
    Transformer, st.integers(1, 100), st.integers(1, 64).map(lambda k: 64 * k), st.just(8),
    sequence=st.integers(1, 8192), vocabulary=st.integers(1, 10**5),
)  # fmt: skip


@given(shapes)
def test_a_gpt_costs_what_the_closed_form_says(model: Transformer) -> None:
    big, h, s, v = model.layers, model.hidden, model.sequence, model.vocabulary
    formula = 72 * big * h**2 * (1 + s / (6 * h) + v / (12 * big * h))

    assert flops_per_token(model) == pytest.approx(formula, rel=1e-12)


@given(shapes)
def test_published_conventions_are_two_shares_of_one_equation(model: Transformer) -> None:
    """arXiv 2104.04473, eq. 3, with every layer recomputed; MegaScale takes 3/4 of it for the model FLOPs."""
    big, h, s, v = model.layers, model.hidden, model.sequence, model.vocabulary
    published = 96 * big * h**2 * (1 + s / (6 * h) + v / (16 * big * h))

    assert hardware_flops_per_token(model, "full") == pytest.approx(published, rel=1e-12)
    assert flops_per_token(model, "megatron") == pytest.approx(3 / 4 * published, rel=1e-12)


@pytest.mark.parametrize(
    "model",
    [
        Transformer(2, 64, 4, sequence=16, vocabulary=500),
        Transformer(3, 64, 8, sequence=32, vocabulary=1000, kv_heads=2, ffn=96, gated=True, biases=False),
    ],
    ids=["gpt", "llama"],
)
def test_the_count_is_that_of_the_operators_which_torch_counts(model: Transformer) -> None:
    with FlopCounterMode(display=False) as counter:
        trained(model).sum().backward()

    assert counter.get_total_flops() == model.sequence * flops_per_token(model)


def trained(model: Transformer) -> torch.Tensor:
    """Return the logits of one sequence: the matrix products of `model`, on the meta device, and nothing else."""
    s, h, width, heads = model.sequence, model.hidden, model.hidden // model.heads, model.heads
    kv = model.kv_heads * width

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device="meta", requires_grad=True)

    x = torch.empty(s, h, device="meta", requires_grad=True)
    for _ in range(model.layers):
        q = (x @ weight(h, h)).view(s, heads, width).transpose(0, 1)
        k, v = (
            (x @ weight(h, kv)).view(s, model.kv_heads, width).transpose(0, 1).repeat(heads // model.kv_heads, 1, 1)
            for _ in range(2)
        )
        x = x + (q @ k.mT @ v).transpose(0, 1).reshape(s, h) @ weight(h, h)
        inner = x @ weight(h, model.ffn)
        x = x + (inner * (x @ weight(h, model.ffn)) if model.gated else inner) @ weight(model.ffn, h)
    return x @ weight(h, model.vocabulary)


@pytest.mark.parametrize(
    ("model", "lost"),
    [
        (Transformer(12, 768, 12, sequence=1024, vocabulary=50257), 0.068),
        (Transformer(96, 12288, 96, sequence=2048, vocabulary=64000), 0.001),
    ],
    ids=["GPT-2", "175 G"],
)
def test_the_megatron_convention_counts_less_for_small_models(model: Transformer, lost: float) -> None:
    assert 1 - flops_per_token(model, "megatron") / flops_per_token(model) == pytest.approx(lost, abs=5e-4)


@given(shapes)
def test_recomputation_adds_work_and_full_recomputation_one_forward_pass_of_the_layers(model: Transformer) -> None:
    none, selective, full = (hardware_flops_per_token(model, name) for name in RECOMPUTE)

    assert none == flops_per_token(model) < selective < full
    output_layer = 6 * model.vocabulary * model.hidden
    assert full - output_layer == pytest.approx(4 / 3 * (none - output_layer))


LINES = (GOLDEN / "megascale_table_2.csv").read_text().splitlines()
TABLE_2 = list(csv.DictReader(line for line in LINES if not line.startswith("#")))
"""arXiv 2402.15627, table 2: 175 G parameters on A100s (312 TFLOP/s)."""


def published_and_found(row: dict[str, str]) -> tuple[float, float]:
    """Return the MFU of a published row and ours, in percent."""
    tokens_per_s = int(row["batch"]) * GPT_175B.sequence / float(row["step_s"])
    a100, devices = shipped().device("A100-SXM4-80GB"), int(row["devices"])
    found = mfu(tokens_per_s * flops_per_token(GPT_175B, "megatron") / devices, a100.peak("bf16"))
    assert found is not None
    return float(row["mfu_percent"]), 100 * found


@pytest.mark.parametrize("row", [row for row in TABLE_2 if row["system"] == "Megatron-LM"], ids=lambda r: r["devices"])
def test_the_megatron_rows_of_the_megascale_paper_come_out_within_0_3_points(row: dict[str, str]) -> None:
    published, found = published_and_found(row)

    assert found == pytest.approx(published, abs=0.3)


def test_the_table_holds_eight_rows_of_either_system_and_sliding_windows_come_out_high() -> None:
    off = {
        system: [found - published for row in TABLE_2 if row["system"] == system
                 for published, found in [published_and_found(row)]]
        for system in ("Megatron-LM", "MegaScale")
    }  # fmt: skip

    assert [len(rows) for rows in off.values()] == [8, 8]
    assert all(0 < points < 1 for points in off["MegaScale"])


@given(shapes)
def test_selective_recomputation_repeats_the_two_attention_products(model: Transformer) -> None:
    # Scores: 2 s h operations per token and layer, weighted sum of values: as many.
    extra = hardware_flops_per_token(model, "selective") - flops_per_token(model)

    assert extra == pytest.approx(model.layers * 2 * (2 * model.sequence * model.hidden), rel=1e-6)


def test_without_a_single_peak_there_is_no_mfu() -> None:
    assert mfu(1e12, None) is None


test_bad_rates_are_refused = refused(
    (lambda: mfu(-1, 1), r"flops_per_s is -1; pass a finite rate >= 0"),
    (lambda: mfu(math.nan, 1), r"flops_per_s is nan"),
    (lambda: mfu(1, 0), r"the peak is 0 FLOP/s; pass a finite rate > 0, or None"),
)


def test_an_unknown_recomputation_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown recompute 'selectiv'. Did you mean 'selective'"):
        hardware_flops_per_token(GPT_175B, "selectiv")
    with pytest.raises(UnknownNameError, match=r"unknown FLOP convention 'megatrn'. Did you mean 'megatron'"):
        flops_per_token(GPT_175B, "megatrn")
