"""The table of patches: every entry goes in, stands for its original, comes out, and may break without harm."""

import os
import pickle
import sys

import pytest
import torch
import torch.distributed.checkpoint
import torch.distributed.pipelining
from torch._dynamo import callback as _callback  # so that every target is imported

from headway.core.errors import InputError
from headway.runtime.calls.patches import PATCHES, Patch, install, replace_attribute, same_face
from headway.runtime.recorder.probes import Probes
from headway.trace.rings.ring import Recorder
from tests.recorded import recording

assert _callback
HERE = [name for name, patch in PATCHES.items() if patch.module in sys.modules and not patch.needs]


@pytest.fixture
def probes(tmp_path):
    """Probes that write into a folder of their own."""
    return Probes(Recorder(str(tmp_path / "rings")), str(tmp_path))


def target_of(patch: Patch):
    """Return what stands at a patch's target now."""
    value = sys.modules[patch.module]
    for part in patch.target.partition(":")[2].split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", HERE)
def test_every_patch_goes_in_and_comes_out_again(name, probes, capsys):
    patch = PATCHES[name]
    before = target_of(patch)
    members = list(before) if isinstance(before, list) else None
    undo = install(name, probes)

    assert undo is not None
    assert probes.tables["patches"][name] == "ok"
    if patch.wrapper is not None:
        assert target_of(patch) is not before
        assert target_of(patch).__wrapped__ is before
        assert target_of(patch).__name__ == before.__name__
    undo()
    assert target_of(patch) is before
    assert members is None or list(before) == members
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_that_is_made_to_fail_is_one_warning_and_a_lower_coverage(name, probes, capsys, monkeypatch):
    monkeypatch.setenv("HEADWAY_BREAK", "all")
    before = target_of(PATCHES[name]) if name in HERE else None
    if PATCHES[name].needs:
        pytest.skip("goes in only where there is a CUDA device")

    assert install(name, probes) is None
    assert install(name, probes) is None
    assert name not in HERE or target_of(PATCHES[name]) is before
    assert probes.tables["patches"][name].startswith("RuntimeError: HEADWAY_BREAK=all")
    assert capsys.readouterr().err.count("is not recorded") == 1


def test_every_target_but_the_optional_ones_exists_in_this_torch():
    missing = [name for name, patch in PATCHES.items() if name not in HERE and not patch.needs]

    assert missing in ([], ["safetensors.save_file", "safetensors.load_file"])


def test_a_session_leaves_nothing_behind(tmp_path):
    before = {name: target_of(PATCHES[name]) for name in HERE}
    with recording(tmp_path / "run"):
        assert target_of(PATCHES["torch.save"]) is not before["torch.save"]

    assert {name: target_of(PATCHES[name]) for name in HERE} == before


def test_an_undo_leaves_a_later_patch_of_somebody_else_alone():
    import colorsys

    original = colorsys.rgb_to_hls
    undo = replace_attribute("colorsys:rgb_to_hls", lambda old: lambda *rgb: old(*rgb))
    theirs = colorsys.rgb_to_hls = lambda *rgb: rgb
    undo()
    assert colorsys.rgb_to_hls is theirs
    colorsys.rgb_to_hls = original


def test_functions_of_os_can_be_sent_to_another_process_as_before(probes):
    undos = [install(name, probes) for name in ("os.rename", "os.replace", "os.fsync")]
    try:
        assert all(pickle.loads(pickle.dumps(function)) is function for function in (os.rename, os.replace, os.fsync))
    finally:
        for undo in undos:
            undo()


def test_a_static_method_stays_one_and_an_inherited_method_is_not_copied_down():
    undo = replace_attribute("torch.optim.optimizer:Optimizer.profile_hook_step", lambda old: staticmethod(old))
    undo()
    assert isinstance(vars(torch.optim.Optimizer)["profile_hook_step"], staticmethod)
    undo = replace_attribute("torch.optim:SGD.zero_grad", lambda old: lambda *a, **k: old(*a, **k))
    assert "zero_grad" in vars(torch.optim.SGD)
    undo()
    assert "zero_grad" not in vars(torch.optim.SGD)


def test_a_target_that_does_not_exist_is_a_clear_error():
    with pytest.raises(InputError, match="there is no torch:no_such_thing to patch"):
        replace_attribute("torch:no_such_thing", lambda old: old)


def test_the_self_test_refuses_a_wrapper_that_does_not_stand_for_its_original():
    with pytest.raises(InputError, match="does not replace it"):
        same_face(lambda: None, torch.save)
