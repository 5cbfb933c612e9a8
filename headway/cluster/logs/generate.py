"""Gavel's generator of jobs: any seed, equal bit for bit to the published one.

Per job, in this order (random.Random(seed + 2)): the gang size from uniform
(0, 1), drawn even when all jobs have one device; random() >= 0.8 for a long
job of 60 * 10^U(3, 4) seconds, otherwise 60 * 10^U(1.5, 3); one of 26 models,
again until it can be distributed where the gang is larger than 1. Steps are
seconds times the rate on a v100. Gaps between arrivals come from
random.Random(seed + 3): -ln(1 - U) hours at one job per hour, the first job
at 0. Source: Narayanan et al., OSDI 2020, and the code released with it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping

import numpy as np

from headway.cluster.model import Jobs

FAMILIES = (
    ("ResNet-18", (16, 32, 64, 128, 256)), ("ResNet-50", (16, 32, 64, 128)), ("Transformer", (16, 32, 64, 128, 256)),
    ("LM", (5, 10, 20, 40, 80)), ("Recommendation", (512, 1024, 2048, 4096, 8192)),
)  # fmt: skip
MODELS = (*(f"{name} (batch size {size})" for name, sizes in FAMILIES for size in sizes), "A3C", "CycleGAN")
"""26 models, in the order in which they are drawn from."""

NUM_DISTRIBUTED = 19
"""The first ones, four families, may run on more than one device."""

Scale = tuple[tuple[float, int], ...]
SCALES: Scale = ((0.7, 1), (0.8, 2), (0.95, 4), (math.inf, 8))
"""Gang sizes by the draw below which they are chosen: 70 % one device, 10 % two, 15 % four, 5 % eight."""


def generate(
    num_jobs: int, seed: int, v100: Mapping[tuple[str, int], float], *, jobs_per_hour: float, multi: bool
) -> Jobs:
    """Return jobs of the generator; `v100` maps (model, scale) to steps/s there. 0 jobs per hour: all at time 0."""
    rng, gaps = random.Random(seed + 2), random.Random(seed + 3)
    models, scales, steps = [], [], []
    for _ in range(num_jobs):
        draw = rng.uniform(0, 1)
        # The published rule has 0.8 itself in the lower class; elsewhere borders belong to the upper one.
        scale = 2 if draw == 0.8 else next(size for border, size in SCALES if draw < border)
        long = rng.random() >= 0.8
        duration_s = 60 * 10 ** (rng.uniform(3, 4) if long else rng.uniform(1.5, 3))
        scale = scale if multi else 1
        model = rng.choice(MODELS)
        while scale > 1 and MODELS.index(model) >= NUM_DISTRIBUTED:
            model = rng.choice(MODELS)
        models.append(model)
        scales.append(scale)
        steps.append(duration_s * v100[model, scale])
    # Seconds are added up with the rate as the published code divides by it: 1 / (3600 / rate), rounding included.
    per_s = 1.0 / (3600.0 / jobs_per_hour) if jobs_per_hour > 0 else math.inf
    gaps_s = (-math.log(1.0 - gaps.random()) / per_s for _ in range(num_jobs - 1))
    arrival_s = np.array(list(itertools.accumulate(gaps_s, initial=0.0))[:num_jobs])
    return Jobs(
        [str(index) for index in range(num_jobs)], np.array(scales, np.int64), np.array(steps), arrival_s, models
    )
