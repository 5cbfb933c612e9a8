"""Compressed gradients on real ranks: the same on all, the mean in the long run, and never half a step."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from headway.comm import Lans, compress
from headway.comm.compression.apply import compression
from headway.comm.compression.torch_codecs import codec_of
from headway.comm.compression.torch_push_pull import PushPull, Residuals, cut
from headway.core.errors import BackgroundError, InputError
from headway.runtime.in_rank.remedy import RefusedRemedy
from tests.remedy_context import applied, apply
from tests.spawn import on_ranks

NAMES = ("half", "bfloat16", "int8", "dither:4", "natural:4", "sign", "topk:0.05", "randomk:0.2", "shared-randomk:0.2")


def job(seed: int = 0) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 41), nn.Tanh(), nn.Linear(41, 3)), bucket_cap_mb=0.01
    )


def flat(model: DistributedDataParallel) -> torch.Tensor:
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range, poison: int = -1) -> None:
    """Each rank fits other numbers; in step `poison` rank 1 meets one that is not finite."""
    for step in steps:
        draws = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, 30, generator=draws)
        if step == poison and dist.get_rank() == 1:
            x[0, 0] = float("inf")
        (model(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same_on_all(values: torch.Tensor) -> bool:
    others = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(others, values)
    return all(torch.equal(other, values) for other in others)


def _trained(names: tuple[str, ...], two_way: bool) -> dict[str, tuple[bool, float]]:
    found = {}
    for name in names:
        model = job()
        compressed = compress(model, name, two_way=two_way, min_bytes=200) if name != "plain" else None
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), range(30))
        found[name] = same_on_all(flat(model)), flat(model)
        if compressed is not None:
            compressed.close()
    return {name: (same, float((values - found["plain"][1]).norm())) for name, (same, values) in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "two_way"), [(3, True), (2, False)])
def test_every_codec_leaves_all_ranks_with_the_same_bits(ranks: int, two_way: bool) -> None:
    for answer in on_ranks(_trained, ranks, ("plain", *NAMES), two_way):
        assert {name for name, (same, _) in answer.items() if not same} == set()
        assert answer["half"][1] < 1e-2 < answer["topk:0.05"][1]


def _mean_update(rounds: int, drop: str) -> float:
    """Return how far the mean of what comes back is from the true mean of constant gradients, relative."""
    rank, ranks, n = dist.get_rank(), dist.get_world_size(), 1_000
    pull = PushPull(ranks, rank, feedback=True, two_way=True)
    layout = cut([("w", n, codec_of("topk:0.1"))], ranks, rank, min_bytes=0, two_way=True)
    own = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    true = own.clone()
    dist.all_reduce(true)
    total = torch.zeros(n)
    for _ in range(rounds):
        g = own.clone()
        pull.reduce(layout, {"w": g}, dist.group.WORLD)
        pull.end_step()
        total += g
        if drop:
            setattr(pull, drop, Residuals())
    return float((total / rounds - true / ranks).norm() / (true / ranks).norm())


@pytest.mark.slow
def test_the_mean_update_needs_the_residuals_of_senders_and_of_owners() -> None:
    # A tenth of the numbers travels: without residuals the others never would.
    whole, no_owner = (on_ranks(_mean_update, 4, 200, drop)[0] for drop in ("", "answered"))

    assert whole < 0.05
    assert no_owner > 0.4


def _poisoned() -> dict[str, Any]:
    model, reference = job(), job()
    compressed = compress(model, "topk:0.05", min_bytes=200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(5))
    before, left = flat(model), compressed.state_dict()
    train(model, optimizer, range(5, 6), poison=5)
    after, kept = flat(model), compressed.state_dict()
    train(model, optimizer, range(6, 10))
    del reference
    skipped = compressed.stats["skipped"]
    compressed.close()
    return {
        "weights stay": torch.equal(before, after),
        "residuals stay": all(
            torch.equal(left[side][name], kept[side][name]) for side in ("sent", "answered") for name in left[side]
        ),
        "goes on": bool(torch.isfinite(flat(model)).all()) and not torch.equal(after, flat(model)),
        "same": same_on_all(flat(model)),
        "once": skipped == 1,
    }


def test_a_step_with_an_infinite_gradient_on_one_rank_is_skipped_on_all() -> None:
    for answer in on_ranks(_poisoned, 2):
        assert answer == dict.fromkeys(answer, True)


def _resumed(name: str, steps: int) -> bool:
    whole = job()
    compressed = compress(whole, name, min_bytes=200)
    optimizer = Lans(whole.parameters(), lr=0.02)
    train(whole, optimizer, range(steps))
    state = compressed.state_dict(), optimizer.state_dict(), whole.state_dict()
    state = tuple(torch.utils._pytree.tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, one) for one in state)
    train(whole, optimizer, range(steps, 2 * steps))
    again = job(seed=7)
    second = compress(again, name, min_bytes=200)
    other = Lans(again.parameters(), lr=0.02)
    for thing, one in zip((second, other, again), state, strict=True):
        thing.load_state_dict(one)
    train(again, other, range(steps, 2 * steps))
    for one in (compressed, second):
        one.close()
    return torch.equal(flat(whole), flat(again))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("topk:0.05", 200), ("dither:4", 10), ("shared-randomk:0.2", 10)])
def test_a_job_that_resumes_with_its_residuals_ends_bit_identical(name: str, steps: int) -> None:
    assert on_ranks(_resumed, 2, name, steps) == [True, True]


def _channels_last() -> float:
    found = []
    for name in ("plain", "half"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 3)).to(
            memory_format=torch.channels_last
        )
        model = DistributedDataParallel(net)
        compressed = compress(model, name, min_bytes=200) if name != "plain" else None
        model(
            torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        ).square().sum().backward()
        found.append(net[0].weight.grad.clone())
        if compressed is not None:
            compressed.close()
    return float((found[0] - found[1]).norm() / found[0].norm())


def test_gradients_with_other_strides_are_what_they_were() -> None:
    assert max(on_ranks(_channels_last, 2)) < 2e-3


def _unlike_plans() -> str:
    model = job()
    compressed = compress(model, "sign" if dist.get_rank() == 0 else "half", min_bytes=200)
    try:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))
    except Exception as cause:
        return str(cause)
    finally:
        with contextlib.suppress(BackgroundError):
            compressed.close()
    return ""


def test_ranks_with_unlike_plans_are_all_told() -> None:
    for rank, answer in enumerate(on_ranks(_unlike_plans, 2)):
        assert "ranks [1] compress otherwise than rank 0" in answer
        assert f"rank {rank} has" in answer


def _through_the_remedy(script: str) -> tuple[list[float], list[str], bool]:
    halved = default_hooks.fp16_compress_hook

    def trained() -> torch.Tensor:
        model = job()
        if script == "own hook":
            model.register_comm_hook(None, halved)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, range(5))
        if script == "later hook":
            model.register_comm_hook(None, halved)
        train(model, optimizer, range(5, 10))
        return flat(model)

    plain = trained() if script != "later hook" else torch.zeros(1)
    with applied(compression, {"codec": "sign", "min_bytes": 200}, allow="lossy") as context:
        changed = trained()
    words = [outcome.reason if isinstance(outcome, RefusedRemedy) else "applied" for outcome in context.outcomes]
    return [float((plain - changed).abs().max())], words, same_on_all(changed)


@pytest.mark.slow
def test_an_unmodified_script_is_compressed_and_one_with_a_hook_keeps_it() -> None:
    for script, words in (
        ("plain", ["applied"]),
        ("own hook", ["the script has a communication hook of its own"]),
        ("later hook", ["applied", "the script has registered a communication hook of its own"]),
    ):
        for (difference,), found, same in on_ranks(_through_the_remedy, 2, script):
            assert (found, same) == (words, True)
            assert (difference == 0) == (script == "own hook")


def test_nothing_is_compressed_without_the_grant() -> None:
    with applied(compression, {"codec": "sign"}, allow="result-equivalent"):
        pass
    outcome = apply(compression, {"codec": "sign"}, type("Context", (), {"allow": ""})())  # type: ignore[arg-type]

    assert isinstance(outcome, RefusedRemedy)
    assert "grant --allow lossy" in outcome.reason


def _refusals() -> list[str]:
    model, words = job(), []
    for arguments in ({"plan": ""}, {"plan": 3}, {"plan": {"*": "sgin"}}, {"plan": "sign", "min_bytes": -1}):
        try:
            compress(model, **arguments)
        except InputError as cause:
            words.append(str(cause))
    for other in (nn.Linear(2, 2), model):
        if other is model:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        try:
            compress(other, "sign")
        except InputError as cause:
            words.append(str(cause))
    fresh = job()
    compressed = compress(fresh, "sign", min_bytes=200)
    for wrong in ({"0.weight": torch.zeros(5)}, {"7.weight": torch.zeros(5)}):
        try:
            compressed.load_state_dict({"steps": 1, "sent": wrong, "answered": {}})
        except InputError as cause:
            words.append(str(cause))
    compressed.close()
    return words


def test_what_is_wrong_is_said_once_with_the_rule() -> None:
    (words,) = on_ranks(_refusals, 1)

    for said, expected in zip(
        words,
        (
            "the plan is ''", "the plan is 3", "Did you mean 'sign'", "min_bytes is -1", "a Linear has no hook",
            "a communication hook already", "rank 0: the residual of 0.weight has 5", "a residual of '7.weight'",
        ),
        strict=True,
    ):  # fmt: skip
        assert expected in said


def test_lans_is_its_formula() -> None:
    x, g = torch.tensor([3.0, -4.0]), torch.tensor([[0.1, 0.3], [0.5, -0.2], [0.0, 0.0]])
    weight = nn.Parameter(x.clone())
    optimizer = Lans([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.02)
    m, v = torch.zeros(2), torch.zeros(2)
    for step, gradient in enumerate(g, 1):
        weight.grad = gradient.clone()
        optimizer.step()
        unit = gradient / gradient.norm() if gradient.norm() else gradient
        m, v = 0.9 * m + 0.1 * unit, 0.99 * v + 0.01 * unit**2
        root = (v / (1 - 0.99**step)).sqrt() + 1e-6
        ways = [(m / (1 - 0.9**step) / root + 0.02 * x, 0.9), (unit / root + 0.02 * x, 0.1)]
        x = x - 0.1 * sum(share * x.norm() * way / way.norm() for way, share in ways)

        torch.testing.assert_close(weight.detach(), x)


@pytest.mark.parametrize("arguments", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -0.1}])
def test_lans_refuses_numbers_outside_their_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"betas in\s+\[0, 1\), eps > 0"):
        Lans([nn.Parameter(torch.ones(2))], **arguments)
