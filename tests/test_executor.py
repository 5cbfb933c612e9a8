"""Options of the tree, and their execution: 60 drawn ones on four ranks as 2 x 2."""

import pytest

from headway.comm import OPTIONS
from headway.comm.compression.options import PAIRS, options
from headway.core.errors import InputError


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
