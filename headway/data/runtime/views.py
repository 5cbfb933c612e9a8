"""A loader as torch's own iterators are to see it."""

from __future__ import annotations

from typing import Any


class View:
    """Some attributes replaced, the user's own left alone: torch's iterators read attributes and nothing else."""

    def __init__(self, loader: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, headway_loader=loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.headway_loader, name)
