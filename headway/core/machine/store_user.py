"""Which process used an object store first: obstore's threads do not survive a fork.

A process that has used a store and is forked leaves its child a client whose
requests never end. Whoever makes a client asks `claim` first, so that the
child hears of it instead of waiting.

>>> claim([0]) is None
True
"""

from __future__ import annotations

import os

from headway.core.errors import InputError

USER = [0]
"""The process that used obstore first, of those whose memory this is a copy of; 0: none yet."""


def claim(user: list[int] = USER) -> None:
    """Note that this process uses obstore. Raises `InputError` where a fork has broken it."""
    if user[0] not in (0, os.getpid()):
        raise InputError(
            f"process {user[0]} had read from an object store before it forked this one, whose reads would never "
            "end. Pass multiprocessing_context='forkserver' to the loader, use threads, or read nothing before."
        )
    user[0] = os.getpid()
