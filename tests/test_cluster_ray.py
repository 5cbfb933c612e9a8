"""A service on a Ray cluster of this host; skipped where Ray is not installed."""

from pathlib import Path

import pytest

from headway.cluster import EXECUTORS
from headway.core.errors import HeadwayError
from tests.launching import wait_for
from tests.test_cluster_service import computed, story

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install -c constraints.txt ray)")

SCRIPT = """
import os, time
from pathlib import Path
saves = Path(os.environ["HEADWAY_SAVES"])
(saves / "rank-0").touch()
while not (saves.parent / "done").exists():
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster with two a100 that are a number."""
    ray.init(num_cpus=1, resources={"a100": 2}, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_three_jobs_are_decided_on_alike_by_actors_of_ray(tmp_path, cluster):
    (tmp_path / "one").mkdir()
    (tmp_path / "job.py").write_text(SCRIPT)
    executors = []

    class AtOnce(EXECUTORS["ray"]):
        """Waits until what it does has happened: the clock of the story stands still meanwhile."""

        def start(self, attempt):
            handle = super().start(attempt)
            wait_for(
                lambda: (tmp_path / "s" / "jobs" / attempt.job / str(attempt.number) / "saves" / "rank-0").exists()
            )
            return handle

        def ask_to_leave(self, attempt):
            super().ask_to_leave(attempt)
            wait_for(lambda: not self.alive([attempt])[attempt.job].alive)

    def make(folder, pools, *_):
        executors.append(AtOnce(folder, pools))
        return executors[0]

    def end(attempt):
        (Path(tmp_path) / "s" / "jobs" / attempt.job / str(attempt.number) / "done").touch()
        wait_for(lambda: not executors[0].alive([attempt])[attempt.job].alive)

    decisions, rows = story(tmp_path, make, end, str(tmp_path / "job.py"))

    expected, expected_rows = story(tmp_path / "one", computed, lambda attempt: None)
    assert decisions == expected
    assert [row["restarts"] for row in rows] == [row["restarts"] for row in expected_rows]
    wait_for(lambda: ray.available_resources().get("a100") == 2)


@pytest.mark.slow
def test_a_type_that_the_cluster_does_not_have_is_refused_with_what_to_type(tmp_path, cluster):
    with pytest.raises(HeadwayError, match=r"no resource 'k80'.*ray start"):
        EXECUTORS["ray"](tmp_path, {"k80": 1})
