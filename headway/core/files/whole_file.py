"""A file that appears whole or not at all.

Use it wherever a reader may meet the file while it is written, or where the
writer may be killed: the bytes go into a temporary file beside the target,
which a rename then puts in its place.

>>> import tempfile
>>> target = Path(tempfile.mkdtemp()) / "a.txt"
>>> with whole_file(target) as draft:
...     _ = draft.write_text("done")
...     target.exists()
False
>>> target.read_text()
'done'
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.core.errors import InputError


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield the path of a draft; rename it to `path` when the block ends, remove it when the block raises.

    Raises `InputError` when the folder of `path` does not exist.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: the folder {target.parent} does not exist. Create it first.")
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # of a dead process of our number; or a link that somebody laid there to be followed
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
