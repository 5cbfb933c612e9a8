"""PTD-P's degrees: the published rows, brute force over all layouts, laws, bad input."""

import json
import random

import pytest

from headway.cli import main
from headway.core.errors import InputError
from headway.cost.transformer import Sharding, Transformer, training_memory
from headway.parallel.planning.grid import (
    Efficiency,
    GridCluster,
    candidates,
    closed_step_s,
    plan_grid,
    simulated_step_s,
)
from tests.launching import refusal
from tests.megatron_rows import ROWS, case, errors, fitted, flops, predicted


def drawn(seed: int) -> tuple[Transformer, int, GridCluster]:
    """A model and a cluster with at least twenty layouts."""
    generator = random.Random(seed)
    while True:
        heads = generator.choice([8, 12, 16, 32])
        sizes = {"sequence": generator.choice([512, 1024, 2048]), "vocabulary": generator.choice([8192, 51200])}
        model = Transformer(generator.choice([8, 12, 16, 24]), heads * generator.choice([64, 128]), heads, **sizes)
        device = generator.choice(["A100-SXM4-40GB", "V100-SXM2-16GB", "H100-SXM5-80GB", "A10"])
        link = generator.choice(["infiniband-hdr", "ethernet-10g", "infiniband-ndr"])
        cluster = GridCluster.of(device, generator.choice([8, 16, 32]), devices_per_host=4, link=link)
        batch = generator.choice([32, 64, 128])
        if sum(1 for _ in candidates(model, batch, cluster)) >= 20:
            return model, batch, cluster


def test_parameters_and_rates_of_the_published_rows():
    """Rows 1 and 7 give the two constants; the other eight are predicted."""
    parameters = [case(row)[0].num_parameters / 1e9 / ROWS[row][0] - 1 for row in range(10)]
    found = [abs(error) for error in errors(0, 6)]

    assert max(map(abs, parameters)) <= 0.03
    assert max(found) <= 0.08
    assert sum(found) / 8 <= 0.04


def test_the_shipped_constants_are_those_of_the_two_rows():
    constants = fitted(0, 6)

    assert Efficiency().constant == pytest.approx(constants.constant, rel=1e-4)
    assert Efficiency().per_hidden == pytest.approx(constants.per_hidden, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("row", range(10))
def test_the_closed_form_is_what_the_simulation_says_of_the_published_rows(row):
    model, choice, cluster = case(row)
    closed = closed_step_s(model, choice, cluster)

    assert simulated_step_s(model, choice, cluster) == pytest.approx(closed, rel=0.01)
    assert predicted(row, Efficiency()) == pytest.approx(flops(row) / closed / cluster.num_devices / 1e12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_within_3_percent_of_brute_force_by_a_twentieth_of_its_simulations(seed):
    model, batch, cluster = drawn(seed)
    found = plan_grid(model, batch, cluster)
    every = [simulated_step_s(model, choice, cluster) for choice, _ in candidates(model, batch, cluster)]

    assert found.step_s <= 1.03 * min(every)
    assert found.num_simulated <= len(every) / 20
    assert found.memory_bytes <= cluster.device.memory_bytes


@pytest.mark.parametrize("seed", range(6))
def test_two_buffer_plans_hold_the_weights_twice_and_take_no_longer(seed):
    model, batch, cluster = drawn(seed)
    flushed = dict(candidates(model, batch, cluster))
    both = [(one, needed) for one, needed in candidates(model, batch, cluster, "two_buffer") if one.pp > 1]

    for choice, memory in both[:: max(1, len(both) // 20)]:
        sharding = Sharding(tp=choice.tp, pp=choice.pp, dp=choice.dp, recompute=choice.recompute)
        weights = training_memory(model, sharding, precision="mixed-fp32-gradients").parameters_bytes
        step = simulated_step_s(model, choice, cluster, "two_buffer")
        assert memory == pytest.approx(flushed[choice] + weights)
        assert choice.num_microbatches >= choice.pp
        assert step == pytest.approx(closed_step_s(model, choice, cluster, "two_buffer"), rel=0.01)
        assert step <= simulated_step_s(model, choice, cluster) * (1 + 1e-9)


def test_the_verb_answers_with_the_degrees_and_may_advise_against_a_pipeline(tmp_path, capsys):
    file = tmp_path / "model.toml"
    sizes = "layers = 24\nhidden = 2304\nheads = 24\nsequence = 2048\nvocabulary = 51200\nbatch = 512\n"
    words = ["parallel", "plan", "--shape", str(file), "--devices", "32", "--device", "A100-SXM4-80GB"]
    file.write_text(sizes)
    for more in (["--json"], []):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 0
    first, _, text = capsys.readouterr().out.partition("\n")
    answer = json.loads(first)

    assert (answer["tp"], answer["pp"], answer["dp"], answer["interleave"]) == (1, 1, 32, 1)
    assert "do not pipeline" in answer["why"]
    assert "do not pipeline" in " ".join(text.split())
    for change, message in (
        ("layers = 2.5", "layers = 2.5 in model.toml; give a whole number"),
        ("layer = 24", "unknown key of model.toml 'layer'"),
        ("", "model.toml has no layers"),
        ("layers = ", "is no TOML"),
    ):
        file.write_text(sizes.replace("layers = 24", change))
        assert message in refusal(*words)


def test_devices_that_cannot_hold_the_model_are_refused():
    model = Transformer(96, 12288, 96, sequence=2048, vocabulary=51200)

    with pytest.raises(InputError, match=r"no layout of 96 layers.*Give more devices"):
        plan_grid(model, 64, GridCluster.of("T4", 8))
