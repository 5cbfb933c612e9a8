"""Every order of a pipeline step by name: adding one is adding a line.

>>> sorted(SCHEDULES)
['1f1b', 'async_1f1b', 'gpipe', 'graph_1f1b', 'interleaved', 'two_buffer', 'v', 'zero_bubble']
"""

from __future__ import annotations

from headway.sim.pipeline.orders import OrderFn, gpipe, interleaved, one_f_one_b
from headway.sim.pipeline.simulate import graph_1f1b
from headway.sim.pipeline.split_backward import v_shape, zero_bubble
from headway.sim.pipeline.weight_versions import FLUSH_FREE

SCHEDULES: dict[str, OrderFn] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "graph_1f1b": graph_1f1b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "v": v_shape,
    **FLUSH_FREE,
}
"""Name -> the function that makes the order."""
