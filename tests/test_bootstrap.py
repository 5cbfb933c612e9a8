"""The start of recording: cheap, genuine, inherited by every kind of child, chained, and never in the way."""

import importlib.util
import inspect
import signal
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from headway.runtime.in_rank.bootstrap import WATCHED, rank_of
from headway.runtime.in_rank.hooks import PostImport
from tests.paths import ROOT
from tests.recorded import INJECT, environment, recording, rows, run_script
from tests.rings_made import read_ring

LOOP = """
    import torch, multiprocessing, sys
    from torch.utils.data import DataLoader, TensorDataset

    def main(start_method=None):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2 if start_method else 0,
                            multiprocessing_context=start_method, persistent_workers=bool(start_method))
        for epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                print(loss.item().hex())

    if __name__ == "__main__":
        assert sys.modules["__main__"].__file__ == __file__
        main(START)
"""


def run_python(code: str, tmp_path: Path, *, recorded: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a one-liner under the injected folder."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path / "run" if recorded else None, **env),
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What the loop prints without headway, by how its workers start: each run once."""

    @cache
    def printed(start):
        source = LOOP.replace("START", repr(start))
        return run_script(source, tmp_path_factory.mktemp("plain"), recorded=False)

    return printed


@pytest.mark.parametrize(
    "start", [None, "fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]
)
def test_losses_are_the_same_with_and_without_and_every_worker_is_seen(start, tmp_path, plain):
    recorded = run_script(LOOP.replace("START", repr(start)), tmp_path)
    seen = rows(tmp_path / "run")

    assert recorded == plain(start)
    assert len(seen["optimizer.step"]) == 12
    assert [row["b"] for row in seen["input.next"]] == [0, 1, 2, 3, 4, 5, -1] * 2
    loads = rows(tmp_path / "run", role="loader" if start else "main")["input.load"]
    assert len(loads) == 12
    if start:
        pids = {row["d"]: row["c"] for row in seen["input.worker"]}
        assert {row["pid"]: row["worker"] for row in loads} == pids
        assert [row["c"] for row in seen["input.next"] if row["b"] >= 0] == [0, 1] * 6
        assert sorted(row["a"] for row in loads) == [0] * 6 + [1] * 6  # two lives: two epochs


@pytest.mark.slow
def test_headway_off_and_no_run_folder_record_nothing(tmp_path):
    code = "import sys, torch; print('headway.runtime.in_rank.bootstrap' in sys.modules)"

    assert run_python(code, tmp_path, HEADWAY="off").stdout == "False\n"
    assert run_python(code, tmp_path, HEADWAY_RUN="").stdout == "False\n"
    assert not (tmp_path / "run").exists()


def test_nothing_heavy_is_loaded_before_the_script_imports_torch(tmp_path):
    code = "import sys; print(*sorted(sys.modules))"
    bare = run_python(code, tmp_path, recorded=False).stdout.split()
    ours = run_python(code, tmp_path).stdout.split()

    assert set(ours) - set(bare) <= {"sitecustomize", "__future__"}


def test_the_start_costs_less_than_importing_json(tmp_path):
    """CPU inside one process, best of 20 each."""
    code = """
        import time, runpy, sys

        def cost(work):
            best = 1e9
            for _ in range(20):
                start = time.thread_time()
                work()
                best = min(best, time.thread_time() - start)
            return best

        def reload():
            for name in [n for n in sys.modules if n.split(".")[0] in ("json", "re", "enum")]:
                del sys.modules[name]
            import json

        print(cost(lambda: runpy.run_path(SITE)) / cost(reload))
    """
    code = textwrap.dedent(code).replace("SITE", repr(str(INJECT / "sitecustomize.py")))

    assert float(run_python(code, tmp_path).stdout) < 1


def test_the_users_own_sitecustomize_runs_and_stays_in_sys_modules(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import sys\nsys.users_own = 42\nname = 'theirs'\n")
    paths = f"{INJECT}:{tmp_path / 'theirs'}:{ROOT}"
    code = "import sys, sitecustomize; print(sys.users_own, sitecustomize.name, sitecustomize.__file__)"
    result = run_python(code, tmp_path, PYTHONPATH=paths)

    assert result.stdout.split() == ["42", "theirs", str(tmp_path / "theirs" / "sitecustomize.py")]


def test_a_ctrl_c_while_recording_is_prepared_ends_the_script_as_one_that_arrives_in_it(tmp_path):
    """Python's `site` would end the process with 1 and a fatal error."""
    for folder, name, code in (
        ("inject", "sitecustomize.py", (INJECT / "sitecustomize.py").read_text()),
        ("in_rank", "hooks.py", "import _signal; _signal.raise_signal(_signal.SIGINT)"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(code)
    result = run_python("print('ran')", tmp_path, PYTHONPATH=str(tmp_path / "inject"))

    assert (result.returncode, result.stdout) == (-signal.SIGINT, "")
    assert result.stderr.strip().endswith("\nKeyboardInterrupt")


def test_a_library_that_cannot_be_loaded_is_one_line_and_the_script_goes_on(tmp_path):
    code = "import sys; sys.modules['headway'] = None; import torch; print('done')"
    result = run_python(code, tmp_path)

    assert result.stdout == "done\n"
    assert result.stderr.count("headway:") == 1


def test_a_script_can_still_set_the_environment_before_torch_and_its_exception_shows_no_frame_of_headway(tmp_path):
    code = (
        "import os; os.environ['OMP_NUM_THREADS'] = '2'; import torch; print(torch.get_num_threads())\n"
        "p = torch.nn.Parameter(torch.ones(1))\n"
        "class Bad(torch.optim.SGD):\n"
        "    def step(self, closure=None): raise KeyError('mine')\n"
        "Bad([p], lr=1.0).step()"
    )
    result = run_python(code, tmp_path)

    assert (result.returncode, result.stdout) == (1, "2\n"), result.stderr
    theirs = [line for line in result.stderr.splitlines() if not line.startswith("headway: ")]  # a busy host is told of
    assert theirs[-1] == "KeyError: 'mine'", result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["all", "run", "optimizer.step,input.load,DataLoader.__next__"])
def test_a_headway_whose_patches_fail_on_purpose_lets_the_script_finish(broken, tmp_path, plain):
    recorded = run_script(LOOP.replace("START", "None"), tmp_path, HEADWAY_BREAK=broken)
    assert recorded == plain(None)

    lines = (tmp_path / "stderr").read_text().splitlines()
    assert lines
    assert all(line.startswith("headway: ") and " is not recorded: " in line for line in lines)
    assert len(lines) == len(set(lines))


@pytest.mark.slow
def test_mp_spawn_children_are_ranks_of_their_own(tmp_path):
    run_script(
        """
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp

        def work(rank, store):
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            assert tensor[0] == 2
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(work, args=(os.environ["STORE"].partition("?")[0],), nprocs=2)
        """,
        tmp_path,
    )
    headers = [read_ring(path)[0] for path in (tmp_path / "run" / "rings").glob("*.ring")]

    assert sorted((header.role, header.rank) for header in headers if header.role == "spawned") == [
        ("spawned", 0),
        ("spawned", 1),
    ]
    assert len(rows(tmp_path / "run", role="spawned", rank=1)["comm.collective"]) == 1


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({}, 0), ({"RANK": "2"}, 2), ({"SLURM_PROCID": "3"}, 3), ({"RANK": "", "OMPI_COMM_WORLD_RANK": "1"}, 1)],
)
def test_the_rank_is_the_launchers(environ, rank):
    assert rank_of(environ) == rank


@pytest.fixture
def watched():
    """What a watch over a module that is not imported has seen."""
    seen = []
    finder = PostImport({"colorsys"}, before=seen.append, after=seen.append)
    kept = sys.modules.pop("colorsys", None)
    finder.install()
    yield seen
    finder.remove()
    if kept is not None:
        sys.modules["colorsys"] = kept


def test_a_watched_module_keeps_its_loader_and_its_source(watched):
    import colorsys

    assert watched == ["colorsys", colorsys]
    assert "def rgb_to_yiq" in inspect.getsource(colorsys)
    assert type(colorsys.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_module_that_is_only_looked_for_is_still_watched_when_it_is_imported(watched):
    spec = importlib.util.find_spec("colorsys")
    assert watched == []
    import colorsys

    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)

    assert watched == ["colorsys", colorsys]


def test_the_end_of_a_process_is_noted_whatever_fails_before(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("headway.runtime.in_rank.bootstrap.process_memory", broken)
    with recording(tmp_path / "run") as session:
        session.finish()

        assert session.probes.recorder.end_ns > 0
        assert "illegal memory access" in session.probes.tables["patches"]["the end of the process"]


def test_modules_without_a_loader_of_their_own_are_not_watched():
    """Built-in and frozen modules share one loader class; a hook there would follow every import."""
    assert not WATCHED & set(sys.builtin_module_names) - {"gc"}
