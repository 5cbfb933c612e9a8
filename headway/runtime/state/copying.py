"""The copy of a tensor into memory that is there already.

>>> slot = torch.zeros(3)
>>> copy_into(slot, torch.ones(3))
>>> slot.tolist()
[1.0, 1.0, 1.0]
"""

from __future__ import annotations

import torch

from headway.core.machine import streamed

STREAMED_THREADS = 2
"""Up to so many intra-op threads, one that goes past the caches takes as long as torch's at their best: two cores
hardly copy faster than one. Where others want the cores torch's threads wait for each other, many times as long."""


def copy_into(slot: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the host, past the caches where the memory is equal and torch's threads are few: training needs them."""
    plain = type(source) is torch.Tensor and source.device.type == slot.device.type == "cpu" and not source.is_conj()
    if (
        plain and source.dtype == slot.dtype and source.shape == slot.shape and not source.is_neg()
        and source.is_contiguous() and slot.is_contiguous() and torch.get_num_threads() <= STREAMED_THREADS
    ):  # fmt: skip
        streamed.copy(slot.data_ptr(), source.data_ptr(), slot.numel() * slot.element_size())
    else:
        slot.copy_(source)  # torch's threads share the work
