"""A size is proposed from the losses of a recorded run, and `compare` says what its training took."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from headway.core.errors import InputError
from headway.cost.transformer import Transformer, flops_per_token
from headway.model.growth.proposal import FLOOR_EXPONENT, fits, growths
from headway.runtime.script.bad_loss import MOST_KEPT, LossLooks
from tests.launching import code_and_json, headway, headway_here, json_of, refusal, script

SHAPE = Transformer(4, 64, 4, sequence=32, vocabulary=100)
STEPS = np.arange(8, 4001, 8)


@pytest.mark.parametrize(("floor", "exponent"), [(1.5, 0.3), (2.0, 0.7), (0.5, 1.0)])
def test_a_curve_is_found_again_within_the_noise_of_its_losses(floor, exponent):
    noise = 0.02 * np.random.default_rng(0).standard_normal(len(STEPS))
    curves = fits(STEPS, floor + 5 * STEPS**-exponent + noise)

    assert curves[0].at(4000) == pytest.approx(floor + 5 * 4000**-exponent, abs=0.02)
    assert min(each.floor for each in curves) <= floor + 0.02
    assert max(each.floor for each in curves) >= floor - 0.02


def test_a_share_is_what_scratch_still_needs_from_the_loss_that_the_small_model_ends_at():
    curves = fits(STEPS, 2.0 + 5 * STEPS**-0.5)
    found = growths(SHAPE, curves)

    assert {(each.model.layers, each.model.hidden) for each in found} == {
        (layers, hidden) for layers in (4, 6, 8) for hidden in (64, 96, 128)
    } - {(4, 64)}
    assert [each.compute for each in found] == sorted(each.compute for each in found)
    for each in found:
        times = each.model.layers * each.model.matrix_parameters / (SHAPE.layers * SHAPE.matrix_parameters)
        floor = curves[0].floor * times**-FLOOR_EXPONENT
        begun_at = (1 - each.share) * 4000

        assert each.model.hidden // each.model.heads == SHAPE.hidden // SHAPE.heads
        assert floor + curves[0].scale * begun_at ** -curves[0].exponent == pytest.approx(curves[0].at(4000))
        assert each.share_range[0] <= each.share <= each.share_range[1]
        assert each.flops == pytest.approx(each.share * 4000 * 32 * flops_per_token(each.model))
    budget = sorted(each.flops for each in found)[2]
    assert len(growths(SHAPE, curves, budget)) == 3
    with pytest.raises(InputError, match="too small for each larger size; pass at least"):
        growths(SHAPE, curves, 1.0)
    for budget in (-1.0, 0.0, float("nan")):
        with pytest.raises(InputError, match="it is a number above 0"):
            growths(SHAPE, curves, budget)


def test_the_least_budget_that_a_refusal_names_is_enough():
    curves = fits(STEPS, 2.0 + 5 * STEPS**-0.5)
    with pytest.raises(InputError) as refused:
        growths(SHAPE, curves, 1.0, sequences=24)
    least = float(str(refused.value).split("at least ")[1].rstrip("."))

    assert growths(SHAPE, curves, least, sequences=24)
    assert growths(SHAPE, curves, sequences=24)[0].flops == pytest.approx(24 * growths(SHAPE, curves)[0].flops)


def test_no_size_is_proposed_where_the_losses_do_not_tell_a_floor():
    assert growths(SHAPE, fits(STEPS, 5 * STEPS**-0.1)) == []


@pytest.mark.parametrize(
    ("losses", "message"), [(np.ones(500), "do not fall"), (2 + STEPS / 4000, "do not fall"), (STEPS[:9], "too few")]
)
def test_losses_that_say_nothing_of_more_steps_are_refused(losses, message):
    with pytest.raises(InputError, match=message):
        fits(STEPS[: len(losses)], losses)


def test_the_curve_that_a_recording_keeps_is_evenly_spaced_bounded_and_without_bad_losses():
    looks = LossLooks()
    for step in range(1, 5001):
        looks.seen(float("nan") if step % 1000 == 1 else 1.0, step)
    steps = [step for step, _ in looks.curve]

    assert MOST_KEPT // 2 <= len(steps) <= MOST_KEPT
    assert max(np.diff(steps)) - min(np.diff(steps)) <= 1
    assert steps[-1] > 4900
    assert all(np.isfinite(loss) for _, loss in looks.curve)


def screen(*arguments: object) -> str:
    return " ".join(headway_here(*arguments).stdout.split())


def changed(folder: Path, **facts: object) -> None:
    """Write other facts into the JSON files of a folder that hold a rank's, or the run's."""
    for file in (*folder.glob("r[0-9]*.json"), *folder.glob("run.json")):
        file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


@pytest.mark.slow
def test_a_recorded_run_is_planned_and_compare_says_what_the_grown_one_took(tmp_path):
    job = """
        import torch
        torch.manual_seed(0)
        x = torch.randn(256, 16) / torch.arange(1, 17)
        net = torch.nn.Linear(16, WIDTH)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05 * 8 ** (WIDTH - 1) * WIDTH)
        for step in range(400):
            optimizer.zero_grad()
            (1 + (net(x) - 3 * x.sum(1, keepdim=True)).square().mean()).backward()
            optimizer.step()
        """
    small, large = tmp_path / "small", tmp_path / "large"
    for out, width in ((small, "1"), (large, "2")):
        headway("run", "--quiet", "--out", out, "--", script(tmp_path, job.replace("WIDTH", width)))
    shape = "layers=4,hidden=64,heads=4,sequence=32,vocabulary=100,batch=8"
    asked = ("model", "grow", "--plan", small, "--model", shape)
    answer, text = json_of(*asked, "--json"), headway_here(*asked).stdout
    compared = code_and_json("compare", small, large, "--json")[1]["growth"]
    best = answer["sizes"][0]

    assert answer["schema"] == "headway.model-grow-plan/1"
    assert answer["run_flops"] == pytest.approx(flops_per_token(SHAPE) * 32 * 8 * answer["run_steps"])
    assert f"{best['layers']} layers of {best['hidden']}" in text
    assert (compared["proposed_steps"], compared["proposed_loss"]) == (best["steps"], best["loss"])
    assert compared["steps"] == 400
    assert compared["loss"] < answer["run_loss"]

    assert code_and_json("compare", small, small, "--json")[1]["growth"] is None
    assert "if the second run is the grown model, it took 400" in screen("compare", small, large)
    (small / "growth.json").write_text(json.dumps({**answer, "sizes": [{**best, "steps": 1, "loss": 99.0}]}))
    text = screen("compare", small, large)
    assert "was proposed with 1 step to" in text
    assert "reached within the first 1 step)" in text
    (small / "growth.json").write_text(json.dumps({**answer, "sizes": []}))
    assert code_and_json("compare", small, large, "--json")[1]["growth"] is None

    no_floor = [(step, 5 * step**-0.1) for step in range(1, 400, 8) for _ in "ab"]  # twice each step, as closures do
    changed(small / "tables", losses=[[1, 99.0], *no_floor])
    answer = json_of(*asked, "--json")
    assert answer["sizes"] == []
    assert answer["reason"].startswith("The losses of the run do not tell a floor yet")
    assert "Train for longer first" in screen(*asked)

    changed(large / "tables", losses=[])
    tuned, broken = tmp_path / "tuned", tmp_path / "broken"
    shutil.copytree(small, tuned)
    shutil.copytree(large, broken)
    changed(tuned, applied=[{"name": "model.tune", "applied": True, "facts": {"steps": 9}, "reason_not_applied": None}])
    changed(broken, bad_losses={"0": [{"step": 1, "what": "nan"}]})
    for command, words in [
        (("--plan", large, "--model", asked[-1]), "has no losses"),
        (("--plan", broken, "--model", asked[-1]), "are not finite. Fix the training first"),
        (("--plan", tuned, "--model", asked[-1]), "are those of tuning too"),
        (("--plan", small), "Add it: --model"),
        (("--large", "{}"), "MODULE:BUILD, --small, --checkpoint, -o is missing"),
        (("my:build", "--small", "{}", "--plan", small), "MODULE:BUILD, --small says nothing with --plan"),
        (("my:build", "--budget", "1"), "--budget says nothing without --plan RUN"),
    ]:
        assert words in refusal("model", "grow", *command)
