"""What tests of pipelines run on each rank, and the oracles: the same training in one process, written out."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

WIDTH = 6
M = 4

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def chain(seed: int = 3) -> nn.Sequential:
    """Return four stages of unequal widths: LayerNorm, Conv, BatchNorm, a plain end."""
    torch.manual_seed(seed)
    stages = [
        nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Tanh()),
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3, padding=1), nn.Flatten()),
        nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 5), nn.Tanh()),
        nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2)),
    ]
    return nn.Sequential(*stages).double()


def batches(steps: int, m: int = M) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the same seeded batches everywhere: 3 examples a micro-batch."""
    data = torch.Generator().manual_seed(7)
    return [
        (torch.randn(3 * m, WIDTH, generator=data).double(), torch.randn(3 * m, 2, generator=data).double())
        for _ in range(steps)
    ]


def plain(state: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return a state as lists, which travel between processes."""
    return {name: value.tolist() for name, value in state.items()}


def trained(
    name: str, optimizer: str, steps: int, options: dict[str, Any], flushes: tuple[int, ...] = ()
) -> tuple[dict[str, Any], list[dict[int, float]], int]:
    """Train the chain under a schedule; return this rank's state, its losses, and the versions that it held."""
    from headway.parallel import pipeline

    torch.set_num_threads(1)
    m = options.get("num_microbatches", M)
    settings = {"num_microbatches": m, "timeout_s": 20, **options}
    runner = pipeline(
        chain(), torch.zeros(3, WIDTH).double(), loss=functional.mse_loss, optimizer=OPTIMIZERS[optimizer],
        schedule=name, **settings,
    )  # fmt: skip
    losses = []
    for step, (x, y) in enumerate(batches(steps, m)):
        losses.append({key: value.item() for key, value in runner.step(x, y).items()})
        if step in flushes:
            runner.flush()
    return plain(runner.state_dict()), losses, runner.live_versions


def trained_often(name: str, cases: list[tuple[int, int]]) -> list[tuple[dict[str, Any], int]]:
    """Train anew for each (micro-batches, steps); return this rank's states and versions."""
    found = [trained(name, "sgd", steps, {"num_microbatches": m}) for m, steps in cases]
    return [(state, versions) for state, _, versions in found]


class Join(nn.Module):
    """The last stage of a graph: it adds up what its branches make."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2))

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.out(sum(parts[1:], parts[0]))


GRAPHS: dict[str, tuple[tuple[int, ...], ...]] = {
    "diamond": ((), (0,), (0,), (1, 2)),
    "three branches": ((), (), (), (0, 1, 2)),
    "skip": ((), (0,), (0, 1), (0, 2)),
}


def graph_model(name: str) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Return the stages of a graph, which all pass 5 values on."""
    torch.manual_seed(5)
    preds = GRAPHS[name]
    modules: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh()) if not before else Mixed(len(before)) for before in preds[:-1]
    ]
    return list(zip([one.double() for one in [*modules, Join(5)]], preds, strict=True))


class Mixed(nn.Module):
    """A stage in the middle."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.Linear(5 * count, 5)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return torch.tanh(self.inner(torch.cat(parts, 1)))


def trained_graph(name: str, schedule: str, steps: int) -> tuple[dict[str, Any], int]:
    """Train a graph of stages; return this rank's state."""
    from headway.parallel import pipeline

    torch.set_num_threads(1)
    runner = pipeline(
        graph_model(name), torch.zeros(3, WIDTH).double(), loss=functional.mse_loss, optimizer=OPTIMIZERS["sgd"],
        num_microbatches=M, schedule=schedule, timeout_s=20,
    )  # fmt: skip
    for x, y in batches(steps):
        runner.step((x, 2 * x, 3 * x) if name == "three branches" else x, y)
    return plain(runner.state_dict()), runner.live_versions


def synchronous_graph(name: str, steps: int) -> dict[str, torch.Tensor]:
    """Return the state of the whole graph after mean gradients over micro-batches."""
    stages = graph_model(name)
    model = nn.ModuleList(module for module, _ in stages)
    made = OPTIMIZERS["sgd"](list(model.parameters()))
    for x, y in batches(steps):
        made.zero_grad()
        for some, target in zip(x.chunk(M), y.chunk(M), strict=True):
            values: list[torch.Tensor] = []
            for stage, (module, before) in enumerate(stages):
                scale = stage + 1 if name == "three branches" else 1
                values.append(module(*[values[at] for at in before] or [scale * some]))
            (functional.mse_loss(values[-1], target) / M).backward()
        made.step()
    return model.state_dict()


def merged(answers: list[Any]) -> dict[str, torch.Tensor]:
    """Return the states of all ranks as one."""
    return {name: torch.tensor(value, dtype=torch.float64) for state, *_ in answers for name, value in state.items()}


def synchronous(optimizer: str, steps: int, m: int = M) -> dict[str, torch.Tensor]:
    """Return the state of the whole model after mean gradients over micro-batches."""
    model = chain()
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    for x, y in batches(steps, m):
        made.zero_grad()
        for some, target in zip(x.chunk(m), y.chunk(m), strict=True):
            (functional.mse_loss(model(some), target) / m).backward()
        made.step()
    return model.state_dict()


def stale(
    optimizer: str, steps: int, reads: Callable[[int, int], int], every: int, m: int = M, stages: int = 4
) -> dict[str, torch.Tensor]:
    """Return the state after training on old weights: stage s reads version `reads(s, micro-batch)` of its weights.

    After `every` micro-batches each stage makes its next version, with the mean gradient.
    """
    model = chain()
    bounds = [len(model) * stage // stages for stage in range(stages + 1)]
    parts = [model[low:high] for low, high in itertools.pairwise(bounds)]
    made = [OPTIMIZERS[optimizer](list(part.parameters())) for part in parts]
    history = [[copied(part)] for part in parts]
    microbatches = [pair for x, y in batches(steps, m) for pair in zip(x.chunk(m), y.chunk(m), strict=True)]
    for number, (x, y) in enumerate(microbatches):
        read = [history[s][max(0, reads(s, number))] for s in range(stages)]
        for part, weights in zip(parts, read, strict=True):
            x = torch.func.functional_call(part, weights, (x,))
        wanted = [value for weights in read for value in weights.values()]
        found = torch.autograd.grad(functional.mse_loss(x, y) / every, wanted)
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if (number + 1) % every == 0:
            for part, step, past in zip(parts, made, history, strict=True):
                step.step()
                past.append(copied(part))
            model.zero_grad()
    return model.state_dict()


def copied(part: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters, as leaves."""
    return {name: value.detach().clone().requires_grad_() for name, value in part.named_parameters()}


def saved_and_resumed(
    root: str, schedule: str, steps: int, saves_at: int | None, before: int = 0
) -> tuple[dict[str, Any], int | None]:
    """Restore what is there, train from batch `before` on, save after `saves_at` steps; return this rank's state."""
    import headway
    from headway.parallel import pipeline

    torch.set_num_threads(1)
    runner = pipeline(
        chain(), torch.zeros(3, WIDTH).double(), loss=functional.mse_loss, optimizer=OPTIMIZERS["adam"],
        num_microbatches=M, schedule=schedule, timeout_s=20,
    )  # fmt: skip
    with headway.Checkpointer(root, model=runner, optimizer=runner.optimizer) as checkpointer:
        step = checkpointer.restore().step
        for number, (x, y) in enumerate(batches(steps)[before:], start=before + 1):
            runner.step(x, y)
            if number == saves_at:
                checkpointer.save(number, block="durable")
    return plain(runner.state_dict()), step


class Ragged(nn.Module):
    """A stage whose output has another shape for every micro-batch but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        self.calls += 1
        return self.linear(x)[: 3 if self.calls == 1 else 2]


def refused(case: str) -> str:
    """Make, or train, what cannot be; return what is said of it on this rank."""
    from headway.core.errors import HeadwayError
    from headway.parallel import pipeline

    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model: Any = nn.Sequential(first, second)
    options: dict[str, Any] = {"num_microbatches": M, "optimizer": OPTIMIZERS["sgd"], "schedule": "1f1b"}
    x, y = torch.zeros(3 * M, WIDTH), torch.zeros(3 * M, WIDTH)
    if case == "few":
        options |= {"schedule": "two_buffer", "num_microbatches": 1}
    elif case == "optimizer":
        options |= {"schedule": "async_1f1b", "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    elif case == "other parameters":
        options["optimizer"] = lambda _: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    elif case == "in place":
        options |= {"schedule": "async_1f1b"}
    elif case == "sinks":
        model = [(first, ()), (second, ())]
    elif case == "tied":
        second.weight = first.weight
    elif case == "tied and traced":
        model, options["schedule"] = Tied(), "two_buffer"
        x = torch.zeros(3 * M, 2, dtype=torch.long)
    elif case == "ragged":
        model, y = nn.Sequential(Ragged(), nn.Linear(4, WIDTH)), y
    elif case == "uneven":
        x, y = x[:-1], y[:-1]
    elif case == "listed":
        model = nn.Sequential(Listed(), second)
        options["schedule"] = "async_1f1b"
    elif case == "name":
        options["schedule"] = "two_bufer"
    elif case == "modules":
        model = nn.Sequential(nn.Sequential(first, second))
    elif case == "no input":
        x = None
    try:
        runner = pipeline(model, x[:3] if x is not None else y[:3], loss=functional.mse_loss, timeout_s=2, **options)
        runner.step(x, y)
        if case == "in place":
            with torch.no_grad():
                first.weight.add_(1)
            runner.step(x, y)
    except HeadwayError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Listed(nn.Module):
    """Reads its weights past its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.listed = [self.inner.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return x @ self.listed[0]


class Tied(nn.Module):
    """An embedding that is the output layer too, with blocks in between."""

    def __init__(self, vocabulary: int = 8, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


def trained_tied(steps: int) -> dict[str, Any]:
    """Train a traced model whose embedding is tied over the stages; return this rank's state."""
    from headway.parallel import pipeline

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Tied().double()
    runner = pipeline(
        model, torch.zeros(2, 5, dtype=torch.long), loss=tied_loss, optimizer=OPTIMIZERS["adam"], num_microbatches=M,
        schedule="1f1b", timeout_s=20,
    )  # fmt: skip
    for ids in tied_batches(steps):
        runner.step(ids, ids)
    return plain(runner.state_dict())


def tied_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next token."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def tied_batches(steps: int) -> list[torch.Tensor]:
    """Return token ids [2 M, 5]."""
    data = torch.Generator().manual_seed(7)
    return [torch.randint(0, 8, (2 * M, 5), generator=data) for _ in range(steps)]


def synchronous_tied(steps: int) -> dict[str, torch.Tensor]:
    """Return the state of the whole model, whose names of one parameter are one."""
    torch.manual_seed(1)
    model = Tied().double()
    made = OPTIMIZERS["adam"](list(model.parameters()))
    for ids in tied_batches(steps):
        made.zero_grad()
        for some in ids.chunk(M):
            (tied_loss(model(some), some) / M).backward()
        made.step()
    return model.state_dict()


def with_a_peer_that(ends: str) -> None:
    """Train on two ranks, of which the second dies, or stalls, in its second step."""
    import os
    import time

    from headway.parallel import pipeline

    runner = pipeline(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)).double(), torch.zeros(3, WIDTH).double(),
        loss=functional.mse_loss, optimizer=OPTIMIZERS["sgd"], num_microbatches=M, timeout_s=2,
    )  # fmt: skip
    (x, y), _ = batches(2)
    runner.step(x, y)
    if torch.distributed.get_rank() == 1:
        if ends == "dies":
            os._exit(9)
        time.sleep(4)
        return
    runner.step(x, y)
