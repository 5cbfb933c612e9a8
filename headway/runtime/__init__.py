"""Runs a training script, records it, supervises it, and turns the recording into a run folder.

`launch` starts ranks and supervises them, `finalise` turns their rings into
Parquet, `doctor` checks the host beforehand, `pool` runs functions on
several ranks for tests and benchmarks. Importing this package loads no torch.

>>> import sys, headway.runtime.launching.launch
>>> headway.runtime.launching.launch.LaunchOptions().is_plain
True
"""
