"""What starts jobs, or runs beside training, loads nothing heavy: each statement in a fork of a fresh process."""

import json
import subprocess
import sys

import pytest

from tests.paths import ROOT

LIGHT = {
    "import headway": "torch numpy numba pyarrow rich",
    "import headway.core.files.planfile": "torch numpy numba pyarrow msgspec rich",
    "import headway.sim": "numba",
    "import headway.integrations": "torch transformers lightning keras",
    "import headway.checkpoint.agent.agent": "torch numba",
    "import headway.data.fleet.supervisor, headway.data.fleet.reader": "torch",
    "import headway.runtime.launching.launch": "torch numpy pyarrow",
    "import headway.runtime.run_folder.status": "pyarrow",
    "import headway.ledger.live_ledger": "pyarrow",
    "import headway.trace.rings.follow": "pyarrow",
    "from headway.runtime.host.doctor import check; check()": "torch",
}
"""Statement -> modules that are not there behind it."""

EACH_IN_A_FORK = """
import json, os, sys
for statement in sys.argv[1:]:
    if not os.fork():
        exec(statement)
        print(json.dumps([statement, sorted(sys.modules)]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def loaded():
    """Return statement -> the modules that are there behind it."""
    command = [sys.executable, "-c", EACH_IN_A_FORK, *LIGHT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, cwd=ROOT)
    return {statement: set(names) for statement, names in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("statement", LIGHT)
def test_it_loads_nothing_heavy(statement, loaded):
    assert any(name.startswith("headway") for name in loaded[statement])
    assert not loaded[statement] & set(LIGHT[statement].split())
