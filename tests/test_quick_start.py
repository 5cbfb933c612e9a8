"""What tests' processes are spared at their start is there as soon as something needs it."""

from __future__ import annotations

import json
import subprocess
import sys

SEEN = """
import gc, json, sys, torch
before = ["torch._refs" in sys.modules, gc.isenabled(), gc.get_freeze_count(), torch.Generator().initial_seed()]
NEEDS
keys = sorted(torch._C._dispatch_get_registrations_for_dispatch_key("Meta"))
tables = {name: len(table) for name, table in torch._decomp.global_decomposition_table.items()}
print(json.dumps([before, keys, tables, torch.empty(2, device="meta").sin().shape, sorted(vars(torch.export))]))
"""


def seen(needs: str) -> list:
    """Return what a process has of torch before and after it did something."""
    source = SEEN.replace("NEEDS", needs)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_what_is_executed_later_registers_the_same(whole_start, monkeypatch):
    needs = "torch.empty(1, device='meta'); import torch.export.unflatten"
    whole = seen(needs)
    monkeypatch.undo()
    quick = seen(needs)

    assert (quick[0], whole[0]) == ([False, *whole[0][1:]], [True, *quick[0][1:]])
    assert quick[1:] == whole[1:]


def test_fake_tensors_have_their_registrations():
    assert seen("from torch._subclasses import FakeTensorMode; FakeTensorMode(); assert 'torch._refs' in sys.modules")
