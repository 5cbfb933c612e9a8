"""The memory of snapshots: which image a save takes, and how seldom one is made."""

from __future__ import annotations

from itertools import pairwise

import torch

from headway.checkpoint.runtime.arenas import Arenas
from headway.checkpoint.runtime.image import Part

PARTS = (Part("w", torch.float32, (3,), (0,), (3,)),)


def test_a_save_takes_no_image_that_is_busy_and_the_committed_one_last():
    arenas = Arenas(3)
    taken = [
        arenas.take(PARTS, 0, busy=busy, spare=spare)[0]
        for busy, spare in [(set(), None), ({0}, None), (set(), 0), ({1, 2}, 0), ({0, 1}, 2)]
    ]
    arenas.close()

    assert taken == [0, 1, 1, 0, 2]


def test_objects_that_grow_at_every_save_seldom_need_an_image_anew():
    arenas = Arenas(1)
    images = [arenas.take(PARTS, 70_000 * number, busy=set(), spare=None)[1] for number in range(60)]
    num_made = 1 + sum(earlier is not later for earlier, later in pairwise(images))
    room = images[-1].tail_bytes
    arenas.close()

    assert num_made <= 15
    assert 59 * 70_000 <= room <= 1.5 * 59 * 70_000


def test_an_image_for_other_parts_keeps_the_elements_that_both_have():
    arenas = Arenas(1)
    number, image = arenas.take(PARTS, 0, busy=set(), spare=None)
    image.slots[0].copy_(torch.tensor([1.0, 2.0, 3.0]))
    arenas.untold.clear()
    other = arenas.carry(number, (Part("v", torch.int8, (2,), (0,), (2,)), *PARTS), 0)
    kept = other.slots[1].tolist()
    arenas.close()

    assert (kept, arenas.untold) == ([1.0, 2.0, 3.0], {number})
