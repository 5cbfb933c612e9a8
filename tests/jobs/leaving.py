"""A job that counts on being stopped: after each start it restores, and it ends by itself after some steps.

leaving.py FOLDER STEPS [own|never|stuck|saving]   own: with a SIGTERM handler, which ends the loop; never: it never
                                        saves; stuck: its first step takes a minute; saving: a save of 32 MB begins at
                                        every step
"""

import hashlib
import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist

import headway

folder, steps = sys.argv[1], int(sys.argv[2])
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
stopped = []
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
if world > 1:
    dist.init_process_group("gloo")

torch.manual_seed(0), random.seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
if "saving" in sys.argv:
    model.register_buffer("large", torch.zeros(1 << 23))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
ckpt = headway.Checkpointer(f"{folder}/ckpt", model=model, optimizer=optimizer, schedule=schedule)
if "never" not in sys.argv:
    ckpt.attach(optimizer)
step = ckpt.restore().step or 0
if "never" not in sys.argv and not step:
    ckpt.save(0, block="durable")
open(f"{folder}/ready-{rank}", "w").close()
while step < steps and not stopped:
    loss = model(torch.rand(4, 8) + random.random() * rank).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if world > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    schedule.step()
    step += 1
    if "saving" in sys.argv:
        model.large.add_(1)
        ckpt.save(step)
    time.sleep(60 if "stuck" in sys.argv else 0.002)
state = [p.detach().numpy().tobytes() for p in model.state_dict().values()] + [
    repr(optimizer.param_groups[0]["lr"]).encode()
]
if step == steps:
    with open(f"{folder}/final-{rank}", "w") as file:
        file.write(hashlib.sha256(b"".join(state)).hexdigest())
elif stopped:
    with open(f"{folder}/own-{rank}", "w") as file:
        file.write(str(step))
ckpt.close()
