"""A rank of two replicas of a two-stage pipeline under torchft: `torchft_pipeline.py FOLDER PLAN`; `rerouted.py`'s job.

PLAN is JSON: "steps", and "kill": [replica, rank, step, milliseconds into it]. The environment says who this is:
REPLICA_GROUP_ID, RANK in the replica, MASTER_ADDR and MASTER_PORT of the replica's store, TORCHFT_LIGHTHOUSE. Stages
pass activations and gradients by gloo, replicas sum gradients through torchft's manager. A rank of the last stage
appends [step, seconds, replicas that took part] to FOLDER/torchft-<replica>.
"""

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rerouted import BATCH, MICROBATCHES, WIDTH, model
from torch import nn
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

REPLICAS = 2


def run_stage(stage, rank, inputs, targets):
    """Compute the gradients of a step: all forwards, then all backwards."""
    if rank == 0:
        outputs = [stage(x) for x in inputs]
        for output in outputs:
            dist.send(output.detach(), 1)
        for output in outputs:
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
        return
    received = [torch.empty(len(x), 16) for x in inputs]
    for x in received:
        dist.recv(x, 0)
        x.requires_grad_()
    for x, y in zip(received, targets, strict=True):
        (nn.functional.mse_loss(stage(x), y) / len(received)).backward()
        dist.send(x.grad, 0)


def kill_in(milliseconds):
    """Kill this process so long from now."""
    time.sleep(milliseconds / 1000)
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    """Train."""
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, replica = int(os.environ["RANK"]), int(os.environ["REPLICA_GROUP_ID"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    stage = model(2)[rank]
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1, rank=rank, world_size=2,
        replica_id=f"replica_{replica}", timeout=timedelta(seconds=10),
        load_state_dict=lambda state: (stage.load_state_dict(state["m"]), optimizer.load_state_dict(state["o"])),
        state_dict=lambda: {"m": stage.state_dict(), "o": optimizer.state_dict()},
    )  # fmt: skip
    (folder / f"ready-{replica}-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < 2 * REPLICAS:  # a quorum does not wait for who has not joined yet
        time.sleep(0.01)
    data = torch.Generator().manual_seed(7)
    share = BATCH // REPLICAS
    for step in range(plan["steps"]):
        x, y = torch.randn(BATCH, WIDTH, generator=data), torch.randn(BATCH, 2, generator=data)
        x, y = (rows[replica * share : (replica + 1) * share] for rows in (x, y))
        if plan["kill"] and plan["kill"][:3] == [replica, rank, step]:
            threading.Thread(target=kill_in, args=(plan["kill"][3],), daemon=True).start()
        start = time.perf_counter()
        manager.start_quorum()
        optimizer.zero_grad()
        run_stage(stage, rank, x.chunk(MICROBATCHES // REPLICAS), y.chunk(MICROBATCHES // REPLICAS))
        flat = torch.cat([p.grad.flatten() for p in stage.parameters()])
        manager.allreduce(flat).wait()
        offset = 0
        for p in stage.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        committed = manager.should_commit()
        if committed:
            optimizer.step()
        if rank == 1:
            row = [step, time.perf_counter() - start, manager.num_participants() if committed else 0]
            with open(folder / f"torchft-{replica}", "ab", buffering=0) as log:
                log.write(json.dumps(row).encode() + b"\n")
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main()
