"""What ranks agree on, through their store."""

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from headway.checkpoint.restores.exchange import KEPT_WORDS, Agreement
from headway.core.errors import InputError
from tests.spawn import on_ranks


def _words(root):
    first, second = Agreement(root), Agreement(root)
    rank = dist.get_rank()
    heard = [first.word("next", f"{rank}-{k}".__str__) for k in range(3)]
    well = first.failure("restored", None)
    ill = first.failure("restored", "damage" if rank == 1 else None)
    again = first.failure("restored", None)
    return first.attempt, second.attempt, heard, well, ill, again


def test_all_ranks_hear_what_rank_0_says_in_its_order_and_of_every_failure():
    answers = on_ranks(_words, 3, "/some/root")

    first, second, heard, well, ill, again = answers[0]
    assert answers[1:] == answers[:1] * 2
    assert first != second
    assert heard == ["0-0", "0-1", "0-2"]
    assert (well, ill, again) == (None, "rank 1: damage", None)


def _many_words(root):
    agreement = Agreement(root)
    for _ in range(3):
        for _ in range(KEPT_WORDS // 2):
            last = agreement.word("next", lambda: "5")
        agreement.failure("met", None)
    store, number = _get_default_store(), 3 * KEPT_WORDS // 2
    return last, [store.check([f"{agreement._prefix}/next/{k}"]) for k in (1, number - KEPT_WORDS, number)]


def test_words_that_every_rank_has_heard_long_ago_leave_the_store():
    assert on_ranks(_many_words, 2, "/some/root") == [("5", [False, False, True])] * 2


def test_a_rank_without_a_process_group_among_others_is_told_to_make_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")

    with pytest.raises(InputError, match=r"WORLD_SIZE is 4.*Call torch.distributed.init_process_group"):
        Agreement("/some/root")
