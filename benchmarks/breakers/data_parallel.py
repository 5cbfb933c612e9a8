"""Models of two ranks, under DistributedDataParallel and fully_shard, that a careless remedy would train otherwise.

The model is a variable of the module, and so lives until the interpreter ends. Where the end of a function frees the
last model of a group that was left, torch joins the group's threads under the interpreter's lock, which they may need.

Ranks: 2
"""

import torch
from _training import ROWS, chosen, finish, join
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def small():
    """Return 8 inputs to 4 outputs."""
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def begin():
    join()
    torch.manual_seed(0)


def inputs_of(step):
    """Return [7 or 8, 8]: what this rank trains on in a step."""
    return ROWS[8 * step + dist.get_rank() : 8 * step + 8]


def train(model, optimizer, num_steps, *, target=1, asked=lambda step: (), after=lambda step, loss: loss):
    """Train and return the last loss; `asked(step)` are further arguments of the model."""
    for step in range(num_steps):
        loss = (model(inputs_of(step), *asked(step)) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = after(step, loss)
    return loss


def end(model, loss, *more):
    """Print the digits, and leave the group."""
    finish(model, loss.item(), *more)
    dist.destroy_process_group()


def ddp_accumulates():
    """Gradients are accumulated in no_sync(), with hooks on parameters, and clipped.

    Remedies: cluster.noise comm.bucket comm.gradient_view comm.static_graph
    """
    global model
    begin()
    net = small()
    net[0].weight.register_hook(lambda gradient: gradient * 1.1)
    norms = []
    net[2].weight.register_post_accumulate_grad_hook(lambda value: norms.append(value.grad.norm().item()))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(16):
        if step % 3:
            with model.no_sync():
                (model(inputs_of(step)) - 1).pow(2).mean().backward()
            continue
        loss = (model(inputs_of(step)) - 1).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    end(model, loss, norms)


def ddp_frozen_midway():
    """Layers are frozen after some steps and DDP is constructed anew round the same module.

    Remedies: comm.bucket comm.gradient_view comm.static_graph
    """
    global model
    begin()
    net = small()
    for phase in range(3):
        net[0].requires_grad_(phase != 1)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD([value for value in net.parameters() if value.requires_grad], 0.1)
        loss = train(model, optimizer, 6)
    end(net, loss)


def ddp_gradients_replaced():
    """Gradients are replaced by clones, by None and by views of a flat buffer of the script's own.

    Remedies: comm.bucket comm.gradient_view
    """
    global model
    begin()
    model = DistributedDataParallel(small())
    values = list(model.parameters())
    flat = torch.zeros(sum(value.numel() for value in values))
    optimizer = torch.optim.SGD(values, 0.1, momentum=0.9)
    for step in range(12):
        loss = (model(inputs_of(step)) - 1).pow(2).mean()
        loss.backward()
        place = 0
        for value in values:
            part = flat[place : place + value.numel()].view_as(value)
            place += value.numel()
            value.grad = part.copy_(value.grad) if step % 3 == 0 else value.grad.clone()
        optimizer.step()
        if step % 2:
            flat.mul_(0.5)
        else:
            optimizer.zero_grad(set_to_none=step % 4 == 0)
    end(model, loss)


def quantised(state, bucket):
    state[0] += 1
    buffer = bucket.buffer()
    scale = buffer.abs().max().clamp(min=1e-9) / 7
    rounded = (buffer / scale).round() * scale / dist.get_world_size()
    return dist.all_reduce(rounded, async_op=True).get_future().then(lambda done: done.value()[0])


def ddp_hook_per_bucket():
    """A communication hook quantises each bucket by its own largest entry, and counts.

    Remedies: comm.bucket comm.gradient_view
    """
    global model
    begin()
    calls = [0]
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 60_000), nn.Tanh(), nn.Linear(60_000, 4)
    model = DistributedDataParallel(nn.Sequential(*layers))
    model.register_comm_hook(calls, quantised)
    end(model, train(model, torch.optim.SGD(model.parameters(), 1e-5), 12), calls)


class Reporting(DistributedDataParallel):
    def __init__(self, net, scale):
        super().__init__(net, bucket_cap_mb=3)
        self.scale = scale * self.bucket_bytes_cap / (1 << 20) + self.gradient_as_bucket_view + self.static_graph


def ddp_settings_read():
    """A subclass of DDP reads the settings that it was constructed with.

    Remedies: comm.bucket comm.gradient_view comm.static_graph
    """
    global model
    begin()
    model = Reporting(small(), 0.5)
    end(model, train(model, torch.optim.SGD(model.parameters(), 0.1), 12, target=model.scale))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, inputs, which):
        return self.head(self.branches[which](inputs).tanh())


def ddp_unused_parameters():
    """Which branch of the model runs changes from step to step.

    Remedies: comm.bucket comm.gradient_view comm.static_graph
    """
    global model
    begin()
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    end(model, train(model, optimizer, 18, asked=lambda step: (0 if step < 6 else step % 3,)))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])


def sharded(model, num_steps, **options):
    """Shard a model and its layers, train it and print its digits."""
    for part in (*model.layers, model):
        fully_shard(part, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    loss = train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), num_steps, **options)
    end(nn.ParameterList([value.full_tensor() for value in model.parameters()]), loss)


class Editing(Layers):
    def forward(self, inputs):
        for place, layer in enumerate(self.layers):
            inputs = layer(inputs).tanh()
            if place < 3:
                with torch.no_grad():
                    self.layers[place + 1].weight.mul_(0.99)
        return inputs


def fsdp_edited_in_forward():
    """A layer's forward edits the parameters of the next layer before that one runs.

    Remedies: comm.order
    """
    global model
    begin()
    model = Editing()
    sharded(model, 12)


class Skipping(Layers):
    def forward(self, inputs, skipped):
        for place, layer in enumerate(self.layers):
            if place != skipped:
                inputs = layer(inputs).tanh()
        return inputs


def fsdp_layers_skipped():
    """Layers of a sharded model are skipped by the step, and evaluated in between.

    Remedies: comm.order
    """

    def evaluated(step, loss):
        with torch.no_grad():
            return loss + model(ROWS[:4], (step + 1) % 5).sum()

    global model
    begin()
    model = Skipping()
    sharded(model, 16, asked=lambda step: (-1 if step < 4 else step % 5,), after=evaluated)


if __name__ == "__main__":
    chosen(globals())
