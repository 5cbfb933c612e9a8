"""Options of the tree, and their execution: 60 drawn ones on four ranks as 2 x 2."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks._option_executor import execute, host_groups
from headway.comm import OPTIONS
from headway.comm.compression.options import PAIRS, options, steps
from headway.comm.compression.torch_codecs import Codec, codec_of
from headway.core.errors import InputError, UnknownNameError
from headway.cost.codecs import CodecName
from tests.spawn import on_ranks

LOSSY = ("sign", "topk:0.2", "randomk:0.3", "shared-randomk:0.5", "dither:4", "natural:4", "int8", "half")

IDENTITY = Codec(
    CodecName("identity"),
    lambda x, codec, seed: x.contiguous().view(torch.uint8),
    lambda packet, codec, out, seed: out.copy_(packet.contiguous().view(torch.float32)),
    biased=False,
)


def test_the_tree_has_the_published_number_of_options() -> None:
    assert len(OPTIONS) == len(set(OPTIONS)) == 4341
    assert len(set(options(("gpu",)))) == len(set(options(("cpu",)))) == 174


@pytest.mark.parametrize("devices", [(), ("tpu",), ("gpu", "gpu")])
def test_unknown_devices_are_named(devices: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="name gpu, cpu, or both"):
        options(devices)


def broken_rule(option: str) -> str:
    """Return the rule of Espresso's tree that an option breaks, by a machine that knows the tree's rules only."""
    packed, divided, levels = False, dict[str, str](), list[str]()
    for action in option.split():
        place, verb = action.split(".")
        if place in ("gpu", "cpu"):
            if (verb == "encode") == packed:
                return "raw is encoded, packets are decoded"
            packed = verb == "encode"
            continue
        levels.append(place)
        if place in divided:
            if PAIRS[divided.pop(place)] != verb:
                return "the second step belongs to the first"
        elif verb in ("all_reduce", "reduce_scatter", "reduce", "all_to_all", "gather"):
            if packed != (verb in ("all_to_all", "gather")):
                return "packets cannot be reduced, raw parts are"
            if verb != "all_reduce":
                divided[place] = verb
            elif place == "inside":
                return "inside a host communication is divided"
        elif not (verb == "all_gather" and packed and place != "inside"):
            return "only packets are gathered whole"
    order = [place for at, place in enumerate(levels) if not at or levels[at - 1] != place]
    if order not in (["flat"], ["inside", "between", "inside"]):
        return "all ranks at once, or inside, between and inside again"
    return "" if not packed and not divided else "ends raw and whole"


def test_every_option_is_legal() -> None:
    assert {option: rule for option in OPTIONS if (rule := broken_rule(option))} == {}
    assert broken_rule("inside.reduce_scatter between.all_reduce inside.broadcast")
    assert broken_rule("gpu.encode flat.all_gather")


def _run(drawn: list[str], codecs: list[str], numel: int) -> list[tuple[float, bool, float]]:
    """Return, by option: the identity's error, whether lossy sums are the same on all ranks, and their error."""
    groups, found = host_groups(2), []
    x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    true = x.clone()
    dist.all_reduce(true)
    for number, (option, name) in enumerate(zip(drawn, codecs, strict=True)):
        same = execute(option, x, groups, IDENTITY)
        lossy = execute(option, x, groups, codec_of(name), seed=number)
        others = [torch.empty_like(lossy) for _ in range(dist.get_world_size())]
        dist.all_gather(others, lossy)
        found.append(
            (
                float((same - true).abs().max() / true.abs().max()),
                all(torch.equal(other, lossy) for other in others),
                float((lossy - true).norm() / true.norm()),
            )
        )
    groups.close()
    return found


@pytest.mark.slow
def test_drawn_options_sum_over_four_ranks() -> None:
    rng = np.random.default_rng(3)
    drawn = [str(option) for option in rng.choice(OPTIONS, 60, replace=False)]
    codecs = [LOSSY[number % len(LOSSY)] for number in range(60)]
    for answers in on_ranks(_run, 4, drawn, codecs, 1003):
        for option, name, (error, same, lossy_error) in zip(drawn, codecs, answers, strict=True):
            assert error <= 1e-6, option
            assert same, (option, name)
            assert lossy_error < (0.01 if name == "half" else 1.5), (option, name)


def _edges() -> tuple[Any, ...]:
    groups = host_groups(1)
    raw = execute("flat.all_reduce", torch.ones(2, 3), groups)
    empty = execute("gpu.encode flat.all_gather gpu.decode", torch.ones(0), groups, IDENTITY)
    words = []
    for option in ("gpu.encode flat.all_gather gpu.decode", "flat.all_reduec"):
        try:
            execute(option, torch.ones(3), groups)
        except InputError as error:
            words.append(str(error))
    try:
        host_groups(3)
    except InputError as error:
        words.append(str(error))
    return raw.tolist(), empty.shape, words


def test_shapes_stay_and_invalid_calls_are_named() -> None:
    raw, shape, words = on_ranks(_edges, 2)[0]

    assert (raw, shape) == ([[2.0] * 3] * 2, (0,))
    assert "pass a codec" in words[0]
    assert "Did you mean 'flat.all_reduce'" in words[1]
    assert "2 ranks do not make hosts of 3" in words[2]
    with pytest.raises(UnknownNameError, match="headway comm options"):
        steps("", 1, 1)
