"""`headway data stalls` with a script: three runs of it, the stalls that its input was given, and clear refusals."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headway.data.stalls.model import WARMUP_STEPS
from headway.verbs.loading.measure import PhaseResult, doubts
from tests.launching import headway_here
from tests.paths import ROOT
from tests.runs_made import MS, RunMaker, write_folder

JOB = ROOT / "benchmarks" / "jobs" / "injected.py"

FILES = """
    import os, sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset):
        def __len__(self):
            return 40
        def __getitem__(self, index):
            with open(os.path.join(sys.argv[1], f"{index}.bin"), "rb") as file:
                return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[:8].float()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    steps = 0
    try:
        for epoch in range(9):
            for x in DataLoader(Files(), 4, shuffle=True, num_workers=rank):
                x.div_(255)
                model(x).sum().backward()
                optimizer.step()
                steps += 1
    finally:
        with open(os.path.join(sys.argv[1], f"ended-{rank}"), "a") as file:
            print(steps, file=file)
        dist.destroy_process_group()
"""


def stalls(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the verb; its stderr is shown when it ends with another code."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY")}
    command = [sys.executable, "-m", "headway.cli", "data", "stalls", *map(str, arguments)]
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    assert answer.returncode == code, answer.stderr
    return answer


def told(*arguments: object, code: int = 0) -> str:
    """Run the verb in this process, where it starts no script; return what it prints, or its complaint."""
    answer = headway_here("data", "stalls", *arguments)

    assert answer.returncode == code, answer.stderr
    return answer.stderr if code else answer.stdout


def phase(
    mean_s: float = 0.01, *, read_bytes: float = 0.0, files_dropped: int = 0, dropping_s: float = 0.0
) -> PhaseResult:
    used = {"seconds": 1.0, "cpu_s": 1.0, "read_bytes": read_bytes}
    return PhaseResult((mean_s,) * 20, {"0": 20}, {"0": 10}, used, True, files_dropped, dropping_s)


def written(folder: Path, rank: int, pid: int, num_steps: int, **more: object) -> None:
    (folder / "phase").mkdir(parents=True, exist_ok=True)
    found = {"complete": True, "step_s": [0.01 * (rank + 1)] * num_steps, "batches": {"0": num_steps}, "used": []}
    (folder / "phase" / f"r{rank}-{pid}.json").write_text(json.dumps({**found, "epoch_batches": {"0": 5}, **more}))


# Laws of what is read


def test_a_phase_is_the_mean_over_ranks_of_the_steps_that_all_took(tmp_path):
    written(tmp_path, 0, 10, 9)
    written(tmp_path, 1, 11, 8, complete=False)

    found = PhaseResult.read(tmp_path)

    assert found.step_s == pytest.approx((0.015,) * 8)
    assert (found.batches, found.complete, found.used) == ({"0": 9}, False, {})


def test_of_two_processes_that_were_one_rank_the_one_that_trained_counts(tmp_path):
    written(tmp_path, 0, 10, 0)
    written(tmp_path, 0, 11, 8)

    assert len(PhaseResult.read(tmp_path).step_s) == 8


def test_a_run_in_which_no_rank_was_measured_has_no_phase(tmp_path):
    assert PhaseResult.read(tmp_path) is None


@pytest.mark.parametrize(
    ("cold", "warm", "waited", "words"),
    [
        (phase(read_bytes=9e6, files_dropped=5), phase(), 0.0, []),
        (phase(read_bytes=9e6, files_dropped=5, dropping_s=0.1), phase(), 0.0, ["on dropping files"]),
        (phase(), phase(), 0.0, ["opened no file"]),
        (phase(files_dropped=5), phase(), 0.0, ["read nothing from storage although 5 files"]),
        (phase(read_bytes=9e6, files_dropped=5), phase(read_bytes=8e6), 0.0, ["did not hold the data"]),
        (phase(read_bytes=9e6, files_dropped=5), phase(0.02), 0.8, ["still blocked for 80 %"]),
    ],
)
def test_a_phase_that_was_not_what_its_name_says_is_flagged(cold, warm, waited, words):
    found = doubts({"cold": cold, "warm": warm, "synthetic": phase()}, waited, Path("out"))

    assert len(found) == len(words)
    assert all(word in flag for word, flag in zip(words, found, strict=True))


# What-ifs of a recorded run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    made = RunMaker(
        ranks=1, steps=60, epoch_steps=20, cores=8, fetch_ns=12 * MS, prep_ns=6 * MS, compute_ns=5 * MS
    ).make()
    return write_folder(made, tmp_path_factory.mktemp("recorded") / "run")


def test_a_recorded_run_is_split_by_replay_as_before(recorded):
    answer = json.loads(told(recorded, "--json"))

    assert answer["bottleneck"] == "fetch"
    assert "what_if" not in answer


def test_what_ifs_are_replayed_together_and_split_again(recorded):
    answer = json.loads(told(recorded, "--cache-fraction", 1, "--workers", 2, "--storage", 2, "--json"))
    what_if = answer["what_if"]

    assert what_if["edits"] == ["cache_fraction=1.0", "workers=2", "storage=2.0x"]
    assert what_if["speedup"] > 1.5
    assert answer["after"]["step_s"] == pytest.approx(what_if["step_s"])
    assert answer["after"]["fetch_s"] < answer["fetch_s"]


def test_a_faster_accelerator_makes_the_stall_a_larger_part_of_the_step(recorded):
    answer = json.loads(told(recorded, "--accelerator", 5, "--cores", 16, "--json"))

    assert answer["after"]["fractions"]["compute"] < answer["fractions"]["compute"]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", 5, "--", JOB], "--steps is 5, and the first 5 steps of each phase are warm-up. Pass at least 6"),
        (["--", "no-such-script.py"], "no-such-script.py"),
        (["--workers", 2, "--", JOB], "--workers and a script behind -- exclude each other"),
        (["--steps", 60], "--steps needs a script to run. Put it behind --"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_anything_runs(arguments, message):
    assert message in " ".join(told(*arguments, code=2).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import torch; x = torch.zeros(1, requires_grad=True); o = torch.optim.SGD([x], 1.0)\n"
         "for _ in range(9): x.sum().backward(); o.step()", "read nothing through a torch DataLoader"),
        ("import torch; from torch.utils.data import DataLoader; list(DataLoader(torch.zeros(7), 8, drop_last=True))",
         "the dataset has 7 examples, fewer than one batch of 8"),
        ("import torch; from torch.utils.data import DataLoader; list(DataLoader(torch.zeros(80), 8))",
         "ended after 0 optimizer steps in the cold phase, and the first 5 are warm-up"),
        ("import torch; raise RuntimeError('no such data')", "the script failed in the cold phase (exit code 1, user)"),
        ("print('no torch here')", "it imported no torch"),
    ],
    ids=["no loader", "small dataset", "no steps", "failure", "no torch"],
)  # fmt: skip
def test_a_script_that_cannot_be_measured_is_refused_with_what_to_change(tmp_path, source, message):
    script = tmp_path / "train.py"
    script.write_text(source)

    answer = stalls("--steps", 8, "--out", tmp_path / "out", "--", script, code=2)

    assert message in " ".join(answer.stderr.split())
    assert not (tmp_path / "out" / "warm").exists()


# End to end


@pytest.mark.slow
def test_the_stall_measured_is_the_sleep_that_was_injected(tmp_path):
    """A sleep of 5 ms in each of 4 examples beside 20 ms of compute: half of the step is stall.

    A busy host makes each part longer, and not equally in the three runs: what is held are the sleeps, below which no
    part can be, and that the parts of one run add up.
    """
    job = [JOB, "--sleep-ms", 5, "--batch-size", 4, "--accelerator-ms", 20, "--examples", 64]
    answer = json.loads(stalls("--steps", 30, "--json", "--out", tmp_path / "out", "--", *job).stdout)
    phases, parts = answer["phases"], answer["fractions"]

    assert phases["cold"]["step_s"] >= 0.040
    assert phases["warm"]["step_s"] >= 0.040
    assert 0.020 <= phases["synthetic"]["step_s"] < phases["cold"]["step_s"]
    stall_s = phases["cold"]["step_s"] - phases["synthetic"]["step_s"]
    assert parts["fetch"] + parts["prep"] == pytest.approx(stall_s / phases["cold"]["step_s"], rel=0.1)
    assert answer["bottleneck"] in {"fetch", "prep"}
    assert min(answer[f"{part}_s"] for part in ("compute", "fetch", "prep", "transfer")) >= 0
    assert [phases[name]["steps"] for name in ("cold", "warm", "synthetic")] == [30 - WARMUP_STEPS] * 3
    assert any("blocked" in flag for flag in answer["flags"])
    assert any("opened no file" in flag for flag in answer["flags"])
    assert answer["per_epoch_s"]["compute"] == pytest.approx(16 * answer["compute_s"])
    replayed = answer["replayed"]
    assert replayed["fetch_s"] >= 0.020
    assert replayed["step_s"] - replayed["fetch_s"] >= 0.020


@pytest.mark.slow
def test_files_are_read_from_storage_when_cold_and_from_memory_when_warm_and_all_ranks_end_at_the_same_step(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for index in range(40):
        (data / f"{index}.bin").write_bytes(os.urandom(1 << 18))
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(FILES))
    out = tmp_path / "out"
    answer = json.loads(stalls("--steps", 24, "--nproc-per-node", 2, "--json", "--out", out, "--", script, data).stdout)
    cold, warm = answer["phases"]["cold"], answer["phases"]["warm"]

    assert [(data / f"ended-{rank}").read_text().split() for rank in (0, 1)] == [["23"] * 3] * 2
    assert PhaseResult.read(out / "cold").files_dropped >= 2 * 4 * 24
    assert warm["read_bytes_per_s"] < 1 << 18  # less than one file a second, of some hundred: none of the data
    if not any("read nothing from storage" in flag for flag in answer["flags"]):  # tests may run on a memory disk
        assert cold["read_bytes_per_s"] > 0
    assert cold["examples_per_s"] == pytest.approx(8 / cold["step_s"])
