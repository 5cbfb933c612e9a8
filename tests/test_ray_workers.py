"""A fleet of Ray actors delivers what a fleet of processes and a DataLoader deliver, also when actors die."""

import os
import signal

import pytest
import torch

from headway.core.errors import InputError
from headway.data import DataLoader, Pipeline, SyntheticJpeg
from headway.data.fleet.reader import PrepareError
from tests.test_fleet import Drawn

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

from headway.data.fleet.ray_workers import NAMESPACE, RayFleet  # noqa: E402  # it needs Ray


@pytest.fixture(scope="session")
def cluster():
    """One small cluster on loopback."""
    os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, configure_logging=False,
        _node_ip_address="127.0.0.1", log_to_driver=False, namespace="tests",
    )  # fmt: skip
    yield
    ray.shutdown()


def test_without_a_cluster_it_says_what_to_call():
    if ray.is_initialized():
        pytest.skip("a cluster is up")

    with pytest.raises(InputError, match=r"Call ray\.init\(\) first"):
        RayFleet(Drawn(4))


def test_batches_and_states_are_those_of_a_data_loader(cluster):
    plain = DataLoader(Drawn(50), 8, True, seed=5)
    expected = list(plain)
    with RayFleet(Drawn(50), num_workers=2, num_cpus=0.5, lease_s=30.0) as fleet:
        loader = fleet.batches(8, True, seed=5)
        batches = iter(loader)
        got = [next(batches) for _ in range(3)]
        state = loader.state_dict()
        got += list(batches)

        plain.load_state_dict(state)
        assert all(torch.equal(one["x"], other["x"]) for one, other in zip(got, expected, strict=True))
        assert all(torch.equal(one["x"], other["x"]) for one, other in zip(got[3:], plain, strict=True))


@pytest.mark.slow
def test_actors_that_are_killed_lose_no_batch(cluster):
    pipeline = Pipeline(SyntheticJpeg(60, 64, 48)).decode().crop(32, 32).flip().batch(4).shuffle()
    expected = [batch["ids"].tolist() for batch in pipeline.loader(seed=2)]
    with RayFleet(pipeline, num_workers=2, num_cpus=0.5, split_batches=2) as fleet:
        batches = iter(fleet.batches(seed=2))
        got = [next(batches)["ids"].tolist() for _ in range(3)]
        worker = ray.get_actor(f"{fleet.name}-w0", NAMESPACE)
        os.kill(ray.get(worker.alive.remote()), signal.SIGKILL)
        got += [next(batches)["ids"].tolist() for _ in range(4)]
        ray.kill(fleet._master, no_restart=False)
        got += [batch["ids"].tolist() for batch in batches]

    assert got == expected


def test_what_cannot_be_prepared_surfaces_with_the_workers_traceback(cluster):
    with RayFleet(Drawn(40, broken=30), num_workers=1, num_cpus=0.5) as fleet:
        batches = iter(fleet.batches(10))
        assert sum(len(next(batches)["y"]) for _ in range(3)) == 30
        with pytest.raises(PrepareError, match=r"(?s)batch 3 of rank 0 .*item 30 is broken"):
            next(batches)
    with pytest.raises(InputError, match=r"(?s)cannot be prepared, so no fleet was started.*item 0 is broken"):
        RayFleet(Drawn(4, broken=0))
