"""Selective-Backprop: how many examples are kept, which ones, and that nothing else of the training changes."""

import copy
import io
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.data.loader.loader import DataLoader
from headway.data.selection import TIES, LossSelector
from headway.data.torch_selection import WithIds, joined, scoring, taken
from tests.refusals import refused
from tests.spawn import on_ranks


def losses_of(step: int, size: int, tied: float = 0.0) -> np.ndarray:
    """Continuous losses, of which a fraction `tied` is zero."""
    rng = stream(2, "losses", step)
    return np.where(rng.random(size) < tied, 0.0, rng.exponential(size=size))


def kept_fraction(selector: LossSelector, tied: float, steps: int = 150, size: int = 128) -> float:
    kept = [selector.select(losses_of(step, size, tied), np.arange(size)) for step in range(steps)]
    return float(np.mean(kept))


@pytest.mark.parametrize("tied", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("beta", [1, 2, 3])
def test_one_in_beta_plus_one_examples_is_kept_however_many_losses_are_equal(beta, tied):
    three_sigma = 3 * (beta**0.5 / (beta + 1)) / (150 * 128) ** 0.5

    assert kept_fraction(LossSelector(beta, warmup=0), tied) == pytest.approx(1 / (beta + 1), abs=three_sigma)


def test_the_published_percentile_keeps_too_few_when_losses_are_equal():
    assert kept_fraction(LossSelector(1, warmup=0, ties="strict"), 0.8) == pytest.approx(0.18, abs=0.02)
    assert kept_fraction(LossSelector(1, warmup=0, ties="strict"), 0.0) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("ties", sorted(TIES))
@given(ranks=st.lists(st.integers(0, 100), min_size=2, max_size=2, unique=True), beta=st.floats(0, 9))
def test_a_chance_is_a_probability_between_those_of_the_ranks_it_covers(ties, ranks, beta):
    below, up_to = (np.array([rank / 100]) for rank in sorted(ranks))

    chance = TIES[ties](below, up_to, beta)

    assert below**beta - 1e-12 <= chance <= up_to**beta + 1e-12


def test_a_higher_loss_is_kept_more_often():
    selector = LossSelector(1, warmup=0)
    loss = np.arange(100.0)

    counts = np.sum([selector.select(loss, np.arange(100)) for _ in range(300)], axis=0)

    assert np.abs(counts / 300 - (loss + 0.5) / 100).max() < 0.12


def test_the_floor_is_kept_and_the_top_is_left_out():
    assert kept_fraction(LossSelector(3, warmup=0, floor=0.6), 0.0) > 0.6
    selector = LossSelector(0, warmup=0, ignore_top_fraction=0.1)
    loss = np.arange(1000.0)

    assert selector.select(loss, np.arange(1000)).tolist() == [True] * 900 + [False] * 100


def test_the_percentile_is_that_among_the_last_losses_of_all_batches():
    selector = LossSelector(9, history=1000, warmup=0)
    for step in range(10):
        selector.select(np.full(100, 5.0) + losses_of(step, 100), np.arange(100))

    assert not selector.select(np.zeros(100), np.arange(100)).any()
    for _ in range(10):
        selector.select(np.zeros(100), np.arange(100))
    assert 0 < selector.select(np.zeros(100), np.arange(100)).sum() < 30


def test_every_example_is_kept_in_its_warm_up_and_needs_no_forward_pass():
    selector = LossSelector(3, warmup=2)
    ids = np.arange(50)

    for _ in range(2):
        assert not selector.due(ids).any()
        assert selector.select([], ids, fresh=np.zeros(50, bool)).all()

    assert selector.due(ids).all()
    assert selector.select(losses_of(1, 50), ids).sum() < 40
    assert not selector.due([50, 51]).any()


def test_a_stale_loss_serves_as_many_appearances_as_was_said_and_belongs_to_its_example():
    selector = LossSelector(1, warmup=0, stale=3)
    loss = {example: float(example) for example in range(40)}
    rng = stream(4, "order")
    forwards = []
    for _ in range(9):
        ids = rng.permutation(40)
        due = selector.due(ids)
        forwards.append(int(due.sum()))
        selector.select([loss[int(example)] for example in ids[due]], ids, fresh=due)
        assert dict(zip(range(40), selector._known.look(np.arange(40))[2].tolist(), strict=True)) == loss

    assert forwards == [40, 0, 0] * 3
    assert selector.report()["forward_fraction"] == pytest.approx(1 / 3)


def split(values: np.ndarray, ranks: int) -> list[np.ndarray]:
    return [values[rank::ranks] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_examples_are_selected_whatever_order_they_come_in(ranks):
    """The global batch as one rank sees it, and as several ranks would deal it: the same examples."""
    plain, dealt = LossSelector(1, warmup=0, seed=5), LossSelector(1, warmup=0, seed=5)
    for step in range(6):
        ids = stream(9, step).permutation(300)[:60]
        loss = np.round(losses_of(step, 60), 1)
        order = np.concatenate(split(np.arange(60), ranks))
        one = plain.select(loss, ids)
        assert (dealt.select(loss[order], ids[order]) == one[order]).all()


def test_a_larger_batch_than_the_history_leaves_a_random_part_of_it():
    selector = LossSelector(1, history=64, warmup=0)
    selector.select(np.arange(1000.0), np.arange(1000))

    assert 300 < np.mean(selector.state_dict()["recent"]) < 700


class Digits(torch.utils.data.Dataset):
    """Ten inputs each of which is easy or hard to fit."""

    def __init__(self, size=40):
        rng = stream(1, "digits")
        self.x = torch.from_numpy(rng.normal(size=(size, 6)).astype(np.float32))
        self.y = self.x.sum(1) * torch.from_numpy(np.where(rng.random(size) < 0.3, 5.0, 0.1).astype(np.float32))

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers)


def loader(size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(WithIds(Digits()), size, shuffle=True, generator=generator)


def by_row(net):
    def score(batch):
        with scoring(net) as bare:
            return mse_loss(bare(batch[0]).squeeze(1), batch[1], reduction="none")

    return score


def train(net, batches):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(net(x).squeeze(1), y).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("options", [{"beta": 0}, {"beta": 2, "floor": 1.0}, {"beta": 3, "warmup": 99}])
def test_keeping_all_is_plain_training_bit_for_bit(options):
    selector, selected, plain = LossSelector(**options), model(), model()

    def never(batch):
        raise AssertionError("a forward pass that nobody needs")

    epochs, same = loader(7), loader(7)
    left = train(selected, (b for _ in range(3) for b in selector.train_batches(epochs, never)))
    right = train(plain, (batch for _ in range(3) for batch, _ in same))

    assert all(torch.equal(left[name], right[name]) for name in right)


def test_every_kept_example_is_trained_once_in_full_batches_but_the_last():
    selector, net = LossSelector(2, warmup=0), model()
    shown, kept = {tuple(x.tolist()): k for k, (x, _) in enumerate(Digits())}, Counter()
    decide = selector.decide

    def noted(losses, ids, **options):
        flags, parts = decide(losses, ids, **options)
        kept.update(np.asarray(ids)[flags].tolist())
        return flags, parts

    selector.decide = noted
    trained, sizes = Counter(), []
    for _ in range(4):
        sizes.append([])
        for x, y in selector.train_batches(loader(), by_row(net)):
            trained.update(shown[tuple(row.tolist())] for row in x)
            sizes[-1].append(len(y))

    assert trained == kept
    assert all(size == 8 for epoch in sizes for size in epoch[:-1])
    assert sum(map(sum, sizes)) == selector.num_kept < selector.num_candidates == 160


def test_scoring_leaves_no_trace_in_the_model_or_the_generators():
    net = model()
    net[1].eval()  # a module that the user has frozen
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()

    losses = by_row(net)((Digits().x, Digits().y))
    with scoring(net):
        torch.rand(3)

    assert torch.equal(torch.get_rng_state(), state)
    assert not losses.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [module.training for module in net] == [True, False, True, True]
    assert net.training


def test_a_state_goes_on_bit_for_bit_in_the_middle_of_an_epoch():
    def whole(interrupt):
        selector, net, found = LossSelector(1, stale=2, warmup=1, seed=3), model(), []
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for epoch in range(4):
            candidates = iter(loader(seed=epoch))
            batches = selector.train_batches(Rest(candidates), by_row(net))
            for number in itertools.count():
                batch = next(batches, None)
                if batch is None:
                    break
                found.append(batch)
                optimizer.zero_grad()
                mse_loss(net(batch[0]).squeeze(1), batch[1]).backward()
                optimizer.step()
                if interrupt and number == 1:
                    file = io.BytesIO()
                    torch.save(selector.state_dict(), file)
                    file.seek(0)
                    selector = LossSelector(1, stale=2, warmup=1, seed=3)
                    selector.load_state_dict(torch.load(file, weights_only=True))
                    batches = selector.train_batches(Rest(candidates), by_row(net))
        return found, selector.state_dict()

    torch.manual_seed(7)
    straight, end = whole(False)
    torch.manual_seed(7)
    broken, same = whole(True)

    assert len(straight) == len(broken)
    assert all(torch.equal(a, b) for x, y in zip(straight, broken, strict=True) for a, b in zip(x, y, strict=True))
    assert {**end, "queue": []} == {**same, "queue": []}


class Rest:
    """What is left of a loader's epoch."""

    batch_size = 8

    def __init__(self, candidates):
        self.candidates = candidates

    def __iter__(self):
        return self.candidates


def test_loader_and_selector_go_on_together_from_their_states():
    def trained(interrupt_at):
        found, state = [], None
        while True:
            batches = DataLoader(WithIds(Digits()), 8, shuffle=True, seed=2)
            selector = LossSelector(1, warmup=0, seed=4)
            if state is not None:
                selector.load_state_dict(state[0])
                batches.load_state_dict(state[1])
            state = None
            epochs = (x for _ in range(3) for x in selector.train_batches(batches, lambda b: b[0][:, 0].abs()))
            for x, _ in epochs:
                found.append(x)
                if len(found) == interrupt_at:
                    state = selector.state_dict(), batches.state_dict()
                    break
            if state is None:
                return found

    straight = trained(None)

    assert len(straight) > 6
    for interrupt_at in range(1, 6):
        broken = trained(interrupt_at)
        assert len(broken) >= len(straight)
        assert all(torch.equal(a, b) for a, b in zip(straight, broken, strict=False))


def select_on_a_rank(steps):
    selector = LossSelector(1, warmup=1, seed=5)
    found = []
    for step in range(steps):
        ids = stream(9, step).permutation(80)[:50]
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        kept = selector.select(losses_of(step, 50)[mine], ids[mine])
        found.append(ids[mine][kept].tolist())
    return found, selector.state_dict()["recent"]


def test_ranks_together_select_what_one_rank_selects():
    alone = LossSelector(1, warmup=1, seed=5)
    expected = []
    for step in range(5):
        ids = stream(9, step).permutation(80)[:50]
        expected.append(sorted(ids[alone.select(losses_of(step, 50), ids)].tolist()))

    answers = on_ranks(select_on_a_rank, 3, 5)

    together = [sorted(itertools.chain(*parts)) for parts in zip(*(found for found, _ in answers), strict=True)]
    assert together == expected
    assert all(recent == alone.state_dict()["recent"] for _, recent in answers)


def train_on_a_rank(epochs):
    selector, net = LossSelector(1, warmup=1), DistributedDataParallel(model()[0])
    net_score = model()[0]
    data = Digits(41)
    mine = torch.utils.data.Subset(WithIds(data), range(dist.get_rank(), 41, dist.get_world_size()))
    batches = torch.utils.data.DataLoader(mine, 5)
    counts, rows = [], []
    for _ in range(epochs):
        counts.append(0)
        for x, y in selector.train_batches(batches, lambda batch: net_score(batch[0]).sum(1).abs().detach()):
            net(x).sum().backward()  # a collective: ranks with other numbers of batches would hang
            counts[-1] += 1
            rows += [round(float(value), 5) for value in y]
    return counts, rows, selector.num_kept, selector.queued


def test_ranks_get_equally_many_batches_and_share_what_is_left():
    answers = on_ranks(train_on_a_rank, 2, 3)

    (counts, first, kept, queued), (same, second, also, _) = answers
    assert counts == same
    assert kept == also == len(first) + len(second) + sum(queued)
    assert sum(queued) < 2


@given(st.lists(st.integers(0, 5), max_size=9), st.integers(0, 6))
def test_examples_taken_and_joined_are_those_of_the_batch(rows, cut):
    batch = {"x": torch.arange(12).view(6, 2), "pair": (np.arange(6), ["a", "b", "c", "d", "e", "f"])}

    part = taken(batch, np.array(rows, np.int64))

    assert part["x"].tolist() == [[2 * row, 2 * row + 1] for row in rows]
    assert part["pair"][0].tolist() == rows
    assert part["pair"][1] == ["abcdef"[row] for row in rows]
    if 0 < cut < 6:
        again = joined([taken(batch, np.arange(cut)), taken(batch, slice(cut, 6))])
        assert torch.equal(again["x"], batch["x"])
        assert again["pair"][1] == batch["pair"][1]


def test_losses_that_are_no_numbers_are_named_or_dropped():
    loss, ids = np.array([1.0, np.nan, np.inf, 2.0]), [7, 8, 9, 10]

    with pytest.raises(InputError, match=r"the loss of examples 8, 9 is NaN or infinite.*non_finite='drop'"):
        LossSelector(1).select(loss, ids)
    selector = LossSelector(1, warmup=1, non_finite="drop")
    assert selector.select(loss, ids).tolist() == [True, False, False, True]
    assert selector.report()["num_dropped"] == 2
    assert sorted(selector.state_dict()["recent"]) == [1.0, 2.0]


class Plain:
    """A loader of one thing."""

    batch_size = 2

    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        return iter([self.batch])


test_bad_input_is_one_clear_error = refused(
    (lambda: LossSelector(-1), "beta is -1; it must be 0"),
    (lambda: LossSelector(float("nan")), "beta is nan"),
    (lambda: LossSelector(history=0), "history is 0"),
    (lambda: LossSelector(stale=0), "stale is 0"),
    (lambda: LossSelector(warmup=1.5), "warmup is 1.5"),
    (lambda: LossSelector(floor=2), "floor is 2"),
    (lambda: LossSelector(ties="midd"), "Did you mean 'mid'"),
    (lambda: LossSelector(non_finite="skip"), "Choose one of: drop, error"),
    (lambda: LossSelector().select([1.0], [1, 2]), "one loss per fresh example.*reduction='none'"),
    (lambda: LossSelector().select(torch.tensor(3.0), [1]), "reduction='none'"),
    (lambda: LossSelector().select([1.0], [0.5]), "pass .B. whole numbers"),
    (lambda: LossSelector(warmup=0).select([], [3], fresh=[False]), "no loss is known of examples 3"),
    (lambda: LossSelector(1).load_state_dict(LossSelector(2).state_dict()), "another beta"),
    (lambda: LossSelector(1).load_state_dict({}), "version None"),
    (lambda: next(LossSelector().train_batches(Plain(torch.ones(2)), sum)), "gives a Tensor, not .batch, ids."),
    (lambda: next(LossSelector().train_batches([], sum)), "Pass batch_size="),
    (lambda: taken([torch.ones(2), object()], [0]), "a batch holds a object"),
)


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_ids_that_int64_cannot_hold_are_refused_and_unsigned_ones_below_are_themselves(number):
    selector = LossSelector()
    with pytest.raises(InputError, match=rf"ids hold {number}; pass whole numbers below 2\^63.*ids >> 1"):
        selector.due(np.array([1, number], np.uint64))
    with pytest.raises(InputError, match=rf"ids hold {number}"):
        selector.select([1.0, 2.0], np.array([1, number], np.uint64))

    assert len(selector.select([1.0, 2.0], np.array([1, 2**63 - 1], np.uint64))) == 2
    assert selector.state_dict()["known"]["ids"] == [1, 2**63 - 1]
