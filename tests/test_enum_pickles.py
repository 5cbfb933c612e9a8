"""A checkpoint of `dcp.save` under Python 3.11.2, whose pickles name members of enumerations through getattr."""

import torch

from headway.checkpoint import restore_into
from tests.launching import code_and_json
from tests.paths import GOLDEN

SAVED = GOLDEN / "dcp_python_3_11_2" / "step-7"
"""{"model": {"w": arange(6.0) as [2, 3], "b": three bfloat16 ones}, "step": 7}, saved with torch 2.13."""


def ckpt(*arguments):
    return code_and_json("ckpt", *arguments, "--json")


def test_it_is_listed_shown_and_verified():
    assert b"getattr" in (SAVED / ".metadata").read_bytes()
    assert ckpt("ls", SAVED.parent)[0] == 0
    assert {row["fqn"] for row in ckpt("show", SAVED)[1]["tensors"]} == {"model.w", "model.b"}
    assert ckpt("verify", SAVED)[0] == 0


def test_it_is_imported_exported_compared_and_restored(tmp_path):
    imported, exported = tmp_path / "step-7", tmp_path / "w.safetensors"
    state = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)}, "step": 0}

    assert ckpt("import", SAVED, "-o", imported)[0] == 0
    assert ckpt("export", SAVED, "-o", exported)[0] == 0
    assert ckpt("diff", SAVED, imported)[0] == 0
    restore_into(SAVED, state)

    assert torch.equal(state["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert state["step"] == 7
