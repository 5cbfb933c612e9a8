"""`headway.run`: a recording that shows its ledger where it is the last value of a notebook's cell.

>>> run(enabled=False)
<headway.run: nothing is recorded>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headway.runtime.in_process import Run, Shown


def run(path: str | os.PathLike[str] | None = None, *, enabled: bool = True) -> Run:
    """Return a recording of this process: a `with` block, or `start()` and `stop()` where it spans a notebook's cells.

    Without a launcher it records into `path`, by default a new folder under ./headway-runs, and afterwards shows its
    ledger in Jupyter and IPython. Under `headway run` the recording is the launcher's, and `path` is ignored. With
    `enabled=False`, or HEADWAY=off in the environment, nothing is recorded and everything else works.
    """
    return Run(path, enabled=enabled, draw=draw)


def draw(path: Path) -> Shown:
    """Return the ledger of a run folder as text and as a fragment of a page."""
    # Here and not above: the ledger and its reports (numpy, pyarrow, rich) are not for the start of every rank.
    from headway.report.notebook import fragment
    from headway.report.paper import screen_of
    from headway.report.terminal import render_why
    from headway.verbs.explain import explain
    from headway.verbs.views import why_object

    shown = Path(os.path.relpath(path))
    explanation = explain([shown])
    why = why_object(explanation)
    return Shown(render_why(why, source=explanation.source, **screen_of(sys.stdout)), fragment(why))
