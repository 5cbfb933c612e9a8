"""Shared set-up of the test suite: one hypothesis profile, warmed kernels, no surprises from the environment."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("headway", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("headway")
