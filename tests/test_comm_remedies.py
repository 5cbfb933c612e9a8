"""DDP's arguments are changed where it is constructed: sizes per bucket, gradients inside buckets, a static graph."""

import inspect

import pytest
import torch

from headway.comm import torch_buckets as runtime
from headway.comm.torch_buckets import bucket, gradient_view, static_graph
from headway.core.units import MIB
from headway.runtime.in_rank.remedy import Applied, RefusedRemedy
from tests.remedy_context import applied, apply
from tests.training import train

DDP = torch.nn.parallel.DistributedDataParallel
SIZES = [0.01, 0.02]
takes_list = pytest.mark.skipif(
    runtime.LIST not in inspect.signature(DDP.__init__).parameters, reason="this torch takes one size for all buckets"
)


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def model(**arguments):
    torch.manual_seed(0)
    return DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), **arguments)


def trained(ddp) -> list[float]:
    """Return the losses of three steps, bit for bit."""
    draws = [torch.randn(4, 64, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    return train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), draws)


@takes_list
def test_each_bucket_gets_its_own_size_and_losses_stay_the_same(group):
    plain = trained(model())
    with applied(bucket, {"bucket_mb": 3, "bucket_mb_list": SIZES}) as context:
        ddp = model(bucket_cap_mb=25)
        losses = trained(ddp)

    assert list(ddp._bucket_config.per_bucket_bytes_caps) == [int(size * MIB) for size in SIZES]
    assert (ddp.bucket_bytes_cap, list(ddp.bucket_bytes_cap_list)) == (25 * MIB, [])  # what the script asked for
    assert context.outcomes[-1].facts["per_bucket"] is True
    assert losses == plain
    assert not model().bucket_bytes_cap_list


@takes_list
def test_rebuilt_buckets_hold_exactly_what_the_plan_says(group):
    # Four layers of 64 x 64 + 64 floats; the plan joins two layers, then one, then one.
    layer = 4 * (64 * 64 + 64)
    sizes = [(part - 0.5) / MIB for part in (2 * layer, layer, layer)]
    with applied(bucket, {"bucket_mb": 1, "bucket_mb_list": sizes}):
        ddp = model()
        trained(ddp)

    data = ddp._get_ddp_logging_data()
    assert data["rebuilt_bucket_sizes"] == f"{2 * layer}, {layer}, {layer}"


@pytest.mark.parametrize("allow", ["", "result-equivalent"])
def test_more_than_two_ranks_keep_their_buckets_without_a_grant(group, monkeypatch, allow):
    """The order in which they are added depends on where a gradient lies in its bucket."""
    monkeypatch.setattr(runtime.dist, "get_world_size", lambda group=None: 3)
    with applied(bucket, {"bucket_mb": 3}, allow=allow) as context:
        ddp = model()

    changed = 3 * MIB if allow else runtime.DEFAULT_MB * MIB
    assert ddp._get_ddp_logging_data()["bucket_cap_bytes"] == changed
    assert isinstance(context.outcomes[-1], Applied if allow else RefusedRemedy)


def test_a_torch_without_a_list_gets_the_single_size(group, monkeypatch):
    monkeypatch.setattr(runtime, "LIST", "no such argument")
    with applied(bucket, {"bucket_mb": 3, "bucket_mb_list": SIZES}) as context:
        ddp = model()

    assert ddp._get_ddp_logging_data()["bucket_cap_bytes"] == 3 * MIB
    assert ddp.bucket_bytes_cap == runtime.DEFAULT_MB * MIB  # what the script asked for
    assert context.outcomes[-1].facts["per_bucket"] is False


@takes_list
def test_a_list_of_the_scripts_own_is_kept_when_the_plan_says_so(group):
    with applied(bucket, {"bucket_mb": 3, "bucket_mb_list": SIZES, "respect_explicit": True}) as context:
        ddp = model(bucket_cap_mb_list=[7])

    assert list(ddp.bucket_bytes_cap_list) == [7 * MIB]
    assert isinstance(context.outcomes[-1], RefusedRemedy)


def test_a_size_of_the_scripts_own_is_kept_when_the_plan_says_so(group):
    with applied(bucket, {"bucket_mb": 3, "respect_explicit": True}) as context:
        own = model(bucket_cap_mb=7)
        assert isinstance(context.outcomes[-1], RefusedRemedy)
        sizes = [ddp._get_ddp_logging_data()["bucket_cap_bytes"] for ddp in (own, model())]

    assert sizes == [7 * MIB, 3 * MIB]
    assert context.outcomes[-1].json()["facts"]["kept_explicit"] == 1


@pytest.mark.parametrize("own", [{}, {"bucket_cap_mb": 1}], ids=["default", "own size"])
def test_a_model_with_a_communication_hook_has_the_scripts_buckets(group, own):
    def quantised(state, bucket):
        state.append(bucket.buffer().numel())
        scale = bucket.buffer().abs().max() / 7
        done = torch.futures.Future()
        done.set_result((bucket.buffer() / scale).round() * scale)
        return done

    def hooked():
        ddp, seen = model(**own), []
        ddp.register_comm_hook(seen, quantised)
        return trained(ddp), seen, ddp.bucket_bytes_cap

    plain = hooked()
    with applied(bucket, {"bucket_mb": 0.02}) as context:
        changed = hooked()

    assert changed == plain
    assert "communication hook" in context.outcomes[-1].reason


def test_gradients_live_in_buckets_and_losses_stay_the_same(group):
    plain = trained(model())
    with applied(gradient_view, {}, allow="result-equivalent") as context:
        ddp = model()
        losses = trained(ddp)

    assert ddp.gradient_as_bucket_view is True
    assert context.outcomes[-1] == Applied("comm.gradient_view", {"models": 1, "had_it": 0})
    assert losses == plain
    assert model().gradient_as_bucket_view is False


def test_gradients_that_a_script_may_keep_are_no_views_without_the_users_word(group):
    with applied(gradient_view, {}) as context:
        assert "grant --allow result-equivalent" in apply(gradient_view, {}, context).reason
        assert model().gradient_as_bucket_view is False


def test_what_the_script_has_already_is_counted_as_such(group):
    with applied(gradient_view, {}, allow="result-equivalent") as context:
        model(gradient_as_bucket_view=True)

    assert context.outcomes[-1].facts == {"models": 0, "had_it": 1}


def test_a_static_graph_needs_the_users_word(group):
    with applied(static_graph, {}) as context:
        refused = apply(static_graph, {}, context)
        assert model().static_graph is False
    with applied(static_graph, {}, allow="result-equivalent"):
        ddp = model()
        trained(ddp)

    assert isinstance(refused, RefusedRemedy)
    assert "grant --allow result-equivalent" in refused.reason
    assert ddp.static_graph is True
