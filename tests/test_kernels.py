"""The compiled kernels: few, cached, and clear about what they lack."""

import logging
import os
import subprocess
import sys

import numba
import pytest

from headway.core.errors import HeadwayError
from headway.sim.graph import kernels

KERNELS = {name: value for name, value in vars(kernels).items() if hasattr(value, "py_func")}


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_there_are_at_most_twelve_and_all_of_them_are_cached_and_release_the_gil() -> None:
    assert 8 <= len(KERNELS) <= 12
    assert all(kernel.targetoptions.get("nogil") for kernel in KERNELS.values())
    assert all(type(kernel._cache).__name__ == "FunctionCache" for kernel in KERNELS.values())


@pytest.mark.slow
def test_compiled_code_goes_where_numba_cache_dir_says(tmp_path) -> None:
    code = "import numpy as np; from headway.sim.graph.kernels import csr; x = np.zeros(1, np.int64); csr(1, x, x, x)"
    done = run(code, NUMBA_CACHE_DIR=str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*csr*.nbc"))


@pytest.mark.slow
def test_compiled_code_is_loaded_without_what_only_compiling_needs_and_gives_the_same(tmp_path) -> None:
    code = (
        "import sys, numpy as np; from headway.sim.graph.dag import greedy; from headway.sim.graph.dag import Dag\n"
        "times = greedy(Dag.from_edges(4, [0, 1], [2, 2], lane=[0, 0, 1, 1]), np.array([5, 7, 3, 2]))\n"
        "print(times.end_ns.tolist(), 'numba.np.linalg' in sys.modules, 'scipy.linalg' in sys.modules)"
    )
    first, second = (run(code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))

    assert first.stdout.startswith("[5, 12, 15, 2] True"), first.stderr
    assert second.stdout == "[5, 12, 15, 2] False False\n", second.stderr


def test_without_a_writable_folder_the_kernels_compile_anyway_and_one_warning_says_what_to_set(
    monkeypatch, caplog
) -> None:
    real = numba.njit

    def njit(*functions, **options):  # numba compiles functions of its own as well
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return real(*functions, **options)

    monkeypatch.setattr(numba, "njit", njit)
    kernels._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        twice = [kernels.kernel(lambda x: x + 1), kernels.kernel(lambda x: x + 2)]

    assert [f(1) for f in twice] == [2, 3]
    assert [record.message.split(". ")[-1] for record in caplog.records] == [
        "Set NUMBA_CACHE_DIR to a writable folder."
    ]


def test_another_refusal_of_numba_is_reported(monkeypatch) -> None:
    def njit(**options):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(numba, "njit", njit)
    with pytest.raises(HeadwayError, match=r"numba refuses .*: out of luck. Reinstall numba"):
        kernels.kernel(lambda x: x)


def test_a_missing_numba_is_named_with_what_to_do() -> None:
    done = run("import sys; sys.modules['numba'] = None; import headway.sim as s; s.Dag.from_edges(1, [], [])")

    assert done.returncode == 1
    assert "numba is missing; replays need it. Install headway with its dependencies." in done.stderr
