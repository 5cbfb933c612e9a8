"""Remedies around the forward of a model: what they change, what they leave, and models that do not bear them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from headway.compute.torch_forward import autocast, channels_last, compiled, no_compiler
from headway.runtime.in_rank.remedy import Applied, RefusedRemedy
from tests.remedy_context import applied

GRANTS = {channels_last: "result-equivalent", compiled: "result-equivalent", autocast: "lossy"}
needs_compiler = pytest.mark.skipif(bool(no_compiler("cpu")), reason=no_compiler("cpu"))


@pytest.fixture(autouse=True, scope="module")
def _no_pool_of_compilers():
    """Compile in this thread: a pool would stay for all later tests of this process."""
    import torch._inductor.config

    before, torch._inductor.config.compile_threads = torch._inductor.config.compile_threads, 1
    yield
    torch._inductor.config.compile_threads = before


class Net(nn.Module):
    """Convolutions, a norm with buffers, and dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        """Return scores [n, 4]."""
        return self.last(self.drop(self.features(x).mean((2, 3))))

    def features(self, x):
        """Return images [n, 8, h, w]."""
        return functional.relu(self.second(functional.relu(self.norm(self.first(x)))))


class Viewing(Net):
    """Asks for a view that only channels first allow."""

    def features(self, x):
        """Return images of the same numbers."""
        images = super().features(x)
        return images.view(len(images), -1).view_as(images)


class Doubling(torch.autograd.Function):
    """An autograd function of the script's own."""

    @staticmethod
    def forward(context, x):
        """Double."""
        return 2 * x

    @staticmethod
    def backward(context, gradient):
        """Double."""
        return 2 * gradient


class OwnFunction(Net):
    """Computes with it."""

    def features(self, x):
        """Return doubled images."""
        return Doubling.apply(super().features(x))


def trained(kind=Net, steps=14, context=None):
    """Train a model; return it and its losses."""
    torch.manual_seed(1)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = model(torch.randn(4, 3, 12, 12)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if context is not None:
            context.after(steps=step + 1)
    return model, losses


def last(context):
    return context.outcomes[-1] if context.outcomes else Applied("", {})


def reasons(context):
    return " ".join(outcome.reason for outcome in context.outcomes if isinstance(outcome, RefusedRemedy))


@pytest.mark.parametrize("remedy", [channels_last, pytest.param(compiled, marks=[needs_compiler, pytest.mark.slow])])
def test_another_order_of_sums_gives_the_losses_within_rounding_and_the_same_names(remedy):
    plain, losses = trained()
    with applied(remedy, {}, GRANTS[remedy]) as context:
        context.shared["compute.trial"] = True  # without a judgement of its own
        model, changed = trained(context=context)
        assert last(context).facts["models"] == ["Net"]
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert changed != losses  # it computes in another way
    torch.testing.assert_close(torch.tensor(changed), torch.tensor(losses), rtol=1e-3, atol=1e-5)
    assert all(parameter.is_contiguous() for parameter in model.parameters())  # undone
    assert model._compiled_call_impl is None


def test_autocast_computes_in_bfloat16_inside_and_gives_float32():
    seen = []

    class Looking(Net):
        def features(self, x):
            images = super().features(x)
            seen.append(images.dtype)
            return images

    with applied(autocast, {}, "lossy"):
        model, losses = trained(Looking, steps=3)
        out = model(torch.randn(2, 3, 12, 12))
        model.eval()
        model(torch.randn(2, 3, 12, 12))
    assert seen == [torch.float32, *[torch.bfloat16] * 3, torch.float32]  # the first call and evaluation stay
    assert out.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(losses, trained(steps=3)[1], rtol=0.1, atol=0.01)


def test_channels_last_leaves_parameters_gradients_and_evaluation_as_they_lie():
    with applied(channels_last, {}, "result-equivalent") as context:
        model, _ = trained(steps=5, context=context)
        flat = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
        assert len(flat) == len(nn.utils.parameters_to_vector(model.parameters()))
        model.eval()
        images = model.features(torch.randn(2, 3, 12, 12))
    assert last(context).facts["convolutions"] == 2
    assert images.is_contiguous()
    assert all(value.is_contiguous() for value in model.state_dict().values())


@needs_compiler
def test_evaluation_of_a_compiled_model_is_the_scripts_own():
    calls = []

    class Counting(nn.Linear):
        def forward(self, x):
            calls.append(torch.compiler.is_compiling() or self._compiled_call_impl is not None)
            return super().forward(x)

    model = Counting(2, 2)  # convolutions take the compiler twenty seconds
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with applied(compiled, {}, "result-equivalent") as context:
        context.shared["compute.trial"] = True
        for step in range(2):
            model(torch.randn(2, 2)).sum().backward()
            optimizer.step()
            context.after(steps=step + 1)
        assert model._compiled_call_impl is not None
        calls.clear()
        model.eval()
        model(torch.randn(2, 2))
        assert calls == [False]
        assert model._compiled_call_impl is not None


class Nth(OwnFunction):
    """Counts its calls, as scripts do."""

    calls = 0

    def forward(self, x):
        """Return scores; one call more."""
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("remedy", [channels_last, autocast])
def test_a_model_with_functions_of_its_own_is_called_no_more_often(remedy):
    with applied(remedy, {}, GRANTS[remedy]) as context:
        model, _ = trained(Nth, steps=3, context=context)
    assert model.calls == 3


@pytest.mark.parametrize(
    ("remedy", "kind"), [(channels_last, Viewing), (channels_last, OwnFunction), (autocast, OwnFunction)]
)
def test_a_model_that_does_not_bear_the_change_trains_as_it_would_have(remedy, kind):
    _, losses = trained(kind)
    with applied(remedy, {}, GRANTS[remedy]) as context:
        context.undoes = True
        _, changed = trained(kind, context=context)
    assert changed == losses
    assert ("Doubling" if kind is OwnFunction else "Viewing does not take it") in reasons(context)


def test_the_scripts_own_error_comes_as_it_would_have():
    class Failing(Net):
        def forward(self, x):
            raise ValueError("of the script's")

    for remedy in (channels_last, autocast):
        with applied(remedy, {}, GRANTS[remedy]), pytest.raises(ValueError, match="of the script's"):
            trained(Failing)


def own_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return Net()(x)


def hooked(x):
    model = Net()
    model.first.register_forward_hook(lambda *_: None)
    return model(x)


def lying_last(x):
    return Net().to(memory_format=torch.channels_last)(x)


def half(x):
    return Net().bfloat16()(x.bfloat16())


def compiled_by_the_script(x):
    model = Net()
    model._compiled_call_impl = model._call_impl
    return model(x)


REFUSED = {
    own_autocast: (autocast, "uses autocast itself"),
    half: (autocast, "parameters in torch.bfloat16"),
    lying_last: (channels_last, "says how its convolutions lie"),
    hooked: (compiled, "Conv2d has forward hooks"),
    compiled_by_the_script: (compiled, "compiles the model itself"),
    lambda _: nn.Linear(3, 3)(torch.zeros(1, 3)): (channels_last, "Linear has no 2-D convolution"),
}


@pytest.mark.parametrize(("call", "answer"), REFUSED.items(), ids=[case[1] for case in REFUSED.values()])
def test_what_the_script_chose_itself_is_left_alone(call, answer):
    remedy, reason = answer
    with applied(remedy, {}, GRANTS[remedy]) as context:
        if remedy is compiled:
            context.shared["compute.trial"] = True  # at the first call
        call(torch.randn(2, 3, 12, 12))
    assert reason in reasons(context)


def test_a_script_that_calls_no_model_is_told_so():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with applied(channels_last, {}, "result-equivalent") as context:
        for step in range(4):
            weight.sum().backward()
            optimizer.step()
            context.after(steps=step + 1)
    assert "calls no module" in reasons(context)


@needs_compiler
@pytest.mark.parametrize("warm_s", [0.5, 2.0])
def test_a_compiled_model_that_is_not_faster_is_given_back(warm_s, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("headway.compute.torch_forward.perf_counter", lambda: clock[0])
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with applied(compiled, {}, "result-equivalent") as context:
        context.undoes = True
        for step in range(30):
            model(torch.randn(2, 2)).sum().backward()
            clock[0] += 1.0 if step < 8 else warm_s
            optimizer.step()
            context.after(steps=step + 1)
            if reasons(context) or "step_s" in last(context).facts:
                break
        was_given_back = model._compiled_call_impl is None
    assert was_given_back == (warm_s > 1)
    assert ("once warm a step took 2 s, and 1 s as it was" in reasons(context)) == (warm_s > 1)
