"""Public names and options grow only on purpose: frozen in tests/golden/public.json, which `make golden` writes."""

import importlib
import json
import os
import pkgutil

import pytest

import headway
from headway.cli import VERBS, build
from tests.paths import GOLDEN

FROZEN = GOLDEN / "public.json"


def options(verb: str) -> list[str]:
    """Return the names of a verb's options and arguments."""
    app = build()
    for word in verb.split():
        app = app[word]
    arguments = app.assemble_argument_collection()
    return sorted(name for argument in arguments if argument.show for name in argument.names)


def test_public_names_and_options_are_the_frozen_ones():
    surface = {"names": sorted(headway.PUBLIC), "verbs": {verb: options(verb) for verb in sorted(VERBS)}}
    if os.environ.get("HEADWAY_WRITE_GOLDEN"):
        FROZEN.write_text(json.dumps(surface, indent=1) + "\n")

    assert surface == json.loads(FROZEN.read_text())


def test_every_public_name_resolves_and_they_stay_few():
    assert all(getattr(headway, name) is not None for name in headway.PUBLIC)
    assert len(headway.PUBLIC) <= 24


ROOMS = ["checkpoint", "cluster", "comm", "compute", "data", "fault", "model", "parallel", "power", "storage"]


@pytest.mark.parametrize("room", [f"headway.{room}" for room in ROOMS])
def test_no_public_name_is_that_of_a_module_beside_it(room):
    """Importing the module would put it in the place of what is public."""
    package = importlib.import_module(room)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}

    assert not package.PUBLIC.keys() & modules
