"""`headway data bench`: what loading and moving batches costs on this machine, by the ways that are installed."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.text import Text

from headway.core.errors import FormatError, InputError
from headway.core.machine.host import host_cores
from headway.core.units import format_bytes, format_seconds
from headway.data.bytes.source import FolderSource, SyntheticJpeg
from headway.report.paper import ScreenOptions, add_row, draw, headed, paragraph
from headway.verbs.shared.output import emit

IMAGES, WIDTH, HEIGHT = 64, 500, 375
"""Generated images: as large as common photographs, few, and read several times."""
EPOCH = 256
"""Images per way and round."""
TRANSPORTS = {
    "ring": "headway's ring of shared slots",
    "queue": "torch.multiprocessing.Queue",
    "pipe": "multiprocessing.Pipe, bytes",
}
"""Way of `transport_costs` -> its name on the screen."""


def bench(folder: Path | None = None, /, *, workers: int = 2, rounds: int = 5, json: bool = False) -> int:
    """Measure on this machine what an image costs until it stands in a batch, and what moving a batch costs.

    CPU time of all processes together, in rounds that are interleaved:
    headway in threads and in processes, torch's DataLoader with the same
    operators, and with Pillow and float32 as most scripts have it. Then the
    ways from one process to another. Takes about half a minute. Exit code 3
    when ways that should deliver equal pixels do not.

    Example: `headway data bench ~/imagenet/val`

    Args:
      folder: Images to read (JPEG, PNG, in folders below too); generated JPEGs of 500 x 375 by default.
      workers: Threads or processes of each way.
      rounds: Epochs of 256 images per way.
      json: Print one JSON object instead of tables.
    """
    for name, value in (("--workers", workers), ("--rounds", rounds)):
        if value < 1:
            raise InputError(f"{name} is {value}; there is nothing to measure. Pass 1 or more.")
    source = Some(SyntheticJpeg(IMAGES, WIDTH, HEIGHT, seed=11) if folder is None else FolderSource(folder))
    begin = perf_counter()
    answer = {"schema": "headway.data.bench/1", "cores": host_cores(), "workers": workers, "rounds": rounds}
    answer |= _measured(source, workers, rounds)
    answer["images"] = {"count": source.distinct, "mean_bytes": source.mean_bytes, "folder": folder and str(folder)}
    answer["seconds"] = perf_counter() - begin
    emit(answer, lambda screen: _screen(answer, screen), as_json=json)
    return 0 if answer["equal_pixels"] else 3


class Some:
    """The first images of a source, in memory, as often as an epoch needs them."""

    def __init__(self, source: Any) -> None:
        """Read them. Raises `InputError` on one that cannot be decoded: better now than in a worker."""
        from headway.data.pipeline import torch_ops as ops

        self._data = [source.read(index) for index in range(min(len(source), IMAGES))]
        for index, data in enumerate(self._data):
            try:
                ops.decode(data)
            except FormatError as error:
                raise InputError(f"image {index}, by path: {error}") from error
        self.distinct = len(self._data)
        self.mean_bytes = statistics.fmean(map(len, self._data))

    def __len__(self) -> int:
        return EPOCH

    def read(self, index: int) -> bytes:
        """Return the bytes of image `index`."""
        data: bytes = self._data[index % self.distinct]
        return data


def _measured(source: Some, workers: int, rounds: int) -> dict[str, Any]:
    """Return what `--json` prints of both tables."""
    import torch

    from headway.data.stalls import torch_costs

    torch.set_num_threads(1)
    _say("moving batches")
    moved = torch_costs.transport_costs(rounds)  # first: it forks, and no thread may be there yet
    found = torch_costs.costs(source, workers, rounds=rounds, say=_say)
    base = next(cost for cost in found if cost.name == torch_costs.COMMON)
    pixels = {cost.digest for cost in found if cost.name != torch_costs.COMMON and not cost.missing}
    rows: list[dict[str, Any]] = [{"name": cost.name} for cost in found]
    for row, cost in zip(rows, found, strict=True):
        if cost.missing:
            row["missing"] = cost.missing
        else:
            row |= _spread("cpu_s_per_image", cost.cpu_s_per_image)
            row["to_common"] = _ratio(cost.cpu_s_per_image, base.cpu_s_per_image)
    transports = [
        {"name": name, **_spread("cpu_s_per_batch", spent), "to_queue": _ratio(spent, moved["queue"])}
        for name, spent in moved.items()
    ]
    return {
        "loaders": rows, "common": base.name, "equal_pixels": len(pixels) <= 1, "transports": transports,
        "batch_bytes": torch_costs.BATCH_BYTES, "torch": torch.__version__,
    }  # fmt: skip


def _spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the median of the rounds, and the least and most."""
    return {name: statistics.median(values), "range": [min(values), max(values)]}


def _ratio(values: Sequence[float], base: Sequence[float]) -> float | None:
    """Return the median of the rounds' ratios; None when the base was not measured, or cost no clock tick."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True)) if base and min(base) else None


def _say(what: str) -> None:
    print(f"headway: {what}", file=sys.stderr, flush=True)


def _screen(answer: Mapping[str, Any], screen: ScreenOptions) -> str:
    images = answer["images"]
    where = images["folder"] or f"generated, {WIDTH} x {HEIGHT}"
    loaders = headed(f"{answer['workers']} workers", "CPU per image", "spread", "ratio", "images/s, core")
    for row in answer["loaders"]:
        if "missing" in row:
            add_row(loaders, row["name"], row["missing"])
        else:
            cpu_s = row["cpu_s_per_image"]
            rate = f"{1 / cpu_s:.0f}" if cpu_s else ""
            add_row(loaders, row["name"], *_cells(row, "cpu_s_per_image", "to_common"), rate)
    moves = headed(format_bytes(answer["batch_bytes"]), "CPU per batch", "spread", "ratio")
    for row in answer["transports"]:
        add_row(moves, TRANSPORTS[row["name"]], *_cells(row, "cpu_s_per_batch", "to_queue"))
    equal = "Pixels are equal but for Pillow's, which rounds otherwise." if answer["equal_pixels"] else "PIXELS DIFFER."
    source = f"{images['count']} images ({where}), {format_bytes(images['mean_bytes'])} each"
    times = f"{answer['rounds']} rounds, {answer['cores']} cores, torch {answer['torch']}, "
    times += f"{format_seconds(answer['seconds'])} in all. Ratio: to torch's queue. Spread: over rounds."
    parts: list[Any] = [
        Text("  A JPEG decoded, cropped, resized to 224 x 224, mirrored, batched", style="bold"), loaders,
        paragraph(f"{source}. Ratio: to {answer['common']}. {equal}", style="dim"), "",
        Text("  A batch handed to another process", style="bold"), moves, paragraph(times, style="dim"),
    ]  # fmt: skip
    return draw(parts, **screen)


def _cells(row: Mapping[str, Any], key: str, ratio: str) -> list[str]:
    least, most = row["range"]
    spread = f"±{100 * (most - least) / 2 / row[key]:.0f} %" if row[key] else ""
    return [format_seconds(row[key]), spread, "" if row[ratio] is None else f"{row[ratio]:.2f}"]
