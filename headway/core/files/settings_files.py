"""YAML and TOML files that people write, read within bounds.

Such files are short; a long or deep one, or one that names a part of itself
again and again, is refused before it takes minutes or all memory.

>>> parse_yaml("a: [1, 2]", "a.yaml"), parse_toml("a = 1", "a.toml")
({'a': [1, 2]}, {'a': 1})
>>> parse_yaml("a: &x [1]\\nb: [*x, *x]", "a.yaml")
Traceback (most recent call last):
headway.core.errors.FormatError: a.yaml is no YAML that headway reads: it refers to a part of itself. Write it out.
"""

from __future__ import annotations

import functools
import os
import tomllib
from typing import Any

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import read_regular

MOST_TEXT_BYTES = 200_000
"""Characters of a file: the parsers take 10 to 20 microseconds for each."""


@functools.cache
def _loader() -> Any:
    """Return the safe loader without aliases, which can make a short text mean any amount of values."""
    import yaml  # commands that read none start without it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def compose_node(self, parent: Any, index: Any) -> Any:
            """Refuse an alias; compose anything else."""
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it refers to a part of itself. Write it out")
            return super().compose_node(parent, index)

    return Loader


def parse_yaml(text: str, where: str) -> Any:
    """Return what YAML says; `where` names the file in messages. Raises `FormatError`."""
    import yaml

    _check_size(text, where)
    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as cause:
        reason = " ".join(str(cause).split())
        raise FormatError(f"{where} is no YAML that headway reads: {reason}.") from cause


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return what TOML says; `where` names the file in messages. Raises `FormatError`."""
    _check_size(text, where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as cause:
        raise FormatError(f"{where} is no TOML that headway reads: {cause}. Correct the file.") from cause


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a regular file of TOML says. Raises `InputError` where it cannot be read, else `FormatError`."""
    try:
        return parse_toml(read_regular(path).decode("utf-8"), str(path))
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of a TOML file.") from cause
    except UnicodeDecodeError as cause:
        raise FormatError(f"{path} is not TOML: {cause}. Correct that place.") from cause


def _check_size(text: str, where: str) -> None:
    if len(text) > MOST_TEXT_BYTES:
        raise FormatError(f"{where} has {len(text)} characters; at most {MOST_TEXT_BYTES} are read. Write a short one.")
