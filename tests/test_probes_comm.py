"""Communication probes on two real ranks: matched by group and number, and never changing a result."""

import json
import subprocess
import sys

import pytest

from headway.trace.events.vocabulary import COLLECTIVES
from tests.recorded import FSDP2, rows, run_script

TRAIN = """
    import contextlib, os, time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=os.environ["STORE"])
    rank = dist.get_rank()
    for options, num_micro, late_s in CASES:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
        ddp = DistributedDataParallel(model, process_group=dist.new_group([0, 1]), **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(6):
            for micro in range(num_micro):
                x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step * 10 + rank))
                with ddp.no_sync() if micro < num_micro - 1 else contextlib.nullcontext():
                    loss = ddp(x).square().mean()
                    time.sleep(late_s * rank)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex())
    dist.destroy_process_group()
"""

CASES = {
    "plain": ({}, 1, 6),
    "static_graph": ({"static_graph": True}, 1, 5),
    "unused": ({"find_unused_parameters": True}, 1, 6),
    "accumulation": ({}, 2, 6),
}
"""Case -> arguments of DistributedDataParallel, backwards per step, steps of six whose wait is seen."""


@pytest.mark.slow
def test_ddp_gives_the_same_losses_and_one_exposed_wait_per_step_on_each_rank(tmp_path):
    source = TRAIN.replace("CASES", repr([(options, micro, 0) for options, micro, _ in CASES.values()]))
    recorded = run_script(source, tmp_path, ranks=2)
    plain = run_script(source, tmp_path, ranks=2, recorded=False)
    assert recorded == plain

    found = [rows(tmp_path / "run", rank=rank) for rank in (0, 1)]
    groups = list(dict.fromkeys(row["a"] for row in found[0]["comm.wait"]))
    assert len(groups) == len(CASES)
    for number, (group, (_, _, waits)) in enumerate(zip(groups, CASES.values(), strict=True)):
        for each in found:
            seen = [row for row in each["comm.wait"] if row["a"] == group]
            assert [row["b"] for row in seen] == list(range(6 - waits, 6))
            steps = each["optimizer.step"][6 * number + 6 - waits : 6 * number + 6]
            ends = [row["start_ns"] + row["duration_ns"] for row in seen]
            assert all(end <= step["start_ns"] for end, step in zip(ends, steps, strict=True))
            assert all(row["c"] == 3 * (32 * 32 + 32) * 4 for row in seen)


@pytest.mark.slow
def test_the_exposed_wait_ends_after_ddps_own_finaliser(tmp_path):
    """A slow peer: the wait of the fast rank is as long as the peer is late, and the late one's is not."""
    run_script(TRAIN.replace("CASES", "[({}, 1, 0.05)]"), tmp_path, ranks=2)
    waits = [[row["duration_ns"] for row in rows(tmp_path / "run", rank=rank)["comm.wait"]] for rank in (0, 1)]

    assert sorted(waits[0])[3] >= 30_000_000
    assert sorted(waits[1])[3] < sorted(waits[0])[3] / 2


@pytest.mark.slow
def test_every_kind_of_call_is_recorded_once_with_group_number_and_size(tmp_path):
    run_script(
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo", init_method=os.environ["STORE"])
        rank, tensor = dist.get_rank(), torch.ones(256)
        dist.all_reduce(tensor)
        dist.all_gather([torch.ones(256), torch.ones(256)], tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        assert [o["rank"] for o in objects] == [0, 1]
        pair = dist.new_group([0, 1])
        dist.all_reduce(tensor, group=pair)
        if rank == 0:
            dist.send(tensor, 1)
            dist.isend(tensor, 1).wait()
        else:
            dist.recv(tensor, 0)
            assert dist.recv(tensor) == 0
        dist.destroy_process_group()
        """,
        tmp_path,
        ranks=2,
    )
    found = [rows(tmp_path / "run", rank=rank) for rank in (0, 1)]
    calls = [
        [(COLLECTIVES[row["d"]], row["a"], row["b"], row["c"]) for row in each["comm.collective"]] for each in found
    ]

    assert calls[0] == calls[1]
    assert calls[0] == [
        ("all_reduce", 0, 0, 1024), ("all_gather", 0, 1, 2048), ("broadcast", 0, 2, 1024), ("barrier", 0, 3, 0),
        ("all_reduce", 0, 4, 1024), ("all_gather_object", 0, 5, 0), ("all_reduce", calls[0][-1][1], 0, 1024),
    ]  # fmt: skip
    assert [(row["b"], row["c"], row["d"]) for row in found[0]["comm.send"]] == [(0, 1024, 1), (1, 1024, 1)]
    assert [(row["b"], row["c"], row["d"]) for row in found[1]["comm.recv"]] == [(0, 1024, 0), (1, 1024, 0)]
    groups = json.loads((tmp_path / "run" / "tables" / "r1.json").read_text())["groups"]
    assert groups["0"]["ranks"] == [0, 1]
    assert len(found[0]["comm.init"]) == 2


@pytest.mark.slow
def test_lines_that_call_collectives_are_noted_with_where_in_a_step_they_stand(tmp_path):
    run_script(
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo", init_method=os.environ["STORE"])
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        dist.barrier()
        for step in range(5):
            loss = model(torch.ones(2, 4)).sum()
            dist.all_reduce(loss.detach().clone())
            loss.backward()
            for p in model.parameters(): dist.all_reduce(p.grad.norm())
            optimizer.step()
            dist.barrier()
            dist.all_gather_object([None, None], step)
        dist.destroy_process_group()
        """,
        tmp_path,
        ranks=2,
    )
    lines = json.loads((tmp_path / "run" / "tables" / "r1.json").read_text())["collectives"]
    calls = {(row["function"], row["gap"]): (row["count"], row["num_bytes"]) for row in lines}

    assert len({row["line"] for row in lines}) == 4
    assert calls == {  # those of the first step come before any update
        ("all_reduce", 0): (4, 16),
        ("all_reduce", 2): (8, 32),
        ("barrier", 1): (5, 0),
        ("all_gather_object", 1): (5, 0),
    }


@pytest.mark.slow
def test_fsdp2_gives_the_same_losses_and_its_waits_are_seen(tmp_path):
    recorded = run_script(FSDP2, tmp_path, ranks=2)
    plain = run_script(FSDP2, tmp_path, ranks=2, recorded=False)
    names = [COLLECTIVES[row["d"]] for row in rows(tmp_path / "run", rank=0)["comm.collective"]]

    assert recorded == plain
    assert "collectives" not in json.loads((tmp_path / "run" / "tables" / "r0.json").read_text())  # it calls none
    assert sum("all_gather" in name for name in names) >= 4 * 3
    assert sum("reduce_scatter" in name for name in names) >= 4 * 3


@pytest.mark.slow
def test_functions_that_a_script_imported_before_the_recording_or_in_it_make_operations_as_ever(tmp_path):
    """`P2POp` compares functions: those of before, of during and of after a recording are all `isend`."""
    code = f"""
import torch, torch.distributed as dist
from torch.distributed import P2POp, irecv, isend
import headway
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
made = [P2POp(op, torch.ones(1), 0) for op in (isend, irecv)]
with headway.run({str(tmp_path / "run")!r}):
    made += [P2POp(op, torch.ones(1), 0) for op in (isend, irecv, dist.isend, dist.irecv)]
    kept = dist.isend
made += [P2POp(op, torch.ones(1), 0) for op in (isend, kept, dist.irecv)]
try:
    P2POp(dist.send, torch.ones(1), 0)
except ValueError as cause:
    print(len(made), "Invalid" in str(cause))
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert done.stdout.split()[-2:] == ["9", "True"], done.stderr
