"""Steps of one kind of job, without and with recording by turns in one process; prints what each step cost.

`python cost_kinds.py KIND,KIND TURNS` prints {"kind": KIND, "rows": [[CPU, wall, CPU, wall], ...], "losses": 1} for
each: microseconds of the training thread per step, plain and recorded, the lowest quartile of chunks of steps; how many
losses they ended with. With the words `cuda SECONDS` behind it, plain loops, DDP and FSDP2 train a larger model on a
CUDA device, on NCCL, whose chunks end when the device is done, and turns go on for so long.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from headway.runtime.in_rank import bootstrap

WARM, CHUNKS, CHUNK = 160, 8, 8
"""Steps before the first chunk: a recording forks children that rehearse, and pages are copied behind each."""

STEPS = WARM + CHUNKS * CHUNK + 1
PLACE = sys.argv[3] if len(sys.argv) > 3 else "cpu"
ON_DEVICE = PLACE != "cpu"
WIDTH, LAYERS = (1024, 16) if ON_DEVICE else (64, 4)
"""Of a small model; on a device its launches take some milliseconds a step."""


class Marks:
    """CPU and wall time of chunks of steps."""

    def __init__(self):
        self.cpu, self.wall, self.step, self.last = [], [], 0, (0, 0)

    def stepped(self):
        self.step += 1
        if self.step >= WARM and not (self.step - WARM) % CHUNK:
            if ON_DEVICE:
                torch.cuda.synchronize()
            now = time.thread_time_ns(), time.perf_counter_ns()
            if self.step > WARM:
                self.cpu.append((now[0] - self.last[0]) / CHUNK / 1000)
                self.wall.append((now[1] - self.last[1]) / CHUNK / 1000)
            self.last = now


def layers(count=LAYERS, width=WIDTH):
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(count)]
    )
    return model.to(PLACE) if ON_DEVICE else model


def data(width=WIDTH):
    return TensorDataset(torch.randn(STEPS * 8, width, generator=torch.Generator().manual_seed(1)))


def loop(model, marks, loader=None, width=WIDTH):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for (x,) in loader or DataLoader(data(width), batch_size=8):
        if ON_DEVICE:
            x = x.to(PLACE)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.stepped()
    return loss.item()


def plain(marks):
    return loop(layers(), marks)


def large(marks):
    return loop(layers(8, 512), marks, width=512)


def workers(marks):
    return loop(layers(), marks, DataLoader(data(), batch_size=8, num_workers=1))


def compiled(marks):
    return loop(torch.compile(layers(8, 512), mode="reduce-overhead"), marks, width=512)


def ddp(marks):
    return loop(torch.nn.parallel.DistributedDataParallel(layers(), [0] if ON_DEVICE else None), marks)


def fsdp2(marks):
    from torch.distributed.fsdp import fully_shard

    model = layers(max(LAYERS, 8))
    for layer in model:
        fully_shard(layer)
    return loop(fully_shard(model), marks)


def hf_trainer(marks):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Step(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            marks.stepped()

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=2))
    text = [{"input_ids": row, "labels": row} for row in torch.arange(STEPS * 8 * 32).remainder(61).view(-1, 32)]
    with contextlib.redirect_stdout(sys.stderr):
        arguments = TrainingArguments(
            output_dir=os.environ["JOB_OUT"], per_device_train_batch_size=8, max_steps=STEPS, logging_steps=10,
            save_strategy="no", report_to=[], use_cpu=True, seed=0, disable_tqdm=True,
        )  # fmt: skip
        return Trainer(model=model, args=arguments, train_dataset=text, callbacks=[Step()]).train().training_loss


def lightning(marks):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = layers()

        def training_step(self, batch, _):
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.001)

    class Step(lightning.Callback):
        def on_train_batch_end(self, *_):
            marks.stepped()

    trainer = lightning.Trainer(
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, callbacks=[Step()],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data(), batch_size=8))
    return float(trainer.callback_metrics["loss"])


KINDS = {
    "plain": plain, "large": large, "workers": workers, "compiled": compiled, "ddp": ddp, "fsdp2": fsdp2,
    "hf_trainer": hf_trainer, "lightning": lightning,
}  # fmt: skip


def stretch(kind):
    torch.manual_seed(0)
    marks = Marks()
    loss = KINDS[kind](marks)
    return statistics.quantiles(marks.cpu, n=4)[0], statistics.quantiles(marks.wall, n=4)[0], float(loss).hex()


def recorded(kind):
    os.environ |= {"HEADWAY_RUN": tempfile.mkdtemp(dir=os.environ["JOB_OUT"]), "HEADWAY_WINDOWS": "0"}
    session = bootstrap.start_here(os.environ)
    try:
        return stretch(kind)
    finally:
        session.stop()


def turns(kind, count, limit_s):
    """Take `count` turns and those that start within `limit_s`, a warm one before them; returns what they cost."""
    rows, losses, turn, begin = [], set(), 0, time.monotonic()
    while turn <= count or time.monotonic() - begin < limit_s:
        sides = (stretch, recorded) if turn % 2 else (recorded, stretch)
        found = {side: side(kind) for side in sides}
        losses |= {found[side][2] for side in sides}
        if turn:
            rows.append([*found[stretch][:2], *found[recorded][:2]])
        turn += 1
    return {"kind": kind, "rows": rows, "losses": len(losses)}


def main():
    kinds, count, limit_s = sys.argv[1].split(","), int(sys.argv[2]), float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    torch.set_num_threads(1)
    os.environ.setdefault("JOB_OUT", tempfile.mkdtemp())
    if not {"ddp", "fsdp2"}.isdisjoint(kinds):
        if ON_DEVICE:
            torch.cuda.set_device(0)
        store = f"file://{os.environ['JOB_OUT']}/store"
        dist.init_process_group("nccl" if ON_DEVICE else "gloo", init_method=store, rank=0, world_size=1)
    for kind in kinds:
        print(json.dumps(turns(kind, count, limit_s)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
