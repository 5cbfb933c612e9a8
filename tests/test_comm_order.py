"""'comm.order' on two ranks: FSDP2 gathers the next module ahead, and every loss stays the same bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.profiler import profile

from headway.catalog import REMEDIES
from headway.comm.torch_fsdp_order import order
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.runtime.in_rank.remedy import Applied, RefusedRemedy
from tests.recorded import FSDP2, run_script
from tests.remedy_context import applied
from tests.spawn import on_ranks
from tests.training import train

LAYERS = 4


def network() -> Any:
    """Return layers, each sharded, in a sharded whole; a forward leaves out `skip` of them, runs `twice` again."""
    import torch.distributed.fsdp as fsdp
    from torch.distributed.device_mesh import init_device_mesh

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(LAYERS)])
            self.head = torch.nn.Linear(32, 1)
            self.skip, self.twice = frozenset[int](), frozenset[int]()

        def forward(self, x: Any) -> Any:
            for at, layer in enumerate(self.layers):
                for _ in range(0 if at in self.skip else 2 if at in self.twice else 1):
                    x = torch.tanh(layer(x))
            return self.head(x)

    torch.manual_seed(0)
    model = Network()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=mesh)  # By its module, as a script that imports it after the remedy is in.
    fsdp.fully_shard(model, mesh=mesh)
    return model


def losses_of(model: Any, steps: int = 3) -> list[float]:
    """Train; return the losses, bit for bit."""
    seeds = [10 * step + dist.get_rank() for step in range(steps)]
    draws = (torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) for seed in seeds)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), draws)


def prefetches(model: Any) -> dict[str, int]:
    """Return how many modules one step gathers ahead in forward and in backward, by FSDP2's own marks."""
    with profile() as seen:
        losses_of(model, 1)
    names = [event.name for event in seen.events()]
    return {way: sum(f"FSDP::{way}_prefetch" in name for name in names) for way in ("forward", "backward")}


def both(job: Callable[[Any], Any], ahead: int = 1, counted: bool = False, early: bool = False) -> dict[str, Any]:
    """Return what `job` gives with the remedy and without it, the outcomes, and how much was gathered ahead."""
    plain = job(network())
    with applied(order, {"ahead": ahead, "early": early}) as context:
        model = network()
        mine = job(model)
        outcomes, gathered = list(context.outcomes), prefetches(model) if counted else {}
    after = prefetches(model) if counted else {}
    return {"plain": plain, "mine": mine, "outcomes": outcomes, "gathered": gathered, "after": after}


def out_of_order(model: Any) -> list[float]:
    """Leave the last layer out of a forward, with parameters that change before it runs again."""
    losses = losses_of(model, 2)
    model.skip = frozenset([LAYERS - 1])
    with torch.no_grad():
        losses.append(model(torch.ones(2, 32)).sum().item())
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.skip = frozenset()
    return losses + losses_of(model, 2)


def an_exception(model: Any) -> list[float]:
    """Fail in the middle of a forward, and go on."""
    losses = losses_of(model, 1)
    handle = model.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 32))
        handle.remove()
        model.layers[1](torch.ones(2, 32))
    return losses + losses_of(model, 2)


def twice(model: Any) -> list[float]:
    """Run a layer twice in a forward."""
    model.twice = frozenset([1])
    return losses_of(model)


def own_order(model: Any) -> list[float]:
    """Say an order in the script."""
    losses = losses_of(model, 1)
    model.set_modules_to_forward_prefetch([model.layers[1]])
    return losses + losses_of(model, 1)


def edited_within_forwards(model: Any) -> list[float]:
    """Change the parameters of a layer, from the third forward on, while the layer before it runs."""
    losses = losses_of(model, 2)

    def edit(module: Any, args: Any) -> None:
        with torch.no_grad():
            for parameter in model.layers[2].parameters():
                parameter.mul_(0.5)

    model.layers[1].register_forward_pre_hook(edit)
    return losses + losses_of(model, 2)


def recomputed(model: Any) -> list[float]:
    """Compute each layer again in backward."""
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.layers))
    return losses_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 2])
def test_modules_are_gathered_ahead_and_losses_stay_the_same(ahead: int) -> None:
    for found in on_ranks(both, 2, losses_of, ahead, True):
        assert found["mine"] == found["plain"]
        assert found["outcomes"][-1] == Applied("comm.order", {"ahead": ahead, "models": 1, "modules": LAYERS + 1})
        # The root is whole after its forward: of the chain behind it each layer is asked for by those before it.
        assert found["gathered"]["forward"] == sum(min(ahead, LAYERS - at) for at in range(LAYERS))
        assert found["after"]["forward"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (out_of_order, "its modules ran in another order later"),
        (an_exception, "its modules ran in another order later"),
        (twice, "ran 2 times in one forward: the modules are no chain"),
        (edited_within_forwards, "the script changes parameters while a forward runs"),
        (own_order, "the script sets its own order of prefetching"),
        (recomputed, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_no_chain_is_refused_and_results_stay_the_same(job: Callable[[Any], Any], reason: str | None) -> None:
    for found in on_ranks(both, 2, job):
        assert found["mine"] == found["plain"]
        assert isinstance(found["outcomes"][-1], RefusedRemedy if reason else Applied)
        assert not reason or reason in found["outcomes"][-1].reason


def edited_after_updates(model: Any) -> list[float]:
    """Change the parameters of the first layers after an update, as an average of weights would."""
    losses = losses_of(model, 2)
    with torch.no_grad():
        for parameter in [*model.layers[0].parameters(), *model.head.parameters()]:
            parameter.mul_(0.5)
    return losses + losses_of(model, 2)


def one_layer_between(model: Any) -> list[float]:
    """Run one layer alone after an update, then change all parameters."""
    losses = losses_of(model, 2)
    with torch.no_grad():
        model.layers[1](torch.ones(2, 32))
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return losses + losses_of(model, 2)


def updated_twice(model: Any) -> list[float]:
    """Update again without a forward between, then save."""
    losses = losses_of(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = sum(float(value.full_tensor().sum()) for value in model.state_dict().values())
    return [*losses, saved, *losses_of(model, 2)]


@pytest.mark.parametrize(
    ("job", "ended"),
    [
        (losses_of, ""),
        (edited_after_updates, "changes parameters between an update and the next forward"),
        (one_layer_between, "its modules ran in another order later"),
        (updated_twice, "updated twice without a forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_step_gathers_its_first_modules_after_the_update_and_never_uses_old_ones(job: Any, ended: str) -> None:
    for found in on_ranks(both, 2, job, 1, False, True):
        assert found["mine"] == found["plain"]
        outcome = found["outcomes"][-1]
        refused = isinstance(outcome, RefusedRemedy)
        said = outcome.reason if refused else outcome.facts.get("early_ended", "")
        assert ended in said
        assert refused or outcome.facts["early"] == 2
        assert bool(said) == bool(ended)


@pytest.mark.slow
def test_a_plan_applies_it_to_an_unmodified_script(tmp_path: Path) -> None:
    write_plan(PlanFile((Remedy("comm.order", {"ahead": 1}),)), tmp_path / "plan.json")
    env = {"HEADWAY_PLAN": str(tmp_path / "plan.json"), "HEADWAY_REMEDIES": json.dumps(REMEDIES)}
    changed = run_script(FSDP2, tmp_path, ranks=2, **env)
    plain = run_script(FSDP2, tmp_path, ranks=2, recorded=False)
    (outcome,) = json.loads((tmp_path / "run" / "applied" / "r1.json").read_text())["remedies"]

    assert changed == plain
    assert (outcome["applied"], outcome["facts"]) == (True, {"ahead": 1, "models": 1, "modules": 4})
