"""A stand-in for tqdm that ends a loop after WORLD_STEPS steps, for scripts whose length is a constant."""

import itertools
import os


def tqdm(steps, **_display):
    """Return the first WORLD_STEPS steps."""
    return itertools.islice(steps, int(os.environ["WORLD_STEPS"]))
