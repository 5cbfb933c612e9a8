"""A fleet of real processes: batches and states of a DataLoader, exactly once whoever is killed, else one error."""

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from benchmarks.silent_callers import one_pass
from benchmarks.worker_kills import free_port, play
from headway.core.errors import BackgroundError, InputError
from headway.core.wire.channel import ChannelClosed, TcpListener
from headway.data import DataLoader, Pipeline, SyntheticJpeg
from headway.data.bytes.packing import unpack
from headway.data.fleet.reader import FleetReader, PrepareError
from headway.data.fleet.splits import FleetPass, FromMaster, dial
from headway.data.fleet.supervisor import MAX_ENDS, FleetSettings, start
from headway.data.fleet.torch_fleet import Fleet, FleetLoader, work_for
from headway.data.service.messages import StatusRequest
from tests.datasets import Sized
from tests.launching import wait_for
from tests.refusals import refused
from tests.served_made import has_ended


class Drawn(Sized):
    """Items with random numbers of every kind; one of them may be broken."""

    def __init__(self, size, broken=None, ends=None):
        self.size, self.broken, self.ends = size, broken, ends

    def __getitem__(self, index):
        if index == self.broken:
            raise KeyError(f"item {index} is broken")
        if index == self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        numbers = torch.cat([torch.tensor([float(index)]), torch.rand(3)])
        return {"x": numbers, "y": index, "n": np.random.rand(2), "half": numbers.bfloat16(), "name": f"item {index}"}


class Endless(torch.utils.data.IterableDataset):
    """A stream that says how long it is, and still cannot be indexed."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(range(4))


def equal(one, other):
    """Whether two batches are equal bit by bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if torch.is_tensor(one[key]) else one[key] == other[key] for key in one
    )


def children(fleet):
    """The processes of a fleet: name -> process."""
    return {process.name(): process for process in psutil.Process(fleet._keeper.supervisor).children()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_every_item_is_delivered_once_under_random_kills(seed):
    """A few of the 200 schedules of `headway bench worker_kills --full`."""

    assert play(7000 + seed).exact


@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
def test_batches_are_those_of_a_data_loader_bit_for_bit(tail):
    with Fleet(Drawn(43), num_workers=2) as fleet:
        for rank in (0, 1):
            options = {"seed": 5, "rank": rank, "world_size": 2, "tail": tail}
            ours, plain = fleet.batches(4, True, **options), DataLoader(Drawn(43), 4, True, **options)
            for _ in range(2):  # two epochs
                assert all(equal(one, other) for one, other in zip(ours, plain, strict=True))
            assert isinstance(ours, DataLoader)
            assert len(ours) == len(plain)


def test_states_go_to_a_data_loader_and_back_and_to_another_world():
    with Fleet(Drawn(50), num_workers=2) as fleet:
        loader = fleet.batches(8, True, seed=5)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state, rest = loader.state_dict(), list(batches)

        plain = DataLoader(Drawn(50), 8, True, seed=5)
        plain.load_state_dict(state)
        assert all(equal(one, other) for one, other in zip(rest, plain, strict=True))
        halves = []
        for rank in (0, 1):
            half = fleet.batches(4, True, seed=5, rank=rank, world_size=2)
            half.load_state_dict(state)
            halves += [batch["y"] for batch in half]
        assert sorted(torch.cat(halves).tolist()) == sorted(torch.cat([batch["y"] for batch in rest]).tolist())


def test_a_pipeline_keeps_its_batches_their_memory_order_and_its_own_settings():
    pipeline = Pipeline(SyntheticJpeg(24, 64, 48)).decode().crop(32, 32).flip().batch(4).shuffle()
    expected = list(pipeline.loader(seed=3))

    with Fleet(pipeline, num_workers=1) as fleet:
        got = list(fleet.batches(seed=3))

    assert all(equal(one, other) for one, other in zip(got, expected, strict=True))
    assert got[0]["data"].stride() == expected[0]["data"].stride()
    got[0]["data"].zero_()  # a batch is the loop's own


def test_ranks_of_a_host_share_the_fleet_that_the_first_one_started(tmp_path):
    with Fleet(Drawn(20), num_workers=1, folder=tmp_path) as first, Fleet(Drawn(20), folder=tmp_path) as second:
        assert (first.started_here, second.started_here) == (True, False)
        got = [list(fleet.batches(5, rank=r, world_size=2)) for r, fleet in enumerate((first, second))]

    assert sorted(torch.cat([batch["y"] for batches in got for batch in batches]).tolist()) == list(range(20))


def test_a_fleet_outlasts_the_ranks_that_joined_it(tmp_path):
    joined, tell = os.pipe()
    with Fleet(Drawn(40), num_workers=1, folder=tmp_path) as fleet:
        pid = os.fork()
        if not pid:  # another rank: it joins, and is slow
            code = 1
            with contextlib.suppress(Exception), Fleet(Drawn(40), folder=tmp_path) as other:
                batches = iter(other.batches(5, rank=1, world_size=2))
                got = [next(batches)["y"].tolist()]
                os.write(tell, b"x")
                time.sleep(0.3)
                got += [batch["y"].tolist() for batch in batches]
                code = int(sorted(np.concatenate(got)) != list(range(1, 40, 2)) or other.started_here)
            os._exit(code)
        os.read(joined, 1)
        assert len(list(fleet.batches(5, rank=0, world_size=2))) == 4

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("job", ["", "29500"], ids=["alone", "of a job"])
def test_a_process_that_ends_without_closing_its_fleet_leaves_only_what_its_next_attempt_goes_on_from(monkeypatch, job):
    for key in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)
    if job:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{job}-{os.getpid()}")
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        fleet = Fleet(Drawn(8), num_workers=1)
        os.write(tell, f"{fleet._keeper.supervisor} {fleet.settings.folder}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(tell)
    with os.fdopen(told) as file:
        supervisor, _, folder = file.read().partition(" ")
    wait_for(lambda: has_ended(int(supervisor)))

    assert Path(folder).exists() == bool(job)
    shutil.rmtree(folder, ignore_errors=True)


def test_workers_of_other_hosts_join_over_tcp_with_the_token():
    options = {"host": "127.0.0.1", "port": free_port(), "token": "a secret"}
    with Fleet(Drawn(40), num_workers=1, **options) as fleet:
        pid = os.fork()
        if not pid:
            work_for(fleet.address, Drawn(40), token="a secret", host="127.0.0.1", name="far")
            os._exit(0)
        wait_for(lambda: len(fleet.statistics()["workers"]) == 2, 20)
        with Fleet(Drawn(40), join=True, **options) as there:
            assert [batch["y"].tolist() for batch in there.batches(5)] == np.arange(40).reshape(8, 5).tolist()
        prepared = fleet.statistics()["workers"]
        with pytest.raises(BackgroundError, match="has had no master"):
            FleetReader(fleet.address, FleetPass(40, 5), token="another", patience_s=0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    assert set(prepared) == {"w0", "far"}


def test_a_thousand_silent_connections_leave_a_job_at_its_pace():
    """What they cost is measured by `headway bench silent_callers`; one that is waited for costs two seconds."""
    undisturbed_s, _ = one_pass(200, strangers=False)
    beside_them_s, _ = one_pass(200, strangers=True)

    assert beside_them_s < 10 * undisturbed_s


@pytest.mark.slow
def test_demand_starts_workers_and_its_end_drains_them():
    class Slow(Drawn):
        def __getitem__(self, index):
            time.sleep(0.01)
            return super().__getitem__(index)

    with Fleet(Slow(8000), num_workers="auto", most_workers=3, period_s=0.3) as fleet:
        seen, batches = set(), iter(fleet.batches(4))
        until = time.monotonic() + 30
        while max(seen, default=0) < 3 and time.monotonic() < until:
            next(batches)
            seen.add(len(fleet.statistics()["workers"]))
        assert max(seen) == 3
        while len(children(fleet)) > 3 and time.monotonic() < until:  # the loop is slow now
            next(batches)
            time.sleep(0.1)
        assert len(children(fleet)) == 3  # the master, the one worker that suffices, and one in reserve


def test_what_cannot_be_prepared_surfaces_in_its_turn_and_again():
    with Fleet(Drawn(40, broken=30), num_workers=2) as fleet:
        batches = iter(fleet.batches(10))
        got = [next(batches)["y"].tolist() for _ in range(3)]
        for _ in range(2):
            with pytest.raises(PrepareError, match=r"(?s)batch 3 of rank 0 .*Traceback.*item 30 is broken"):
                next(batches)

    assert got == np.arange(30).reshape(3, 10).tolist()


test_a_bad_first_example_ends_before_any_worker_starts = refused(
    (lambda: Fleet(Drawn(40, broken=1)), r"(?s)first 2 examples cannot be prepared, so no fleet .*item 1 is broken"),
    (lambda: Fleet(Drawn(4), collate_fn=lambda examples: object()), r"is of type object, which cannot be sent"),
    (lambda: Fleet(Drawn(4, ends=0)), "the process that tried ended with -9"),
)


def test_an_item_that_ends_every_worker_is_one_clear_error():
    with Fleet(Drawn(40, ends=20), num_workers=1, split_batches=1) as fleet:
        batches = iter(fleet.batches(10))
        with pytest.raises(InputError, match=r"workers ended while they prepared batches 2 to 2 .*items \[20, 21"):
            list(batches)


def test_workers_that_end_at_once_are_not_started_for_ever(tmp_path):
    def make(keys):
        os.kill(os.getpid(), signal.SIGKILL)

    # So small a window and so many ranks that no split alone ends enough of them.
    settings = FleetSettings(
        tmp_path, 400, num_workers=4, most_workers=4, window=1, split_batches=1, workers_per_reader=1
    )
    pid, channel = start(make, settings)
    readers = [FleetReader(settings.address, FleetPass(400, 1, world_size=8), rank) for rank in range(8)]
    with pytest.raises(InputError, match=rf"ended while they prepared|{MAX_ENDS} workers of the fleet ended"):
        next(readers[7])
    for reader in readers:
        reader.close()
    channel.close()
    os.waitpid(pid, 0)


def test_a_fleet_that_is_gone_is_one_clear_error_and_leaves_no_process():
    fleet = Fleet(Drawn(20_000), num_workers=2, patience_s=0.3)
    batches = iter(fleet.batches(4))
    next(batches)
    processes = list(children(fleet).values())
    fleet.close()

    with pytest.raises(BackgroundError, match=r"has had no master for 0.3 s .*go on from the last state"):
        list(batches)
    assert psutil.wait_procs(processes, timeout=10)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("address", ["unix", "tcp"])
@pytest.mark.parametrize("beside", [[], ["headway-master"]], ids=["alone", "with its master"])
def test_a_killed_supervisor_is_started_again_and_no_batch_is_lost_or_comes_twice(beside, address):
    tcp = {"host": "127.0.0.1", "port": free_port(), "token": "a secret"} if address == "tcp" else {}
    with Fleet(Drawn(600), num_workers=2, **tcp) as fleet:
        batches, kills = iter(fleet.batches(4)), []
        got = [next(batches)["y"].tolist() for _ in range(10)]
        for _ in range(3):
            kills.append(psutil.Process(fleet._keeper.supervisor))
            victims = [kills[-1], *(process for name, process in children(fleet).items() if name in beside)]
            for victim in victims:
                victim.kill()
            wait_for(lambda: fleet._keeper.supervisor != kills[-1].pid)
            got += [next(batches)["y"].tolist() for _ in range(40)]
        got += [batch["y"].tolist() for batch in batches]

    assert got == np.arange(600).reshape(150, 4).tolist()
    assert len({process.pid for process in kills}) == 3


def kill_until_given_up(keeper, victims):
    """Kill each master or supervisor as soon as it runs, until the fleet has ended."""
    while True:
        supervisor = keeper.supervisor
        if keeper.failure:
            return  # looked at last: so what was read before is not the process that says why
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(supervisor)
            if victims == "supervisors":
                process.kill()
                wait_for(lambda killed=supervisor: keeper.supervisor != killed)  # its id may be another process's then
            for child in process.children():
                if child.name() == "headway-master":
                    child.kill()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["unix", "tcp"])
@pytest.mark.parametrize("victims", ["masters", "supervisors"])
def test_a_fleet_whose_processes_are_killed_as_soon_as_they_run_says_so_to_all_and_leaves_nothing(victims, address):
    tcp = {"host": "127.0.0.1", "port": free_port(), "token": "a secret"} if address == "tcp" else {}
    before = set(psutil.Process().children(recursive=True))
    with Fleet(Drawn(20_000), num_workers=1, patience_s=60.0, **tcp) as fleet:
        settings, work = fleet.settings, FleetPass(20_000, 4, world_size=2)
        batches, elsewhere = iter(fleet.batches(4)), FleetReader(fleet.address, work, 1, token=fleet.settings.token)
        next(batches), next(elsewhere)
        kill_until_given_up(fleet._keeper, victims)
        why = rf"5 {victims} of the fleet in a row ended .*last with signal 9 \(SIGKILL\).*start the fleet again"
        for loop in (batches, batches, elsewhere, fleet.batches(4)):
            with pytest.raises(BackgroundError, match=why):
                list(loop)
        with pytest.raises(BackgroundError, match=why):
            fleet.statistics()
        with pytest.raises(BackgroundError, match=why):
            work_for(fleet.address, Drawn(20_000), token=settings.token, patience_s=60.0, host=settings.host)
        with contextlib.closing(dial(fleet.address, settings.token, 5.0, FromMaster)) as caller:
            caller.send(StatusRequest())
            refused, _ = caller.receive(timeout_s=5.0)
            assert refused.kind == "BackgroundError"

    assert set(psutil.Process().children(recursive=True)) <= before
    with pytest.raises(ChannelClosed, match="nobody listens"):
        dial(fleet.address, settings.token, 0.0, FromMaster)


@pytest.mark.slow
def test_a_master_that_cannot_start_is_one_error_that_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.data.fleet.supervisor.TAKEN_S", 0.1)
    (tmp_path / "master.json").write_text("not a checkpoint")
    with Fleet(Drawn(40), num_workers=1, folder=tmp_path) as fleet, pytest.raises(BackgroundError) as raised:
        list(fleet.batches(4))
    assert "last with exit code 1 (FormatError: " in str(raised.value)

    with contextlib.closing(TcpListener("127.0.0.1", 0, "of another", types=StatusRequest)) as taken:
        tcp = {"host": "127.0.0.1", "port": taken.port, "token": "a secret"}
        with Fleet(Drawn(40), num_workers=1, **tcp) as fleet, pytest.raises(BackgroundError, match="already in use"):
            list(fleet.batches(4))


def test_a_supervisor_that_fails_or_cannot_be_started_again_is_one_error_that_says_why(monkeypatch):
    def refused(*_, **__):
        raise OSError(24, "Too many open files")

    tcp = {"host": "127.0.0.1", "port": free_port(), "token": "a secret"}
    with monkeypatch.context() as patches:
        patches.setattr(os, "pidfd_open", refused)
        with Fleet(Drawn(40), num_workers=1, **tcp) as fleet, pytest.raises(BackgroundError, match="supervisor failed"):
            list(fleet.batches(4))
    with Fleet(Drawn(8000), num_workers=1) as fleet:
        batches = iter(fleet.batches(4))
        next(batches)
        monkeypatch.setattr("headway.data.fleet.supervisor.start", refused)
        psutil.Process(fleet._keeper.supervisor).kill()
        with pytest.raises(BackgroundError, match=r"SIGKILL.*another one cannot be started .*Too many open files"):
            list(batches)


def test_a_fleet_lives_as_long_as_its_process_and_not_the_thread_that_made_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(Fleet(Drawn(20), num_workers=1)))
    thread.start()
    thread.join()
    with made[0] as fleet:
        assert sum(len(batch["y"]) for batch in fleet.batches(4)) == 20


def test_a_second_reader_of_a_rank_puts_the_first_out(tmp_path):
    settings = FleetSettings(tmp_path, 100)
    pid, channel = start(lambda keys: {"items": np.array(keys.items)}, settings)
    work = FleetPass(100, 2)
    first = FleetReader(settings.address, work)
    next(first)
    second = FleetReader(settings.address, work, taken=None)

    assert unpack(next(second).body)["items"].tolist() == work.keys(second.taken - 1, 0).items
    with pytest.raises(InputError, match="another process reads this rank now"):
        list(first)
    second.close()
    channel.close()
    os.waitpid(pid, 0)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Fleet(Drawn(4), num_workers=0), r"num_workers is 0; pass 1 or more, or 'auto'"),
    (lambda: Fleet(iter([1])), r"cannot be indexed.*Pass a Pipeline or a map-style dataset"),
    (lambda: Fleet(Endless()), r"Endless has no length or cannot be indexed"),
    (lambda: Fleet(Drawn(4), num_workers=1, host="here"), r"needs a port and a token"),
    (lambda: FleetLoader(Fleet.__new__(Fleet), 1, True, num_workers=2), r"num_workers is not for a fleet's batches"),
])  # fmt: skip
def test_bad_input_is_told_with_rule_and_fix(make, message):
    with pytest.raises(InputError, match=message):
        make()
