"""Models with branches, layer by layer, from their published shapes: CANDLE-Uno and a multi-modal transformer.

Durations are FLOPs over an attained rate, backward is twice forward, 32-bit numbers: shapes are exact, durations
typical. Names are branch.layer.

>>> graph = candle_uno(batch=64)
>>> len(graph.names), graph.names[0], graph.names[-1]
(61, 'input0.0', 'top.4')
"""

from headway.cost.specs import shipped
from headway.parallel.planning.layers import LayerGraph

FLOPS_PER_S = 0.5 * shipped().device("V100-SXM2-16GB").peak("fp32")
"""Half of the peak."""

CANDLE_INPUTS = (1, 1, 942, 5270, 2048, 5270, 2048)
"""Width of each input: two doses, RNA sequence, descriptors and fingerprints of two drugs."""


def candle_uno(batch: int, width: int = 4192, *, depth: int = 8, joined_width: int | None = None) -> LayerGraph:
    """Return CANDLE-Uno: `depth` dense layers for each input, four on what they give, side by side, and the output.

    `joined_width` is the width of what the branches give together, `width` for each of them without it.
    """
    joined = joined_width or width * len(CANDLE_INPUTS)
    branches = [[(inputs, width), *[(width, width)] * (depth - 1)] for inputs in CANDLE_INPUTS]
    top = [(joined, width), *[(width, width)] * 3, (width, 1)]
    layers = [*branches, top]
    return _joined(
        [f"input{k}" for k in range(len(branches))],
        [[2.0 * batch * a * b for a, b in rows] for rows in layers],
        [[4.0 * batch * b for _, b in rows] for rows in layers],
        [[4.0 * a * b for a, b in rows] for rows in layers],
    )


def multi_modal(
    batch: int, num_branches: int = 4, *, depth: int = 8, hidden: int = 1024, sequence: int = 256
) -> LayerGraph:
    """Return a transformer of `depth` layers for each modality, then one dense layer on all of them."""
    flops = 2.0 * batch * sequence * (12 * hidden**2 + 2 * sequence * hidden)
    output, weights = 4.0 * batch * sequence * hidden, 4.0 * 12 * hidden**2
    last = num_branches * hidden
    return _joined(
        [f"modality{k}" for k in range(num_branches)],
        [*[[flops] * depth] * num_branches, [2.0 * batch * sequence * last * hidden]],
        [*[[output] * depth] * num_branches, [output]],
        [*[[weights] * depth] * num_branches, [4.0 * last * hidden]],
    )


def _joined(
    branches: list[str], flops: list[list[float]], output_bytes: list[list[float]], parameter_bytes: list[list[float]]
) -> LayerGraph:
    """Return branches and, last, the layers behind them as one graph."""
    names = tuple(f"{name}.{k}" for name, rows in zip([*branches, "top"], flops, strict=True) for k in range(len(rows)))
    index = {name: k for k, name in enumerate(names)}
    edges = [(k, k + 1) for k in range(len(names) - 1) if names[k].split(".")[0] == names[k + 1].split(".")[0]]
    edges += [(index[f"{name}.{len(rows) - 1}"], index["top.0"]) for name, rows in zip(branches, flops, strict=False)]
    forward = tuple(one / FLOPS_PER_S for rows in flops for one in rows)
    outputs, weights = (tuple(one for rows in column for one in rows) for column in (output_bytes, parameter_bytes))
    return LayerGraph(names, forward, tuple(2 * s for s in forward), outputs, weights, tuple(sorted(edges)))
