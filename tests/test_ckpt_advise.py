"""`headway ckpt advise` and `headway ckpt bench`, from the command line."""

import json
import subprocess
import sys

import pytest

from tests.launching import headway_here, json_of, refusal
from tests.runs_made import MS, RunMaker, write_folder

FACTS = ["--set", "step_s=0.5", "--set", "save_s=20", "--set", "every=100"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    maker = RunMaker(ranks=2, steps=60, cores=8, save_ns=lambda rank, step: 40 * MS if step % 10 == 5 else 0)
    return write_folder(maker.make(), tmp_path_factory.mktemp("run"))


def test_a_recorded_run_is_advised_by_replay(folder):
    told = json_of("ckpt", "advise", folder, "--set", "mtbf_s=36000", "--json")

    assert told["schema"] == "headway.ckpt.advise/1"
    assert told["job"]["every_steps"] == 10
    assert told["job"]["save_s"] == pytest.approx(0.04, rel=0.05)
    assert [way["name"] for way in told["ways"]][:2] == ["as now", "interval"]
    assert told["ways"][0]["lost_fraction"] > told["ways"][1]["lost_fraction"]
    assert told["proposals"][0]["name"] == "checkpoint.interval"
    assert [row["redundancy"] for row in told["redundancy"]] == ["none", "+1"]


def test_facts_alone_will_do_and_the_screen_names_every_way():
    screen = headway_here("ckpt", "advise", *FACTS, "--set", "state=12GB").stdout

    assert all(name in screen for name in ("as now", "interval", "async", "at a failure", "redundancy"))
    assert "How often it fails is not known." in " ".join(screen.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["advise"], "nothing to advise on"),
        (["advise", "--set", "step=1"], "Did you mean 'step_s'"),
        (["bench", "/nonexistent/folder"], "no folder"),
        (["bench", "/tmp", "--size", "much"], "size in bytes"),
    ],
)
def test_a_callers_mistake_is_exit_code_2_with_the_fix(arguments, message):
    assert message in refusal("ckpt", *arguments)


def test_a_run_without_saves_says_what_to_pass(tmp_path):
    run = write_folder(RunMaker(ranks=1, steps=40).make(), tmp_path / "run")

    assert "shows no save" in refusal("ckpt", "advise", run)


@pytest.mark.slow
def test_bench_lays_torchs_own_save_beside_ours(tmp_path):
    told = json_of("ckpt", "bench", tmp_path, "--size", "8MiB", "--state", "1GB", "--json")

    assert told["schema"] == "headway.ckpt.bench/1"
    assert 0 < told["blocked_s"] < told["durable_s"]
    assert told["dcp_save_s"] > told["blocked_s"]
    assert list(tmp_path.iterdir()) == []


def test_bench_without_the_peer_loads_no_torch(tmp_path):
    code = (
        "import sys; from headway.verbs.stored.ckpt_advise import bench; from pathlib import Path; "
        f"code = bench(Path({str(tmp_path)!r}), size='8MiB', ours_only=True, json=True); "
        "sys.exit(code or 5 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dcp_save_s"] is None
