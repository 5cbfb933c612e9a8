"""`Pipeline`: operators in a row, to be measured, planned and run.

A pipeline is a value: every method returns a new one. `ops` is what the
planner is told, `profile` measures, `plan` chooses, `loader` runs.

>>> from headway.data.bytes.source import SyntheticJpeg
>>> pipeline = Pipeline(SyntheticJpeg(8, 64, 48)).decode().to_float().crop(32, 32).flip().batch(4)
>>> best = pipeline.plan(profile=pipeline.profile(8))
>>> [pipeline.ops()[op].name for op in best.order]
['source', 'decode', 'crop', 'flip', 'to_float']
>>> pipeline.check(best, examples=8).equal
True
>>> [batch["data"].shape for batch in pipeline.loader(best)]
[torch.Size([4, 3, 32, 32]), torch.Size([4, 3, 32, 32])]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headway.core.errors import InputError
from headway.data.bytes.order import item_seeds
from headway.data.bytes.source import Source, digest_of
from headway.data.pipeline import operators as measured
from headway.data.pipeline import torch_ops as ops
from headway.data.pipeline.chain import DROPPED, Chain
from headway.data.pipeline.operators import OrderCheck, Stage, check_stages, planned_ops
from headway.data.pipeline.optimize import Op, PipelinePlan, PipelineProfile, Resources
from headway.data.pipeline.torch_loader import PipelineLoader

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pipeline:
    """A source and the operators behind it, as written. Sizes are (height, width); draws are keyed by example.

    `map` and `filter` take a function of the example, or with `random=True` of
    (example, numpy generator). Unknown functions keep their place unless
    `kind` says what they do (`headway.data.pipeline.operators.KINDS`).
    """

    def __init__(
        self, source: Source, stages: Sequence[Stage] = (), *, batch_size: int | None = None, shuffled: bool = False
    ) -> None:
        """Raise `InputError` on a source without length or `read`, or a cache behind a random operator."""
        if not (hasattr(source, "__len__") and hasattr(source, "read")):
            raise InputError(f"{type(source).__name__} is no source: give it __len__, read(i), meta(i), fingerprint().")
        check_stages(stages)
        self.source, self.stages = source, tuple(stages)
        self.batch_size, self.shuffled = batch_size, shuffled

    def __len__(self) -> int:
        """Return the examples of the source."""
        return len(self.source)

    def decode(self) -> Pipeline:
        """Decode images to uint8 [height, width, 3]."""
        return self._with(Stage("decode", "decode", ops.decode))

    def resize(self, height: int, width: int, *, commutes: bool = False) -> Pipeline:
        """Resize (bilinear, antialiased); `commutes` lets it pass colour operators, at the price of rounding."""
        function = partial(ops.resize, size=(height, width))
        return self._with(Stage("resize", "resample", function, commutes=commutes))

    def crop(self, height: int, width: int, *, center: bool = False) -> Pipeline:
        """Cut out a window, at random or from the middle."""
        function = partial(ops.center_crop if center else ops.crop, size=(height, width))
        return self._with(Stage("center_crop" if center else "crop", "geometric", function, random=not center))

    def resized_crop(
        self,
        height: int,
        width: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        commutes: bool = False,
    ) -> Pipeline:
        """Cut out a random window and resize it; `commutes` as in `resize`."""
        function = partial(ops.resized_crop, size=(height, width), scale=scale, ratio=ratio)
        return self._with(Stage("resized_crop", "resample", function, random=True, commutes=commutes))

    def flip(self, p: float = 0.5) -> Pipeline:
        """Mirror left to right with probability `p`."""
        return self._with(Stage("flip", "geometric", partial(ops.flip, p=p), random=True))

    def jitter(self, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4) -> Pipeline:
        """Change brightness, contrast and saturation by random factors in 1 +- the argument."""
        function = partial(ops.jitter, brightness=brightness, contrast=contrast, saturation=saturation)
        return self._with(Stage("jitter", "photometric", function, random=True))

    def blur(self, sigma: tuple[float, float] = (0.1, 2.0), *, width: int = 11, commutes: bool = False) -> Pipeline:
        """Blur with a random Gaussian; `commutes` lets crops and flips pass it, at the price of other borders."""
        function = partial(ops.blur, sigma=sigma, width=width)
        return self._with(Stage("blur", "neighbourhood", function, random=True, commutes=commutes))

    def greyscale(self) -> Pipeline:
        """Keep the brightness of each pixel, one channel."""
        return self._with(Stage("greyscale", "photometric", ops.greyscale))

    def to_float(self) -> Pipeline:
        """Convert uint8 to float32 in 0..1."""
        return self._with(Stage("to_float", "dtype", ops.to_float))

    def normalise(self, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> Pipeline:
        """Subtract the mean and divide by the deviation of each channel; gives float32."""
        return self._with(Stage("normalise", "photometric", partial(ops.normalise, mean=mean, std=std)))

    def tokenise(self, encode: Callable[[Any], Any]) -> Pipeline:
        """Turn text into ids with a function of your own."""
        return self._with(Stage("tokenise", "opaque", encode))

    def map(
        self,
        function: Callable[..., Any],
        *,
        kind: str = "opaque",
        random: bool = False,
        row_pure: bool = True,
        name: str | None = None,
    ) -> Pipeline:
        """Apply a function of your own; declare its `kind` to let it change places."""
        called = name or str(getattr(function, "__name__", type(function).__name__))
        return self._with(Stage(called, kind, function, random=random, row_pure=row_pure))

    def filter(self, keep: Callable[[Any], bool]) -> Pipeline:
        """Leave out the examples that `keep` says no to; their batches become smaller."""
        return self._with(Stage(f"filter {getattr(keep, '__name__', '')}".strip(), "filter", keep))

    def cache(self, num_bytes: int) -> Pipeline:
        """Keep what arrives here in memory, up to `num_bytes`, never evicted (CoorDL's static cache)."""
        if num_bytes < 0:
            raise InputError(f"num_bytes is {num_bytes}; a cache holds 0 or more. Raise it.")
        return self._with(Stage("cache", "cache", cache_bytes=num_bytes))

    def shuffle(self) -> Pipeline:
        """Read in another random order each epoch."""
        return Pipeline(self.source, self.stages, batch_size=self.batch_size, shuffled=True)

    def batch(self, batch_size: int) -> Pipeline:
        """Put so many examples into a batch, per rank."""
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; pass 1 or more.")
        return Pipeline(self.source, self.stages, batch_size=batch_size, shuffled=self.shuffled)

    def ops(self) -> tuple[Op, ...]:
        """Return what the planner is told: ids are places as written, 0 is the source."""
        return planned_ops("source", self.stages)

    def timed(self, index: int) -> dict[int, tuple[float, float, float]]:
        """Run one example and return operator -> (seconds, bytes in, bytes out)."""
        return Chain(self.source, self.stages).timed(index)

    def profile(self, n: int = 256) -> PipelineProfile:
        """Run `n` examples in this thread and return what each operator cost."""
        return measured.profile(self, n)

    def plan(self, resources: Resources | None = None, *, profile: PipelineProfile | None = None) -> PipelinePlan:
        """Return the best plan for `resources`, from a profile or from one made now."""
        return measured.plan(self, profile or self.profile(), resources)

    def ordered(self, plan: PipelinePlan) -> Pipeline:
        """Return the pipeline as planned: its order, and its cache. Raises `InputError` on a plan of another one."""
        by_id = {stage.id: stage for stage in self.stages}
        if sorted(plan.order) != [0, *sorted(by_id)]:
            raise InputError(f"the plan orders operators {list(plan.order)}, the pipeline has others. Plan it again.")
        place = {op: k for k, op in enumerate(plan.order)}
        wrong = [op for op in self.ops() if any(place[other] > place[op.id] for other in op.depends_on)]
        if wrong:
            raise InputError(f"the plan moves {wrong[0].name} before what it depends on. Plan this pipeline again.")
        stages = []
        for op in plan.order:
            stages += [by_id[op]] if op else []
            if op == plan.cache_after:
                stages.append(Stage("cache", "cache", cache_bytes=plan.cache_bytes + plan.cache_bytes // 50))
        return Pipeline(self.source, stages, batch_size=self.batch_size, shuffled=self.shuffled)

    def run(self, index: int, seed: int = 0, epoch: int = 0) -> Any:
        """Return one finished example, `None` when a filter drops it: what a loader of this seed delivers."""
        result = Chain(self.source, self.stages).run(index, _seed_of(seed, epoch, index))
        return None if result is DROPPED else result

    def check(self, plan: PipelinePlan, *, examples: int = 64, seed: int = 0) -> OrderCheck:
        """Run the first examples in the order as written and as planned, with equal draws, and compare them."""
        written, planned = Chain(self.source, self.stages), Chain(self.source, self.ordered(plan).stages)
        count = min(examples, len(self))
        gaps = []
        for index in range(count):
            one, other = (chain.run(index, _seed_of(seed, 0, index)) for chain in (written, planned))
            both = (one is DROPPED) + (other is DROPPED)
            gaps.append(measured.difference(one, other) if not both else 0.0 if both == 2 else float("inf"))
        return OrderCheck(count, not any(gaps), max(gaps, default=0.0))

    def loader(self, plan: PipelinePlan | None = None, **options: Any) -> PipelineLoader:
        """Return a loader of the pipeline, in order, cache and workers as planned when a plan is given.

        `options` are those of `headway.data.DataLoader`, and go before the plan.

        Besides: `workers` ("auto", "threads", "processes"), `on_error` ("raise", or "skip", counted in `skipped`).
        """
        planned = self if plan is None else self.ordered(plan)
        if plan is not None:
            options.setdefault("num_workers", plan.workers)
        options.setdefault("batch_size", self.batch_size or 1)
        if not ("sampler" in options or "batch_sampler" in options):
            options.setdefault("shuffle", self.shuffled)
        if "batch_sampler" in options:
            del options["batch_size"]
        return PipelineLoader(Chain(planned.source, planned.stages), name=self.fingerprint(), **options)

    def fingerprint(self) -> str:
        """Return what tells this data from other data: the source and the operators, in whatever order they run."""
        inner = getattr(self.source, "fingerprint", None)
        source = inner() if callable(inner) else type(self.source).__qualname__
        return f"{source}|{digest_of(f'{stage.id} {stage.name} {_settings(stage.function)}' for stage in self.stages)}"

    def _with(self, stage: Stage) -> Pipeline:
        numbered = replace(stage, id=len(self.stages) + 1)
        return Pipeline(self.source, (*self.stages, numbered), batch_size=self.batch_size, shuffled=self.shuffled)


def _settings(function: object) -> str:
    return str(sorted(function.keywords.items())) if isinstance(function, partial) else ""


def _seed_of(seed: int, epoch: int, index: int) -> int:
    return int(item_seeds(seed, epoch, np.array([index]), np.array([0]))[0])
