"""Copy probes: they go in only beside a CUDA device, so the tests put them in by hand and copy to 'meta'."""

import time

import torch

from headway.runtime.calls.patches import PATCHES, install, replace_attribute
from headway.runtime.calls.probe_device import copy_in, to_device
from headway.runtime.host import device
from tests.accelerator import Accelerator
from tests.recorded import recording, rows


def test_a_copy_to_a_device_is_recorded_with_its_bytes_and_nothing_else_is(tmp_path):
    on_meta = device.emulate(lambda x: Accelerator().device if x.device.type == "meta" else None, {})
    with recording(tmp_path) as session:
        undos = [
            on_meta,
            replace_attribute("torch:Tensor.to", lambda original: to_device(original, session.probes)),
            replace_attribute("torch:Tensor.copy_", lambda original: copy_in(original, session.probes)),
        ]
        try:
            tensor = torch.ones(100)
            assert tensor.to(torch.float64).dtype == torch.float64
            assert tensor.to("cpu") is tensor
            away = tensor.to("meta", non_blocking=True)
            away.copy_(tensor)
            tensor.copy_(torch.zeros(100))
        finally:
            for undo in undos:
                undo()
    found = rows(tmp_path)["input.transfer"]

    assert [row["a"] for row in found] == [400, 400]
    assert [row["b"] for row in found] == [1, 1]  # the host waits for a copy from pageable memory whatever it asks for
    assert away.device.type == "meta"
    assert tensor.sum() == 0
    assert "to" not in vars(torch.Tensor)


def test_a_copy_back_is_a_wait_for_the_device(tmp_path):
    away = torch.ones(1)
    undo = device.emulate(lambda x: Accelerator().device if x is away else None, {})
    try:
        with recording(tmp_path) as session:
            to_device(lambda _: time.sleep(1e-3) or torch.zeros(1), session.probes)(away)
            copy_in(lambda target, source: time.sleep(1e-3) or target, session.probes)(torch.zeros(1), away)
    finally:
        undo()
    found = rows(tmp_path)

    assert len(found["host.sync"]) == 2
    assert "input.transfer" not in found


def test_compiled_code_keeps_its_graph_with_the_wrapper_in_place(tmp_path):
    with recording(tmp_path) as session:
        undo = replace_attribute("torch:Tensor.to", lambda original: to_device(original, session.probes))
        try:
            torch._dynamo.reset()

            @torch.compile(fullgraph=True, backend="eager")
            def work(x):
                return x.to(torch.float64) + 1

            assert work(torch.ones(2)).tolist() == [2.0, 2.0]
        finally:
            undo()
            torch._dynamo.reset()


def test_without_a_device_the_patches_stay_out(tmp_path):
    with recording(tmp_path) as session:
        for name, patch in PATCHES.items():
            if patch.needs == "device" and not device.host_has_devices():
                assert install(name, session.probes) is None
                assert name not in session.probes.tables["patches"]
