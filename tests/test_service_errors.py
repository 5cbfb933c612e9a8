"""What a data server refuses, and says; ranks that disagree, come late or come back."""

import numpy as np
import pytest

from headway.core.errors import InputError
from headway.data.orders.job_order import DataShareError
from headway.data.service.jobs import JobTerms
from headway.data.service.stock import DataServer
from tests.data_clients import PRINT, served, work_off


def joined(service, **terms):
    service.join("a", fingerprint=PRINT, terms=JobTerms(**({"batch_size": 2, "world_size": 2} | terms)))
    return service


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda s: joined(s), InputError, "job 'a' is here already. Choose another name"),
        (
            lambda s: s.join("b", fingerprint="cats", terms=JobTerms(1)),
            DataShareError,
            "reads 'cats'.*serves 'numbers'",
        ),
        (lambda s: s.join("b", fingerprint=PRINT, terms=JobTerms(1), items=[]), InputError, "0 items"),
        (lambda s: s.join("b", fingerprint=PRINT, terms=JobTerms(1), items=[9]), InputError, "item 9, outside"),
        (lambda s: s.join("b", fingerprint=PRINT, terms=JobTerms(1), items=[1, 1]), InputError, "lists an item twice"),
        (lambda s: s.attach("b", 0), InputError, "unknown job 'b'"),
        (lambda s: s.attach("a", 2), InputError, "rank is 2; job 'a' has ranks 0 to 1"),
        (lambda s: s.attach("a", 0), InputError, "rank 0 of job 'a' is here already"),
        (lambda s: s.begin("a", 1, epoch=0), InputError, "rank 1 of job 'a' begins a pass, but is not here"),
        (lambda s: s.take("a", 0), InputError, "takes a batch outside a pass. Call attach and begin first"),
        (
            lambda s: s.begin("a", 0, epoch=0, remaining=[0, 17]),
            InputError,
            "job 'a' does not read item 17. Pass a part",
        ),
        (lambda s: s.leave("b"), InputError, "unknown job 'b'"),
        (lambda s: JobTerms(0), InputError, "batch_size is 0"),
        (lambda s: JobTerms(1, tail="shrt"), InputError, "Did you mean 'short'"),
        (lambda s: DataServer(window=0), InputError, "window is 0"),
        (lambda s: DataServer(split="even"), InputError, "split is 'even'"),
        (lambda s: served(0), InputError, "size is 0"),
        (lambda s: served(order="sharde"), InputError, "Did you mean 'shared'"),
        (lambda s: served(forms=("decoded", "encoded")), InputError, "in that order, not 'encoded' last"),
        (lambda s: served(forms=("raw",)), InputError, "unknown form 'raw'"),
    ],
)
def test_bad_input_is_one_clear_error_and_changes_nothing(act, error, message):
    service = joined(served(8))
    service.attach("a", 0)
    with pytest.raises(error, match=message):
        act(service)

    assert service.jobs == ["a"]
    service.begin("a", 0, epoch=0)
    assert work_off(service) == 4


def test_ranks_that_disagree_are_told_so():
    service = joined(served(8))
    for rank in (0, 1):
        service.attach("a", rank)
    service.begin("a", 0, epoch=3)
    for wrong in ({"epoch": 4}, {"epoch": 3, "remaining": [1]}, {"epoch": 3, "history": [np.array([1])]}):
        with pytest.raises(InputError, match="elsewhere than the ranks before it"):
            service.begin("a", 1, **wrong)
    service.begin("a", 1, epoch=3)
    service.detach("a", 1)
    with pytest.raises(InputError, match="rank 1 of job 'a' has left"):
        service.attach("a", 1)


def test_a_rank_that_comes_after_the_others_have_gone_gets_its_part_of_what_they_had():
    service, terms = served(20), JobTerms(batch_size=2, world_size=2)
    service.join("a", fingerprint=PRINT, terms=terms)
    had = []
    for rank in (0, 1):
        assert not service.is_outlived("a", rank, terms)
        service.attach("a", rank)
        service.begin("a", rank, epoch=0)
        for _ in range(5):
            work_off(service)
            had += service.take("a", rank).items.tolist()
        service.detach("a", rank)
    assert sorted(had) == list(range(20))
    assert service.jobs == []


def test_a_name_is_free_again_once_nobody_of_its_job_is_here_and_one_who_was_comes_back():
    service, terms = served(20), JobTerms(batch_size=2, world_size=2)
    service.join("a", fingerprint=PRINT, terms=terms)
    service.attach("a", 0)
    assert not service.is_outlived("a", 0, terms)
    service.detach("a", 0)
    assert service.is_outlived("a", 0, terms)
    assert service.is_outlived("a", 0, JobTerms(batch_size=4, world_size=1))
    assert not service.is_outlived("a", 1, terms)
    assert not service.is_outlived("b", 0, terms)


def test_histories_that_differ_are_an_error():
    service = joined(served(8))
    for rank in (0, 1):
        service.attach("a", rank)
    service.begin("a", 0, epoch=0, history=[np.array([1, 2])])
    with pytest.raises(InputError, match="rank 1 of job 'a' had other batches of epoch 0"):
        service.begin("a", 1, epoch=0, history=[np.array([1, 3])])


def test_a_result_without_its_last_form_is_an_error():
    service = joined(served(8))
    service.attach("a", 0)
    service.begin("a", 0, epoch=0)
    with pytest.raises(InputError, match="pass its last form, 'decoded', too"):
        service.done(service.next_work(), {"encoded": b"x"})
