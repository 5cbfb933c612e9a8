"""Warnings that count callers name the script's line and module, also where a function of headway's is on the stack."""

import subprocess
import sys
import warnings

from headway.runtime.recorder.timers import hidden
from tests.launching import headway, script


def test_a_hidden_function_is_none_of_the_callers_that_a_warning_counts():
    def warn():
        warnings.warn("told", UserWarning, stacklevel=3)

    def around(inner):
        return lambda: inner()

    def called(function):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        return caught[0].lineno, caught[0].filename

    direct = called(around(warn))
    assert called(around(hidden(around(warn)))) == direct
    assert called(around(around(warn))) != direct


JOB = """
import warnings, torch
class Own(torch.optim.SGD):
    def step(self):
        for depth in (2, 3):
            warnings.warn(f"mine {depth}", stacklevel=depth)
        super().step()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    net = torch.nn.Linear(2, 2)
    optimizer = Own(net.parameters(), 0.1)
    for _ in range(3):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
print([(str(one.message), one.lineno, one.filename.rpartition("/")[2]) for one in caught])

warnings.filterwarnings("error", category=UserWarning, module="__main__")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
model.register_full_backward_hook(lambda module, given, made: None)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
caught = 0
for _ in range(5):
    try:
        model(torch.randn(2, 4)).sum().backward()
    except UserWarning:
        caught += 1
    optimizer.step()
print(caught, model.weight.sum().item())
"""


def test_a_script_whose_updates_warn_and_that_filters_by_module_says_the_same_when_recorded(tmp_path):
    job = script(tmp_path, JOB)
    plain = subprocess.run([sys.executable, job], capture_output=True, text=True, timeout=60)
    recorded = headway("run", "--quiet", "--out", tmp_path / "run", "--", job)

    warned, filtered = plain.stdout.splitlines()
    assert warned.count("mine 2") == warned.count("mine 3") == 3
    assert filtered.startswith("5 ")
    assert recorded.stdout == plain.stdout
