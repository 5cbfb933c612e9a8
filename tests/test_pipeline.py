"""Pipelines: what may change places, equal results in every order, thread and process, and every way to go wrong."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError, UnknownNameError
from headway.data import Pipeline, Resources, SyntheticJpeg
from headway.data.bytes.scrutiny import Scrutiny
from headway.data.bytes.torch_keyed import Keys
from headway.data.loader.threads import LOCK_WAIT, lock_wait_fraction
from headway.data.pipeline import torch_ops as ops
from headway.data.pipeline.operators import KINDS
from headway.data.pipeline.optimize import Op, PipelineProfile
from headway.data.pipeline.optimize import plan as best_plan
from tests.launching import json_of
from tests.oracles import legal_orders

IMAGES = SyntheticJpeg(24, 64, 48, seed=3)


class Numbers:
    """A source of small arrays; some of them refuse."""

    def __init__(self, n, bad=()):
        self.n, self.bad = n, set(bad)

    def __len__(self):
        return self.n

    def read(self, index):
        if index in self.bad:
            raise ValueError(f"number {index} is damaged")
        return np.array([index, index * index], np.int64)

    def meta(self, index):
        return {"parity": index % 2}

    def fingerprint(self):
        return f"numbers:{self.n}"


def images():
    """Seven operators as a user would write them."""
    return (
        Pipeline(IMAGES)
        .decode()
        .jitter()
        .greyscale()
        .to_float()
        .normalise((0.5,), (0.25,))
        .crop(32, 32)
        .flip()
        .batch(5)
    )


def plan_in(pipeline, order):
    """The plan that runs the operators in `order`."""
    ops_ = pipeline.ops()
    flat = PipelineProfile(*({op.id: 1.0 for op in ops_} for _ in range(3)), examples_per_s=1.0)
    plan = best_plan(ops_, flat).to_json()
    return type(best_plan(ops_, flat)).from_json({**plan, "order": list(order)})


# What may change places.


def test_kinds_swap_in_both_directions():
    for one, others in KINDS.items():
        assert all(one in KINDS[other] for other in others)
        assert one not in others


@given(
    st.lists(st.sampled_from(["jitter", "greyscale", "to_float", "crop", "flip", "normalise"]), min_size=1, max_size=5)
)
@settings(max_examples=15)
def test_every_legal_order_gives_the_same_bits(names):
    pipeline = Pipeline(IMAGES).decode()
    for name in names:
        fits = {"crop": (20, 24), "normalise": ((0.5,), (0.2,))}.get(name, ())
        if name == "crop" and any(stage.name == "crop" for stage in pipeline.stages):
            continue
        pipeline = getattr(pipeline, name)(*fits)

    for order in list(legal_orders(pipeline.ops()))[:12]:
        check = pipeline.check(plan_in(pipeline, order), examples=2)
        assert check.equal, (order, check)


def test_an_unknown_function_keeps_everything_in_its_place():
    pipeline = Pipeline(IMAGES).decode().to_float().map(np.sqrt).crop(32, 32)

    orders = [[pipeline.ops()[op].name for op in order] for order in legal_orders(pipeline.ops())]

    assert orders == [["source", "decode", "to_float", "sqrt", "crop"]]


def test_a_wrong_promise_is_found_by_the_check():
    mirrored = Pipeline(IMAGES).decode().map(lambda x: x - x.mean(), kind="photometric", name="centre").crop(8, 8)
    swapped = plan_in(mirrored, (0, 1, 3, 2))

    check = mirrored.check(swapped, examples=4)

    assert not check.equal
    assert check.largest_difference > 0


def test_resampling_moves_only_on_request_and_the_check_says_by_how_much():
    exact = Pipeline(IMAGES).decode().greyscale().resize(24, 32)
    free = Pipeline(IMAGES).decode().greyscale().resize(24, 32, commutes=True)

    assert len(list(legal_orders(exact.ops()))) == 1
    check = free.check(plan_in(free, (0, 1, 3, 2)), examples=8)
    assert not check.equal
    assert 0 < check.largest_difference <= 2


def test_a_blur_lets_crops_pass_on_request_and_only_borders_differ():
    free = Pipeline(IMAGES).decode().to_float().blur(commutes=True).crop(32, 32)
    fixed = Pipeline(IMAGES).decode().to_float().blur().crop(32, 32)
    first = free.ordered(plan_in(free, (0, 1, 4, 2, 3)))

    assert len(list(legal_orders(fixed.ops()))) == 1
    assert not free.check(plan_in(free, (0, 1, 4, 2, 3)), examples=4).equal
    for index in range(6):
        one, other = free.run(index), first.run(index)
        assert np.allclose(one[5:-5, 5:-5], other[5:-5, 5:-5], atol=1e-6)


def test_a_blur_keeps_the_mean_and_flat_images():
    rng = np.random.default_rng(0)
    flat = np.full((20, 24, 3), 77, np.uint8)

    assert np.array_equal(ops.blur(flat, rng, sigma=(1.0, 2.0), width=11), flat)
    noise = rng.random((64, 64, 1), np.float32)
    assert ops.blur(noise, rng, sigma=(2.0, 2.0), width=11).std() < 0.3 * noise.std()


# Measure and plan.


def test_the_planner_moves_the_crop_to_the_front_and_nothing_changes():
    pipeline = images()
    best = pipeline.plan(profile=pipeline.profile(12))

    names = [pipeline.ops()[op].name for op in best.order]

    assert names[:3] == ["source", "decode", "crop"]
    assert best.cost_s < best.baseline_s
    assert pipeline.check(best, examples=24).equal


def test_a_profile_counts_bytes_exactly_and_shares_add_up():
    profile = Pipeline(IMAGES).decode().to_float().crop(10, 20).profile(6)

    assert profile.out_bytes[1] == profile.in_bytes[2] == 64 * 48 * 3
    assert (profile.out_bytes[2], profile.out_bytes[3]) == (64 * 48 * 12, 10 * 20 * 12)
    assert sum(profile.seconds.values()) == pytest.approx(1 / profile.examples_per_s)


def test_a_planned_cache_stands_before_the_first_draw_and_is_used(monkeypatch):
    monkeypatch.setattr(Scrutiny, "is_due", lambda *_, **__: False)  # nothing is made anew to be compared
    reads = []

    class Counted(Numbers):
        def read(self, index):
            reads.append(index)
            return super().read(index)

    pipeline = Pipeline(Counted(10)).map(lambda x: x + 1, name="add").map(lambda x, rng: x, random=True).batch(5)
    profile = PipelineProfile({0: 0, 1: 16, 2: 16}, {0: 16, 1: 16, 2: 16}, {0: 1, 1: 1, 2: 1}, 1.0, {}, 1e-9)
    best = pipeline.plan(Resources(cache_bytes=1000), profile=profile)
    loader = pipeline.loader(best, num_workers=0)
    reads.clear()

    epochs = [[batch["data"].tolist() for batch in loader] for _ in range(3)]

    assert best.cache_after == 1
    assert epochs[0] == epochs[1] == epochs[2]
    assert sorted(reads) == list(range(10))


def test_a_cache_that_is_full_keeps_what_it_has():
    pipeline = Pipeline(Numbers(10)).cache(5 * 16).batch(2)
    loader = pipeline.loader()

    seen = [[i for batch in loader for i in batch["ids"].tolist()] for _ in range(2)]

    kept = loader.dataset.chain.kept.cache
    assert seen == [list(range(10))] * 2
    assert (kept.hits, len(kept)) == (5, 5)


# Run.


def bits(loader):
    """Ids and pixels of every batch."""
    return [(batch["ids"].tolist(), batch["data"].numpy().tobytes()) for batch in loader]


@pytest.mark.parametrize(
    "options", [{"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "workers": "processes"}], ids=str
)
def test_batches_do_not_depend_on_who_makes_them(options):
    pipeline = images().shuffle()
    options = {"workers": "threads", **options}

    alone, others = pipeline.loader(seed=5), pipeline.loader(seed=5, **options)

    expected = [bits(alone), bits(alone)]
    assert [bits(others), bits(others)] == expected
    assert expected[0] != expected[1]


def test_images_come_as_channels_last_views_and_labels_beside_them():
    batch = next(iter(Pipeline(IMAGES).decode().crop(32, 40).batch(6).loader(num_workers=2)))

    assert batch["data"].shape == (6, 3, 32, 40)
    assert batch["data"].dtype == torch.uint8
    assert batch["data"].is_contiguous(memory_format=torch.channels_last)
    assert batch["label"].tolist() == batch["ids"].tolist() == list(range(6))


def test_a_plan_brings_its_workers():
    pipeline = images()
    best = pipeline.plan(Resources(cores=3), profile=pipeline.profile(4))

    assert pipeline.loader(best).num_workers == best.workers <= 3
    assert pipeline.loader(best, num_workers=1).num_workers == 1


def test_a_filter_makes_batches_smaller_and_is_counted():
    loader = Pipeline(Numbers(10)).filter(lambda x: x[0] % 3 == 0).batch(5).loader(num_workers=2, workers="threads")

    assert [batch["ids"].tolist() for batch in loader] == [[0, 3], [6, 9]]
    assert (loader.dropped, loader.skipped) == (6, 0)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "processes"}])
def test_a_batch_that_lost_all_its_examples_is_left_out_and_each_is_counted_once(options):
    images = SyntheticJpeg(8, 16, 12)
    kept = {images.read(index) for index in (0, 1, 6)}
    loader = Pipeline(images).filter(kept.__contains__).decode().batch(2).loader(**options)
    assert [batch["ids"].tolist() for batch in loader] == [[0, 1], [6]]
    assert loader.dropped == 5
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2, "workers": "threads"}, {"num_workers": 1, "workers": "processes"}], ids=str
)
def test_damaged_examples_are_raised_or_skipped_and_counted(options):
    pipeline = Pipeline(Numbers(8, bad={2, 5})).batch(4)

    with pytest.raises(ValueError, match="number 2 is damaged"):
        list(pipeline.loader(**options))
    loader = pipeline.loader(on_error="skip", **options)
    assert [batch["parity"].tolist() for batch in loader] == [[0, 1, 1], [0, 0, 1]]
    assert loader.skipped == 2


def test_a_failure_names_operator_and_example():
    def refuse(x):
        raise KeyError("no such word")

    with pytest.raises(KeyError) as caught:
        list(Pipeline(Numbers(4)).map(refuse).batch(2).loader(num_workers=2, workers="threads"))

    assert "in operator 'refuse', example" in caught.value.__notes__[0]


def test_the_callers_threads_setting_and_generators_stay():
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    python, numbers = random.getstate(), np.random.get_state()[1].tolist()

    list(images().loader(num_workers=2, workers="threads"))

    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, numbers)


def test_python_code_waits_for_the_interpreter_lock_and_numpy_does_not():
    def python(x):
        total = 0
        for k in range(60_000):
            total += k * k
        return x + total % 2

    def numeric(x):
        return np.sort(np.random.default_rng(0).random(150_000))[:2]

    heavy, light = (Pipeline(Numbers(24)).map(function).loader().dataset for function in (python, numeric))

    keys = Keys(range(8), [0] * 8, seed=0, epoch=0, batch=0)

    # Pure Python leaves each of two threads half the lock; sorting lets go of it.
    # A busy host may hide either for a while, not ten times.
    assert any(lock_wait_fraction(heavy, keys) > LOCK_WAIT for _ in range(10))
    assert any(lock_wait_fraction(light, keys) < LOCK_WAIT for _ in range(10))


def test_text_stays_a_list_and_unlike_shapes_are_an_error():
    class Lines(Numbers):
        def read(self, index):
            return "word " * (index + 1)

    words = Pipeline(Lines(4)).tokenise(str.split).batch(2)

    assert [len(row) for batch in words.loader() for row in batch["data"]] == [1, 2, 3, 4]
    with pytest.raises(InputError, match="Resize or crop to one size"):
        next(iter(words.map(np.array).loader()))


def test_operators_do_what_they_say():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)

    assert np.array_equal(ops.flip(image, rng, p=1.0), image[:, ::-1])
    assert np.array_equal(ops.center_crop(image, size=(20, 30)), image[10:30, 10:40])
    assert ops.to_float(image).max() <= 1
    assert np.allclose(ops.normalise(image, mean=(0.5,) * 3, std=(0.5,) * 3), image / 127.5 - 1, atol=1e-6)
    assert np.array_equal(ops.jitter(image, rng, brightness=0, contrast=0, saturation=0), image)
    assert abs(int(ops.greyscale(np.full((1, 1, 3), 100, np.uint8))[0, 0, 0]) - 100) == 0
    crop = partial(ops.resized_crop, size=(24, 24), scale=(0.2, 1), ratio=(0.75, 4 / 3))
    assert crop(image, rng).shape == (24, 24, 3)
    with pytest.raises(InputError, match="smaller than a crop"):
        ops.crop(image, rng, size=(41, 10))


def test_images_that_are_no_jpeg_are_decoded_and_damaged_ones_refused():
    import io

    from PIL import Image

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")

    assert np.array_equal(ops.decode(buffer.getvalue()), pixels)
    with pytest.raises(FormatError, match="cannot be decoded"):
        ops.decode(b"\xff\xd8 not an image")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Pipeline(IMAGES).decode().flip().cache(10), InputError, "Put cache.. before it"),
        (lambda: Pipeline(Numbers(3)).map(abs, row_pure=False).cache(10), InputError, "not row-pure"),
        (lambda: Pipeline([1, 2]), InputError, "list is no source"),
        (lambda: Pipeline(IMAGES).map(abs, kind="photometrik"), UnknownNameError, "Did you mean 'photometric'"),
        (lambda: Pipeline(IMAGES).batch(0), InputError, "batch_size is 0"),
        (lambda: images().loader(workers="thread"), UnknownNameError, "Did you mean 'threads'"),
        (lambda: images().loader(cache_bytes=5), InputError, "behind an operator"),
        (lambda: images().ordered(plan_in(Pipeline(IMAGES).decode(), (0, 1))), InputError, "Plan it again"),
        (lambda: images().ordered(plan_in(images(), (0, 1, 3, 2, 4, 5, 6, 7))), InputError, "before what it depends"),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_state_of_other_operators_is_refused():
    state = images().loader().state_dict()

    with pytest.raises(InputError, match="allow_dataset_change"):
        images().flip().loader().load_state_dict(state)
    planned = images()
    planned.loader(plan_in(planned, (0, 1, 6, 7, 2, 3, 4, 5))).load_state_dict(state)


def test_the_commands_measure_and_check_a_pipeline(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from headway.data import Pipeline, SyntheticJpeg\n"
        "pipeline = Pipeline(SyntheticJpeg(8, 64, 48)).decode().to_float().crop(24, 24).batch(2)\n"
    )

    measured = json_of("data", "profile", f"{script}:pipeline", "--examples", "8", "--out", tmp_path / "p", "--json")
    again = json_of("data", "plan", "--stats", tmp_path / "p.yaml", "--ops", tmp_path / "p.toml", "--json")
    direct = json_of("data", "plan", f"{script}:pipeline", "--check", "--out", tmp_path / "plan.json", "--json")

    assert [row["name"] for row in measured["ops"]] == ["source", "decode", "to_float", "crop"]
    assert again["order"] == direct["order"] == [0, 1, 3, 2]
    assert direct["check"] == {"examples": 8, "equal": True, "largest_difference": 0.0}
    assert json.loads((tmp_path / "plan.json").read_text())["order"] == [0, 1, 3, 2]
    assert isinstance(measured["ops"][0]["id"], int)
    assert Op(0, "x", source=True).fusable
