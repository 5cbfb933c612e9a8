"""Compressed gradients of FSDP2 on real ranks: near the plain ones, NaN on all or none, plain again when closed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.comm import compress
from headway.comm.compression import apply as compress_fsdp
from headway.comm.compression.apply import CODECS, SETTER
from headway.core.errors import InputError
from tests.spawn import on_ranks


@pytest.fixture(autouse=True)
def _by_capability() -> None:
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, SETTER):
        pytest.skip(f"FSDP2 of this torch has no {SETTER}")


def sharded(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 41), nn.Tanh(), nn.Linear(41, 3))
    names = ("replicate", "shard") if sizes else None
    mesh = init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names)
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model: Any, step: int, poison: bool = False, scale: float = 1.0) -> torch.Tensor:
    """Return this rank's shards of the gradients; each rank fits other numbers."""
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    if poison and dist.get_rank() == 1:
        x[0, 0] = float("inf")
    (scale * (model(x) - x[:, :3]).square().mean()).backward()
    found = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def _compared() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = gradients(sharded(), 0)
    for name in CODECS:
        model = sharded()
        compressed = compress(model, name, min_bytes=200)
        error = float((gradients(model, 0) - plain).norm() / plain.norm())
        finite = bool(gradients(model, 1, poison=True).isfinite().any()), bool(gradients(model, 2).isfinite().all())
        compressed.load_state_dict(compressed.state_dict())
        stats = compressed.stats
        compressed.close()
        same = torch.equal(gradients(model, 0), plain)
        found[name] = {"error": error, "finite": finite, "same": same, "share": 0.0}
        found[name]["share"] = stats["sent_bytes"] / stats["gradient_bytes"]
        assert stats["groups"] == 2 * 3
    model = sharded()
    compress(model, "half", min_bytes=200)
    found["overflow"] = bool(gradients(model, 0, scale=1e7).isfinite().all())  # finite, but not in half precision
    model = sharded()
    compressed = compress(model, "half", min_bytes=10_000)  # the layer is smaller, the rest too
    found["small"] = torch.equal(gradients(model, 0), plain) and compressed.stats["groups"] == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_gradients_are_near_the_plain_ones(ranks: int) -> None:
    for answer in on_ranks(_compared, ranks):
        assert answer.pop("small")
        assert not answer.pop("overflow")
        for name, error in (("half", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2)):
            assert 0 < answer[name]["error"] < error
            # One rank's infinity makes every gradient NaN on all, in its step alone.
            assert answer[name]["finite"] == (False, True)
            assert answer[name]["same"]
            assert answer[name]["share"] < (0.29 if name == "int8" else 0.51)


def _refusals() -> list[str]:
    model, words = sharded(), []
    compress(model, "int8").close()
    try:
        compress(model, "half")
    except InputError as cause:
        words.append(str(cause))
    model = sharded()
    for plan in ("topk:0.01", "sgin", {"*": "half"}, "half" if dist.get_rank() else "int8"):
        try:
            compress(model, plan)
        except InputError as cause:
            words.append(str(cause))
    try:
        compress(model, "half").load_state_dict({"steps": 4})
    except InputError as cause:
        words.append(str(cause))
    return words


def test_what_fsdp_cannot_have_is_refused_with_the_rule() -> None:
    for words in on_ranks(_refusals, 2):
        for said, expected in zip(
            words,
            (
                "has a custom reduce-scatter already",
                "'topk:0.01'; its parameters are reduced together", "Did you mean 'sign'", "choose one of: half",
                "ranks [1] compress otherwise than rank 0", "keeps no residuals, and the state has ['steps']",
            ),
            strict=True,
        ):  # fmt: skip
            assert expected in said


def _on_replicas() -> tuple[float, list[str]]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compress_fsdp, "warn", said.append)
        plain, model = gradients(sharded(2, 2), 0), sharded(2, 2)
        compress(model, "half", min_bytes=200)
    return float((gradients(model, 0) - plain).norm() / plain.norm()), said


def test_replicas_of_a_hybrid_mesh_are_summed_plain_and_said_to_be() -> None:
    for error, said in on_ranks(_on_replicas, 4):
        assert 0 < error < 1e-3
        assert said == ["comm.compress: the mesh has replicas; between them gradients are summed uncompressed"]
