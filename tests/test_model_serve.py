"""Serving on unlike devices: closed form against replay, program against every plan, tokens against one process."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._serving_stage import chosen, drawn_stage, serve_on_ranks
from headway.core.errors import InputError
from headway.cost.specs import DeviceSpec, LinkSpec, shipped
from headway.cost.transformer import Transformer
from headway.model import serve_plan
from headway.model.serving.costs import BITS, ServingLoad, ServingRow, layer_omega, measured, roofline
from headway.model.serving.heuristic import transferred
from headway.model.serving.plan import ServeStage, ServingGoal, serving_row
from headway.model.serving.times import RoundTimes, pipelines
from tests.launching import code_and_json, headway_here, json_of
from tests.spawn import on_ranks

LINK = LinkSpec("wire", 1e9, 1e-5, "made")
OPT, BLOOM = {"30B": (48, 7168, 56), "66B": (64, 9216, 72), "13B": (40, 5120, 40)}, (70, 14336, 112)
CLUSTERS = {
    1: ("13B", {"V100-SXM2-32GB": 1}), 3: ("30B", {"T4": 3, "V100-SXM2-32GB": 1}),
    5: ("66B", {"T4": 4, "V100-SXM2-32GB": 2}), 6: ("66B", {"V100-SXM2-32GB": 2, "A100-SXM4-40GB": 2}),
    7: ("176B", {"V100-SXM2-32GB": 4, "A100-SXM4-40GB": 4}), 9: ("30B", {"T4": 4}), 10: ("66B", {"V100-SXM2-32GB": 4}),
    11: ("176B", {"A100-SXM4-80GB": 4}),
}  # fmt: skip
"""The clusters of LLM-PQ that step.md lists: model, devices."""


def published(cluster):
    """Return the model and the devices of a published cluster."""
    name, devices = CLUSTERS[cluster]
    layers, hidden, heads = OPT.get(name, BLOOM)
    model = Transformer(layers, hidden, heads, sequence=2048, vocabulary=250880 if name == "176B" else 50272)
    return model, [serving_row(shipped(), device, count) for device, count in devices.items()]


def small(seed):
    """Return a small problem: model, two rows of unlike devices whose memory is short, a load, an indicator."""
    rng = np.random.default_rng(seed)
    model = Transformer(int(rng.integers(3, 7)), 1024, 8, sequence=256, vocabulary=4096)
    rows = []
    for name in "ab":
        memory = (1930e6 + float(rng.uniform(25e6, 130e6))) / 0.95
        rates = {"fp16": float(rng.uniform(1e12, 5e12)), "int8": float(rng.uniform(2e12, 9e12))}
        device = DeviceSpec(name, memory, float(rng.uniform(2e10, 2e11)), 1.0, "wire", rates, "made")
        rows.append(ServingRow(device, 1, LINK, LINK))
    load = ServingLoad(int(rng.integers(8, 100)), int(rng.integers(1, 20)), int(rng.choice([1, 2, 4])))
    omega = np.sort(rng.uniform(0, 1, (model.layers, 3)), axis=1)[:, ::-1].copy()
    return model, rows, load, omega, float(rng.choice([0.0, 0.01, 1.0]))


def every_value(model, rows, load, bits, omega, theta):
    """Yield the objective of every plan that fits, one by one: each order, cut, choice of bits, micro-batch sizes."""
    for costs in pipelines(model, rows, load, bits, roofline(model)):
        stages = len(costs.rows)
        for cuts in itertools.combinations(range(1, model.layers), stages - 1):
            stage = np.repeat(np.arange(stages), np.diff([0, *cuts, model.layers]))
            for columns in itertools.product(range(len(bits)), repeat=model.layers):
                counts = np.zeros((stages, len(bits)), np.int64)
                np.add.at(counts, (stage, columns), 1)
                if (counts @ costs.layer_bytes <= costs.room_bytes).all():
                    lost = sum(omega[layer, column] for layer, column in enumerate(columns))
                    yield costs.times(counts).makespan_ns / 1e9 + theta * lost


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_the_program_finds_the_best_of_all_plans(seed):
    model, rows, load, omega, theta = small(seed)
    bits = (4, 8, 16)
    values = list(every_value(model, rows, load, bits, omega, theta))
    if not values:
        with pytest.raises(InputError, match=r"a \(stage . lacks \d+ MB|b \(stage"):
            serve_plan(model, rows, load, bits=bits, theta=theta, omega=omega)
        return

    plan = serve_plan(model, rows, load, bits=bits, theta=theta, omega=omega, gap=0.0)

    assert plan.objective == pytest.approx(min(values), rel=1e-6)
    assert plan.bound <= min(values) * (1 + 1e-6)
    quick = transferred(list(pipelines(model, rows, load, bits, roofline(model))), ServingGoal(omega, theta))
    assert quick.fits
    assert ServingGoal(omega, theta).value(quick) >= min(values) * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_published_clusters_are_planned_within_the_gap_and_no_worse_than_the_best_uniform_precision(cluster):
    model, rows = published(cluster)
    plan = serve_plan(model, rows, ServingLoad(512, 100, 32))

    assert plan.objective * (1 - 1e-3) <= plan.bound <= plan.objective
    assert plan.tokens_per_s >= plan.uniform.tokens_per_s
    assert plan.omega <= plan.uniform.omega * (1 + 1e-12)
    assert [stage.first for stage in plan.stages] == [0, *(stage.last + 1 for stage in plan.stages[:-1])]
    assert plan.stages[-1].last == model.layers - 1
    assert plan.choice.fits


@pytest.mark.slow
def test_where_layers_differ_a_mixture_is_faster_than_the_best_uniform_precision_and_loses_less():
    model, rows = published(6)
    spread = np.exp(np.random.default_rng(6).uniform(np.log(0.3), np.log(3), model.layers))
    plan = serve_plan(model, rows, ServingLoad(512, 100, 8), omega=layer_omega(model, BITS) * spread[:, None])

    assert plan.tokens_per_s > plan.uniform.tokens_per_s
    assert plan.omega < plan.uniform.omega
    assert plan.bound <= plan.objective


@pytest.mark.slow
def test_without_a_price_the_plan_is_fastest_and_at_a_high_one_no_bit_more_fits():
    model, rows = published(3)
    load = ServingLoad(512, 100, 32)
    fast, precise = (serve_plan(model, rows, load, theta=theta) for theta in (0.0, 1e6))
    fewer = serve_plan(model, rows[:1], ServingLoad(512, 100, 8), theta=0.0)

    assert all(fast.tokens_per_s >= uniform.tokens_per_s for uniform in fast.uniforms)
    spare = precise.choice.costs.room_bytes - precise.choice.counts @ precise.choice.costs.layer_bytes
    steps = np.diff(precise.choice.costs.layer_bytes)
    assert all(spare[stage] < steps[2] or 8 not in part.bits for stage, part in enumerate(precise.stages))
    assert serve_plan(model, rows, ServingLoad(512, 100, 8), theta=0.0).tokens_per_s >= fewer.tokens_per_s


resource_ns = st.lists(st.integers(0, 50), min_size=7, max_size=7)


@settings(max_examples=100)
@given(resource_ns, resource_ns, st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(0, 5))
def test_the_closed_form_is_the_replayed_makespan(prefill, decode, stages, num_prefill, num_decode, rounds):
    num = 2 * stages if stages > 1 else 1
    times = RoundTimes(tuple(prefill[:num]), tuple(decode[:num]), num_prefill, num_decode, rounds)

    assert times.makespan_ns == times.replayed_ns()


def test_a_measured_table_replaces_the_roofline():
    device = shipped().device("T4")
    rows = [
        {"device": "T4", "bits": 8, "phase": "decode", "batch": b, "tokens": t, "seconds": 1e-3 + (2e-4 + 1e-6 * t) * b}
        for b in (1, 2, 8) for t in (10, 100, 200)
    ]  # fmt: skip
    seconds = measured(rows)

    assert seconds(device, 8, "decode", 4, 50) == pytest.approx(1e-3 + 8e-4 + 2e-4, rel=1e-6)
    with pytest.raises(InputError, match="no decode of T4 at 4 bits, only T4 at 8 bits"):
        seconds(device, 4, "decode", 1, 1)


TINY = Transformer(5, 32, 4, sequence=40, vocabulary=61)
LOAD = ServingLoad(12, 9, 8)
STAGES = (ServeStage("cpu", 0, 1, (4, 16)), ServeStage("cpu", 2, 4, (8, 4, 8)))


def prompts_of(load, model):
    return torch.randint(model.vocabulary, (load.batch, load.prompt), generator=torch.Generator().manual_seed(5))


def serve_a_stage():
    """Run one stage on this rank; return the tokens."""
    stage = drawn_stage(TINY, STAGES[torch.distributed.get_rank()], 3, torch.float64)
    return serve_on_ranks(stage, LOAD, (2, 4), prompts_of(LOAD, TINY))[0].tolist()


def test_two_ranks_with_mixed_bits_generate_what_one_process_without_a_cache_does():
    joined = ServeStage("cpu", 0, 4, (*STAGES[0].bits, *STAGES[1].bits))
    stage, text = drawn_stage(TINY, joined, 3, torch.float64), prompts_of(LOAD, TINY)
    alone = serve_on_ranks(stage, LOAD, (2, 4), text)[0].tolist()
    for _ in range(LOAD.new):  # the obvious way: everything again for each token, whole batch
        one_token = ServingLoad(text.shape[1], 1, LOAD.batch)
        text = torch.cat([text, serve_on_ranks(stage, one_token, (LOAD.batch, LOAD.batch), text)[0]], 1)

    assert on_ranks(serve_a_stage, 2)[0] == alone == text[:, LOAD.prompt :].tolist()
    assert chosen(stage, torch.zeros(2, 1, 32, dtype=torch.float64)).shape == (2,)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(
        json.dumps({"layers": 12, "hidden": 2048, "heads": 16, "sequence": 1024, "vocabulary": 50272})
    )
    (tmp_path / "h.toml").write_text(
        '[[device]]\nname = "T4"\ncount = 2\n[[device]]\nname = "L4"\nlink = "ethernet-25g"\n'
    )
    (tmp_path / "few.json").write_text(
        json.dumps({"layers": 2, "hidden": 2048, "heads": 16, "sequence": 1024, "vocabulary": 50272})
    )
    (tmp_path / "big.json").write_text(
        json.dumps({"layers": 96, "hidden": 12288, "heads": 96, "sequence": 1024, "vocabulary": 50272})
    )
    (tmp_path / "old.toml").write_text(
        '[devices.old]\nmemory_bytes = 3e10\nmemory_bytes_per_s = 1e11\ntdp_w = 9\nlink = "pcie3x16"\n'
        'source = "made"\nflops_per_s = { fp32 = 1e12 }\n[[device]]\nname = "old"\n'
    )
    (tmp_path / "s.json").write_text(json.dumps({"4": [1.0] * 12, "8": [0.1] * 12}))
    return ["model", "serve", "--layers", "m.json", "--cluster", "h.toml", "--prompt", "512", "--batch", "8"]


def test_the_command_says_the_plan_and_exports_it(files):
    words = [*files, "--new", "20", "--bits", "4,8,16", "--sensitivity", "s.json"]
    answer = json_of(*words, "--json", "--heuristic")

    sizes = [stage["layers"][1] - stage["layers"][0] + 1 for stage in answer["stages"]]
    assert answer["schema"] == "headway.model-serve/1"
    assert answer["vllm"] == f"VLLM_PP_LAYER_PARTITION={','.join(map(str, sizes))}"
    assert headway_here(*words, "--export", "vllm", folder=".").stdout == f"export {answer['vllm']}\n"
    assert answer["tokens_per_s"] == pytest.approx(8 * 20 / answer["makespan_s"])
    assert answer["omega"] <= answer["uniform"]["omega"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--new", "0"], "new is 0"),
        (["--new", "10000000000000"], "at most 10,000,000"),
        (["--new", "9", "--theta", "-1"], "theta is -1.0"),
        (["--new", "9", "--bits", "4,5"], "bits 5 are not offered"),
        (["--new", "9", "--layers", "few.json"], "2 layers for 3 devices"),
        (["--new", "9", "--layers", "big.json"], r"T4 \(stage \d\) lacks \d+ MB"),
        (["--new", "9", "--cluster", "old.toml"], "old has no rate in fp16 or bf16, only fp32"),
        (["--new", "9", "--sensitivity", "s.json"], "s.json has None for 3 bits"),
        (["--new", "9", "--export", "tgi"], "unknown engine 'tgi'"),
        (["--new", "9", "--layers", "h.toml"], "h.toml"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(files, options, message):
    pairs = dict(zip(files[2::2], files[3::2], strict=True)) | dict(zip(options[::2], options[1::2], strict=True))
    code, error = code_and_json("model", "serve", *itertools.chain.from_iterable(pairs.items()))

    assert (code, error.count("\n")) == (2, 1)
    assert re.search(message, error)


def test_a_batch_that_does_not_divide_and_bits_without_a_grid_are_refused():
    with pytest.raises(InputError, match="a batch of 8 makes no decode micro-batches of 3"):
        LOAD.microbatches(2, 3)
    with pytest.raises(InputError, match="weights of 3 bits are not run here"):
        drawn_stage(TINY, ServeStage("cpu", 0, 0, (3,)), 0)
    assert layer_omega(TINY, BITS)[0, -1] == 0.0
