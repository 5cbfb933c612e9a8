"""What a rank is started with: torchrun's variables, ours in front of the user's paths, a port of its own."""

import json
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.runtime.host.rank_env import (
    INJECT,
    Command,
    Port,
    RankEnvironment,
    argv,
    check_host,
    headway_env,
    inherited,
    num_processes,
    torchrun_env,
)


@given(script=st.text(min_size=1), arguments=st.lists(st.text()), module=st.booleans(), no_python=st.booleans())
def test_arguments_stand_last_and_unchanged(script, arguments, module, no_python):
    line = argv(script, arguments, Command(module, no_python and not module))

    assert list(line[len(line) - len(arguments) :]) == arguments
    assert line[len(line) - len(arguments) - 1] == script
    assert ("-m" in line[: -1 - len(arguments)]) is module


@given(world=st.integers(1, 1000), rank=st.integers(0, 999), attempt=st.integers(0, 5))
def test_the_environment_is_text_and_says_the_place(world, rank, attempt):
    env = torchrun_env(RankEnvironment(rank, rank % 8, world, 8, attempt=attempt), {})

    assert all(isinstance(value, str) for value in env.values())
    assert (env["RANK"], env["WORLD_SIZE"], env["TORCHELASTIC_RESTART_COUNT"]) == (str(rank), str(world), str(attempt))
    assert env["OMP_NUM_THREADS"] == "1"


def test_a_users_threads_and_paths_are_kept():
    assert torchrun_env(RankEnvironment(0, 0, 2, 2), {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in torchrun_env(RankEnvironment(0, 0, 1, 1), {})
    env = headway_env(
        {"PYTHONPATH": "/a:/b"}, run=Path("/run"), rings=Path("/run/rings"), attempt=1, plan=Path("/p"),
        remedies={"x": "m:f"},
    )  # fmt: skip
    assert env["PYTHONPATH"] == os.pathsep.join([str(INJECT), "/a:/b"])
    assert json.loads(env["HEADWAY_REMEDIES"]) == {"x": "m:f"}
    assert (env["HEADWAY_RUN"], env["HEADWAY_ATTEMPT"], env["HEADWAY_PLAN"]) == ("/run", "1", "/p")
    assert "HEADWAY_PLAN" not in headway_env({}, run=Path("/run"), rings=Path("/run/rings"), attempt=0)


def test_an_outer_recording_is_not_inherited():
    assert inherited({"HEADWAY_MAIN_PID": "1", "HEADWAY_PLAN": "p", "A": "b"}) == {"A": "b"}


@pytest.mark.parametrize("use_libuv", [True, False])
def test_torchs_store_listens_on_a_port_that_is_held(use_libuv):
    from torch.distributed import TCPStore

    with Port() as port:
        store = TCPStore("127.0.0.1", port.number, 1, True, timedelta(seconds=30), use_libuv=use_libuv)
        store.set("key", "value")

        assert store.get("key") == b"value"


def test_a_wanted_port_is_held_too():
    with Port() as port:
        number = port.number
    with Port(number) as port, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", number))
        listener.listen()

        assert port.number == number


FAKE_TORCH = """
import os
if os.environ.get("TORCH_IS_BROKEN"):
    raise ImportError("libcudart.so.12: cannot open shared object file")
class accelerator:
    is_available = staticmethod(lambda: bool(accelerator.device_count()))
    device_count = staticmethod(lambda: len(os.environ["HIP_VISIBLE_DEVICES"].split(",")) - 1)
"""


def test_devices_are_counted_as_a_rank_would_see_them(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,3,5,")
    monkeypatch.setenv("HEADWAY_PRETEND", "device")

    assert num_processes("gpu") == num_processes("auto") == 3
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert num_processes("auto") == len(os.sched_getaffinity(0))
    with pytest.raises(InputError, match="torch sees no device"):
        num_processes("gpu")
    monkeypatch.setenv("TORCH_IS_BROKEN", "1")
    with pytest.raises(InputError, match="libcudart"):
        num_processes("auto")


def test_on_a_host_without_devices_torch_is_not_asked(monkeypatch):
    monkeypatch.setenv("TORCH_IS_BROKEN", "1")
    assert num_processes("auto") == len(os.sched_getaffinity(0))


def test_an_unknown_host_is_an_error_at_once():
    with pytest.raises(InputError, match="cannot be resolved"):
        check_host("no-such-host.invalid", "--master-addr")
