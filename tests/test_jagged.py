"""Deduplicated jagged features: what goes in comes out bit for bit, and only equal rows share storage."""

import sys
import types
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.data import jagged
from headway.data.jagged import DedupBatch, DedupJagged, Jagged, dedup, expand
from headway.data.torch_jagged import MODES, kjt_arguments, on_unique
from tests.refusals import refused


@st.composite
def batches(draw, num_rows=None, dtypes=(np.int64, np.int32, np.uint8, np.float32)):
    """A jagged batch that repeats rows often: drawn from a few different ones, some of them empty."""
    dtype = draw(st.sampled_from(dtypes))
    content = npst.arrays(dtype, st.integers(0, 4), elements=npst.from_dtype(np.dtype(dtype)))
    pool = draw(st.lists(content, min_size=1, max_size=5))
    rows = draw(st.lists(st.sampled_from(range(len(pool))), max_size=12)) if num_rows is None else None
    if rows is None:
        rows = draw(st.lists(st.sampled_from(range(len(pool))), min_size=num_rows, max_size=num_rows))
    weights = None
    if draw(st.booleans()):
        kinds = [draw(st.sampled_from([1.0, 2.0])) for _ in rows]
        weights = [np.full(len(pool[row]), kind) for row, kind in zip(rows, kinds, strict=True)]
    return Jagged.from_rows([pool[row] for row in rows], weights, dtype=dtype)


def contents(batch: Jagged) -> list[tuple[bytes, bytes]]:
    weights = np.zeros(len(batch.values)) if batch.weights is None else batch.weights
    cuts = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    return [(batch.values[a:b].tobytes(), weights[a:b].tobytes()) for a, b in cuts]


@given(batches())
def test_a_batch_comes_back_bit_for_bit_and_each_different_row_is_stored_once(batch):
    once = dedup(batch)

    assert once.expand() == batch
    assert expand(once) == batch
    assert once.num_unique == len(set(contents(batch))) <= len(batch)
    assert contents(once.unique) == list(dict.fromkeys(contents(batch)))


@given(batches())
def test_deduplicating_twice_changes_nothing(batch):
    again = dedup(dedup(batch).unique)

    assert again.inverse.tolist() == list(range(again.num_unique))
    assert again.unique == dedup(batch).unique


@given(st.integers(0, 8).flatmap(lambda n: st.tuples(*[batches(num_rows=n)] * 3)))
def test_features_of_a_group_share_one_inverse_and_a_row_repeats_only_if_all_of_them_do(features):
    batch = dict(zip("abc", features, strict=True))

    found = dedup(batch, groups=[["c", "a"]])

    assert found.expand() == batch
    assert list(found) == ["a", "b", "c"]
    assert found["a"].inverse is found["c"].inverse
    together = list(zip(contents(batch["a"]), contents(batch["c"]), strict=True))
    assert found["a"].num_unique == found["c"].num_unique == len(set(together))
    assert found["b"].num_unique == len(set(contents(batch["b"])))


@given(batches(), st.data())
def test_rows_taken_of_a_deduplicated_batch_are_those_of_the_batch(batch, data):
    rows = data.draw(st.lists(st.integers(0, max(0, len(batch) - 1)), max_size=10 if len(batch) else 0))

    part = dedup(batch).take(rows)

    assert part.expand() == batch.take(rows)
    assert sorted(set(part.inverse.tolist())) == list(range(part.num_unique))


@given(batches(), st.integers(0, 12))
def test_a_batch_cut_in_two_and_joined_again_is_the_batch(batch, cut):
    parts = [batch.take(np.arange(min(cut, len(batch)))), batch.take(np.arange(min(cut, len(batch)), len(batch)))]

    assert Jagged.concat(parts) == batch
    assert Jagged.concat([dedup(part).expand() for part in parts]) == batch


@given(batches(), st.sampled_from([8, 0]))
def test_a_hash_that_collides_mixes_no_rows_up(batch, digits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jagged.xxhash, "xxh3_128_digest", lambda row: bytes(row)[:digits])
        assert dedup(batch).expand() == batch
        assert dedup({"x": batch, "y": batch}, [["x", "y"]]).expand() == {"x": batch, "y": batch}


def test_rows_that_differ_in_bits_stay_apart_even_where_they_compare_equal():
    batch = Jagged.from_rows([[0.0], [-0.0], [np.nan], [np.nan]], dtype=np.float64)

    assert dedup(batch).inverse.tolist() == [0, 1, 2, 2]
    assert dedup(batch).expand() == batch


def test_entries_may_be_vectors():
    batch = Jagged(np.arange(12.0).reshape(6, 2) % 4, [0, 2, 2, 4, 6])

    assert dedup(batch).inverse.tolist() == [0, 1, 0, 0]
    assert dedup(batch).expand() == batch


@given(batches(dtypes=(np.int64, np.int32, np.uint8)), st.sampled_from(sorted(MODES)))
def test_a_pooled_lookup_of_unique_rows_is_bit_equal_to_that_of_all(batch, mode):
    weight = torch.from_numpy(stream(1, "table").normal(size=(16, 5)).astype(np.float32))
    weights = batch.weights if mode == "sum" else None
    batch = Jagged(np.abs(batch.values.astype(np.int64)) % 16, batch.offsets, weights)

    found = dedup(batch).lookup(weight, mode)

    per_entry = None if weights is None else torch.from_numpy(weights)
    plain = torch.nn.functional.embedding_bag(
        torch.from_numpy(batch.values), weight, torch.from_numpy(batch.offsets), mode=mode,
        per_sample_weights=per_entry, include_last_offset=True,
    )  # fmt: skip
    assert found.shape == (len(batch), 5)
    assert torch.equal(found, plain)


def test_a_lookup_is_the_obvious_one_and_its_gradient_that_of_all_rows():
    weight = torch.arange(12.0).view(4, 3).requires_grad_()
    once = dedup(Jagged.from_rows([[1, 2], [3], [1, 2], []]))

    found = once.lookup(weight)
    found.sum().backward()

    assert found.tolist() == [[9, 11, 13], [9, 10, 11], [9, 11, 13], [0, 0, 0]]
    assert weight.grad[:, 0].tolist() == [0, 2, 2, 1]


def test_a_tower_over_unique_rows_expands_to_that_of_all_rows():
    rng = stream(5, "tower")
    pool = [rng.integers(0, 50, size=rng.integers(0, 6)) for _ in range(7)]
    batch = Jagged.from_rows([pool[k] for k in rng.integers(0, 7, size=64)])
    tower, table = torch.nn.Linear(4, 3), torch.randn(50, 4)

    def pooled(values, offsets, _):
        return torch.segment_reduce(tower(table[values]).relu(), "sum", offsets=offsets, axis=0)

    assert torch.allclose(on_unique(dedup(batch), pooled), on_unique(batch, pooled), atol=1e-6)


def test_a_row_pure_transform_runs_on_unique_rows_only():
    batch = Jagged.from_rows([[5, 6], [7], [5, 6], [5, 6]])
    rows_seen = []

    def last_of_each(rows):
        rows_seen.append(len(rows))
        return Jagged(rows.values[rows.offsets[1:] - 1] % 5, np.arange(len(rows) + 1))

    after = dedup(batch).transform(last_of_each)

    assert after.expand() == Jagged.from_rows([[1], [2], [1], [1]])
    assert max(rows_seen) == 2


class Negatives:
    """A random transform whose generator is its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, rows):
        self.rng.random()
        return rows


def centred(rows):
    return Jagged(rows.values - rows.values.mean().astype(np.int64), rows.offsets)


def noisy(rows):
    return Jagged(np.random.randint(0, 9, len(rows.values)), rows.offsets)


test_a_transform_that_is_not_row_pure_is_refused = refused(
    (Negatives(), "Negatives is random .draws from own."),
    (noisy, "noisy is random .draws from numpy."),
    (centred, "centred looks at other rows of the batch. Call it on expand"),
    (lambda rows: rows.take([]), "looks at other rows|made 0 rows"),
    by=dedup(Jagged.from_rows([[1, 9], [2, 4], [1, 9]])).transform,
)


def test_a_transform_that_shows_only_later_that_it_is_impure_ends_there_and_is_said_once():
    """Rows beyond the 16 of the first probe, and values that the first batches lack, are looked at too."""

    def by_mean_of_large_ones(rows):
        large = rows.values > 1000
        return Jagged(rows.values - (rows.values[large].mean().astype(np.int64) if large.any() else 0), rows.offsets)

    plain = [dedup(Jagged.from_rows([[k], [k + 7], [k]])) for k in range(20)]
    large = Jagged.from_rows([[2000 + k // 2, 5] for k in range(64)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in plain:
            assert batch.transform(by_mean_of_large_ones).expand() == batch.expand()
    with pytest.warns(RuntimeWarning, match=r"by_mean_of_large_ones is not row-pure.*Call it on expand"):
        first = dedup(large).transform(by_mean_of_large_ones)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = dedup(large).transform(by_mean_of_large_ones)

    assert first.expand() == second.expand() == by_mean_of_large_ones(large)


def test_the_first_probe_looks_at_rows_all_over_the_batch():
    """An impurity in the second half of a batch: found by sample, not missed behind the first 16 rows."""

    def by_mean_of_late_ones(rows):
        late = rows.values >= 32
        return Jagged(rows.values - (rows.values[late].mean().astype(np.int64) if late.any() else 0), rows.offsets)

    with pytest.raises(InputError, match="looks at other rows"):
        dedup(Jagged.from_rows([[k] for k in range(64)])).transform(by_mean_of_late_ones)


def clustered(repeats: float, sessions: int = 2500, rows_per_session: int = 16) -> Jagged:
    """Rows of sessions in order; each repeats the row before it with probability `repeats`."""
    rng = stream(3, "sessions", int(100 * repeats))
    changed = rng.random((sessions, rows_per_session)) >= repeats
    changed[:, 0] = True
    lists = rng.integers(0, 1 << 40, size=(int(changed.sum()), 8))
    values = lists[np.cumsum(changed) - 1]
    return Jagged(values.reshape(-1), np.arange(len(values) + 1) * 8)


@pytest.mark.parametrize("repeats", [0.95, 0.9, 0.8, 0.5])
def test_the_dedup_factor_of_clustered_sessions_is_the_published_formula(repeats):
    assert dedup(clustered(repeats)).factor == pytest.approx(16 / (1 + 15 * (1 - repeats)), rel=0.03)


def test_torchrec_gets_unique_rows_with_strides_and_inverse_indices():
    batch = dedup({"a": Jagged.from_rows([[1], [1], [2, 3]]), "b": Jagged.from_rows([[4], [5], [4]])})

    arguments = kjt_arguments(batch)

    assert arguments["keys"] == ["a", "b"]
    assert arguments["values"].tolist() == [1, 2, 3, 4, 5]
    assert arguments["lengths"].tolist() == [1, 2, 1, 1]
    assert arguments["stride_per_key_per_rank"] == [[2], [2]]
    assert arguments["inverse_indices"][0] == ["a", "b"]
    assert arguments["inverse_indices"][1].tolist() == [[0, 0, 1], [0, 1, 0]]
    assert kjt_arguments(batch, dedup=False)["lengths"].tolist() == [1, 1, 2, 1, 1, 1]
    assert "inverse_indices" not in kjt_arguments(batch, dedup=False)


def test_the_tensors_that_torchrec_gets_are_built_by_its_own_class(monkeypatch):
    module = types.ModuleType("torchrec.sparse.jagged_tensor")
    module.KeyedJaggedTensor = lambda **arguments: ("its class", sorted(arguments))
    monkeypatch.setitem(sys.modules, "torchrec", types.ModuleType("torchrec"))
    monkeypatch.setitem(sys.modules, "torchrec.sparse", types.ModuleType("torchrec.sparse"))
    monkeypatch.setitem(sys.modules, "torchrec.sparse.jagged_tensor", module)

    made = dedup({"a": Jagged.from_rows([[1], [1]])}).to_kjt()

    assert made == (
        "its class", ["inverse_indices", "keys", "lengths", "stride_per_key_per_rank", "values", "weights"]
    )  # fmt: skip


ROWS = Jagged.from_rows([[1, 2], [3]])
WEIGHTED = Jagged.from_rows([[1, 2], [3]], [[1, 1], [1]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Jagged(np.arange(3), [0, 2, 1, 3]), "offsets fall behind row 1"),
        (lambda: Jagged(np.arange(3), [0, 2]), "offsets run from 0 to 2, but there are 3 values"),
        (lambda: Jagged(np.arange(3), [1, 3]), "offsets run from 1"),
        (lambda: Jagged(np.arange(3), []), "offsets have shape"),
        (lambda: Jagged(np.arange(3), [0.0, 3.0]), "type float64"),
        (lambda: Jagged(np.array(["a", None]), [0, 2]), "values have shape"),
        (lambda: Jagged(np.arange(3), [0, 3], np.ones(2)), "Pass one per value"),
        (lambda: Jagged.from_rows([[1], [2]], [[1.0], [1.0, 2.0]]), "one weight per entry"),
        (lambda: Jagged.concat([ROWS, WEIGHTED]), "cannot be joined"),
        (lambda: ROWS.take([2]), "outside 0 to 1"),
        (lambda: DedupJagged(np.arange(3), [0, 3], [0, 1]), "inverse points at rows 0 to 1 of 1"),
        (lambda: DedupJagged(np.arange(3), [0, 3], [-1]), "inverse points at rows -1"),
        (lambda: DedupJagged(np.arange(3), [0, 3], [0.5]), "inverse has shape"),
        (lambda: dedup({"a": ROWS, "b": ROWS.take([0])}), "a 2, b 1"),
        (lambda: dedup({"a": ROWS}, [["a", "x"]]), "groups: x is no feature"),
        (lambda: dedup({"a": ROWS}, [["a"], ["a"]]), "groups: a is no feature, or stands twice"),
        (lambda: dedup([[1, 2]]), "list is no Jagged"),
        (lambda: dedup(ROWS).take([7]), "outside 0 to 1"),
        (lambda: dedup(ROWS).lookup(torch.zeros(3, 2)), "ids go from 1 to 3.*rows 0 to 2"),
        (lambda: dedup(ROWS).lookup(torch.zeros(9, 2), "smu"), "Did you mean 'sum'"),
        (lambda: dedup(WEIGHTED).lookup(torch.zeros(9, 2), "mean"), "under mode 'sum' only"),
        (lambda: dedup({"a": ROWS}).lookup({}), "no embedding table for a"),
        (lambda: dedup({"a": ROWS, "b": WEIGHTED}).to_kjt(), "only some have weights"),
        (lambda: DedupBatch().to_kjt(), "no features"),
        (lambda: dedup({"a": ROWS}).to_kjt(), "Install torchrec, or use kjt_arguments"),
    ],
)
def test_bad_input_is_one_clear_error(make, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec", None)  # as if it were not installed
    with pytest.raises(InputError, match=message):
        make()
