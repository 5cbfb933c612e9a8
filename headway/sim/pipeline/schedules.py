"""Every order of a pipeline step by name: adding one is adding a line.

>>> sorted(SCHEDULES)
['1f1b', 'gpipe', 'interleaved']
"""

from __future__ import annotations

from headway.sim.pipeline.orders import OrderFn, gpipe, interleaved, one_f_one_b

SCHEDULES: dict[str, OrderFn] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}
"""Name -> the function that makes the order."""
