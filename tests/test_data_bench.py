"""`headway data bench`: every way delivers the same pixels, costs add up, and what is missing or wrong is said."""

import json
import subprocess
import sys

import numpy as np
import pytest

from headway.core.errors import DamageError, InputError
from headway.data.bytes.source import SyntheticJpeg
from headway.data.stalls import torch_costs
from headway.verbs.loading import data_bench
from headway.verbs.loading.data_bench import bench
from tests.paths import ROOT

FEW = SyntheticJpeg(34, 80, 60, seed=3)


@pytest.fixture(scope="module")
def costs():
    """Two rounds of every way over a batch and a bit of small images."""
    return {cost.name: cost for cost in torch_costs.costs(FEW, 2, rounds=2)}


@pytest.fixture
def quick(monkeypatch):
    """A verb that measures two cheap ways over a few images."""
    ways = {
        name: torch_costs.WAYS[name] for name in ("headway Pipeline, threads", "torch DataLoader", torch_costs.COMMON)
    }
    monkeypatch.setattr(torch_costs, "WAYS", ways)
    monkeypatch.setattr(torch_costs, "BATCHES", 2)
    monkeypatch.setattr(data_bench, "EPOCH", 33)
    monkeypatch.setattr(data_bench, "IMAGES", 3)
    return ways


def test_every_way_delivers_the_same_pixels_but_for_pillow(costs):
    digests = {name: cost.digest for name, cost in costs.items() if not cost.missing}

    assert set(costs) == set(torch_costs.WAYS)
    assert len({digest for name, digest in digests.items() if name != torch_costs.COMMON}) == 1
    assert all(len(cost.cpu_s_per_image) == 2 for cost in costs.values())


def test_epochs_of_a_way_have_equal_draws():
    for name in ("headway Pipeline, threads", "torch DataLoader"):
        epochs = torch_costs.WAYS[name](FEW, 1)

        assert torch_costs.digest(next(epochs)) == torch_costs.digest(next(epochs)), name


def test_pillows_window_is_that_of_the_others_up_to_rounding():
    data = FEW.read(5)
    ours, pillows = torch_costs.prepared(data, 5), torch_costs.prepared_by_pillow(data, 5)

    assert pillows.shape == (3, 224, 224)
    assert np.abs(255 * pillows.numpy().transpose(1, 2, 0) - ours).mean() < 2


def test_an_image_that_comes_twice_is_no_epoch():
    image = np.zeros((1, 2, 2, 3), np.uint8)

    with pytest.raises(InputError, match="image 4 came twice"):
        torch_costs.digest([(image, [4]), (image, [4])])


def test_a_way_whose_library_is_missing_says_so(monkeypatch):
    def without(source, num_workers):
        raise ImportError("No module named 'spam'", name="spam")
        yield

    monkeypatch.setattr(torch_costs, "WAYS", {"without": without})

    (cost,) = torch_costs.costs(FEW, 1, rounds=1)
    assert (cost.missing, cost.cpu_s_per_image) == ("spam is not installed", [])


def test_every_transport_delivers_what_was_sent_and_costs_something(monkeypatch):
    monkeypatch.setattr(torch_costs, "BATCHES", 3)
    found = torch_costs.transport_costs(2)

    assert set(found) == set(torch_costs.TRANSPORTS)
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in found.values())


def test_a_transport_that_changes_a_byte_is_caught(monkeypatch):
    class Careless(torch_costs.ByPipe):
        def send(self, batch):
            batch = batch.copy()
            batch[0, 0, 0, 0] ^= 1
            super().send(batch)

    monkeypatch.setattr(torch_costs, "TRANSPORTS", {"careless": Careless})
    monkeypatch.setattr(torch_costs, "BATCHES", 1)

    with pytest.raises(DamageError, match="came by careless are not those that were sent"):
        torch_costs.transport_costs(1)


def test_the_answer_has_a_row_per_way_with_ratios_to_the_common_one(quick, capsys):
    code = bench(rounds=1, json=True)
    printed = capsys.readouterr()
    answer = json.loads(printed.out)

    assert (code, answer["schema"], answer["equal_pixels"]) == (0, "headway.data.bench/1", True)
    assert [row["name"] for row in answer["loaders"]] == list(quick)
    assert [row["name"] for row in answer["transports"]] == ["ring", "queue", "pipe"]
    assert answer["loaders"][-1]["to_common"] == 1.0
    assert answer["images"]["count"] == 3
    assert "round 1 of 1" in printed.err


def test_the_screen_names_every_way(quick, capsys):
    bench(rounds=1)
    screen = capsys.readouterr().out

    assert all(name in screen for name in [*quick, *data_bench.TRANSPORTS.values()])
    assert max(map(len, screen.splitlines())) <= 88


def test_different_pixels_are_an_exit_code(quick, capsys):
    quick["torch DataLoader"] = lambda source, workers: iter(
        [[(np.zeros((1, 2, 2, 3), np.uint8), [0])] for _ in range(2)]
    )

    assert bench(rounds=1) == 3
    assert "PIXELS DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"), [({"workers": 0}, "--workers is 0"), ({"rounds": -1}, "--rounds is -1")]
)
def test_nothing_to_measure_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        bench(**options)


def test_images_of_the_users_own_are_read_and_a_damaged_one_is_named(quick, tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.JPG").write_bytes(FEW.read(0))
    bench(tmp_path, rounds=1, json=True)

    assert json.loads(capsys.readouterr().out)["images"] == {
        "count": 1, "mean_bytes": len(FEW.read(0)), "folder": str(tmp_path),
    }  # fmt: skip
    (tmp_path / "b.jpeg").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"image 1, by path: 8 bytes cannot be decoded"):
        bench(tmp_path)


def test_a_folder_without_images_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "headway.cli", "data", "bench", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"headway: {tmp_path} holds no file")


def test_a_consumer_that_is_always_faster_than_the_producer_fills_no_socket():
    way, batch = torch_costs.ByRing(), torch_costs.batches()[0]

    for _ in range(400):
        way.send(batch)
        assert way.receive(len) == torch_costs.BATCH_BYTES
