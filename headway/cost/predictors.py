"""Latencies of a new device from a few samples of it, the same samples on other devices, and their operators.

A sample is an architecture. Everything is done on logarithms, so errors are
relative and predictions are positive.

>>> rng = np.random.default_rng(0)
>>> source_s = np.exp(rng.normal(size=(3, 40)))
>>> target_s = 2 * source_s[1]                        # the new device is the second source, twice as slow
>>> task = TransferTask(source_s, np.zeros((40, 1)), np.arange(10), target_s[:10])
>>> float(np.abs(ridge(task) / target_s - 1).max()) < 0.02
True

Which samples to measure on a new device: at random, or one near the centre of each of k clusters of the sources.

>>> points = np.array([[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]])
>>> sorted(clusters(points, 2, np.random.default_rng(0)).tolist())
[1, 4]

The transform of skewed labels, which training across devices needs.

>>> points = np.array([[0.0, 1.0], [2.0, 5.0]])
>>> bool(np.allclose(box_cox_inverse(box_cox(points + 1, 0.3), 0.3), points + 1))
True
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.rng import stream

Floats = NDArray[np.float64]

PENALTIES = np.logspace(-3, 4, 15)
"""Penalties of ridge regression that are tried; the features have variance 1."""

Weights = tuple[float, float, float]
"""Variances of a kernel's three terms, over that of its noise: mean of the sources, single sources, operators."""

GRID: tuple[Weights, ...] = tuple(
    (mean, single, operators)
    for mean in (1e2, 1e4)
    for single in (0.1, 1.0, 10.0, 100.0)
    for operators in (0.0, 0.1, 1.0, 10.0, 100.0)
)
"""Weights that are tried."""

TRUST_IN_REHEARSALS, TRUST_PER_SAMPLE = 10.0, 0.25
"""Exponents of the two errors that weights are judged by; 3 to 30 and 0.1 to 0.5 change little."""

REHEARSED_SAMPLES = 60
"""Samples per source in all rehearsals together: six draws of 10, one of 300."""

JUDGED_SAMPLES = 1000
"""Samples that a rehearsal is judged on at most."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferTask:
    """What is known of a new device, and of others."""

    source_s: Floats
    """[s, n] Seconds of every sample on each other setting."""

    one_hot: Floats
    """[n, f] Features of the samples' operators: one-hot, leaf by leaf."""

    chosen: NDArray[np.int64]
    """[k] Samples that were measured on the new device."""

    measured_s: Floats
    """[k] Their seconds."""

    seed: int = 0
    """Seed of the rehearsals of `kernel`, and of `tree` and `network`."""

    num_leaves: int = 1
    """Leaves of a sample, for `network`: `one_hot` holds f / num_leaves features of each."""

    def __post_init__(self) -> None:
        """Check shapes and values; raises `InputError`."""
        n = self.source_s.shape[1]
        if not len(self.source_s):
            raise InputError("there are 0 sources; a new device is predicted from at least 1. Name other settings.")
        if len(self.chosen) < 2:
            raise InputError(f"{len(self.chosen)} samples are too few; at least 2 must be measured. Pass --samples 10.")
        if len(self.chosen) != len(self.measured_s) or len(self.one_hot) != n:
            raise InputError("samples and measurements differ in number; pass one measurement per chosen sample.")
        if self.num_leaves < 1 or self.one_hot.shape[1] % self.num_leaves:
            raise InputError(
                f"{self.one_hot.shape[1]} features are not of {self.num_leaves} leaves; pass f / leaves whole."
            )
        if not (np.isfinite(self.measured_s) & (self.measured_s > 0)).all():
            raise InputError("a measured latency is not above 0; remove or repeat that measurement.")


class PredictorFn(Protocol):
    """A predictor. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, task: TransferTask) -> Floats:
        """Return [n] seconds of all samples on the new device."""
        ...


def ridge(task: TransferTask) -> Floats:
    """Regress on the log latencies of the sources; the penalty has the least leave-one-out error."""
    return _ridge(standardised(task.source_s), task)


def one_hot(task: TransferTask) -> Floats:
    """Regress on the operators alone, as `ridge` does: what a predictor without sources reaches."""
    return _ridge(task.one_hot, task)


def kernel(task: TransferTask, rehearsed: Floats | None = None) -> Floats:
    """Gaussian processes over the sources and the operators, averaged by how well their weights do.

    The covariance of two samples is linear in three groups of features:

        a * mean x mean' + b * rest . rest' + c * operators . operators' + (1 if they are one sample)

    mean: of the standardised log latencies over the sources; rest: what each
    source adds to it. A new device follows the mean nearly whatever it is,
    single sources less surely, and operators tell what no source has.

    Each (a, b, c) of `GRID` counts as exp(-10 * log error in rehearsals - k / 4 * log leave-one-out error): few samples
    follow the rehearsals on the sources, many follow themselves. `rehearsed` is what `rehearse` returns, by default
    for the task's own sources and number of samples.
    """
    if rehearsed is None:
        rehearsed = rehearse(task.source_s, task.one_hot, len(task.chosen), seed=task.seed)
    features, group = _features(standardised(task.source_s), task.one_hot)
    chosen, log_s = features[task.chosen], np.log(task.measured_s)
    fits = [_posterior(chosen, log_s, np.asarray(weights)[group]) for weights in GRID]
    left_out = np.log(np.maximum([error for _, _, error in fits], 1e-12))
    belief = -TRUST_IN_REHEARSALS * rehearsed - TRUST_PER_SAMPLE * len(log_s) * left_out
    share = np.exp(belief - belief.max())
    share /= share.sum()
    constant = share @ np.array([constant for constant, _, _ in fits])
    log_prediction: Floats = constant + features @ (share @ np.stack([slope for _, slope, _ in fits]))
    return np.exp(log_prediction)


def rehearse(source_s: Floats, one_hot: Floats, num_samples: int, *, seed: int = 0) -> Floats:
    """Return [len(GRID)] mean log error with which each source is predicted from the others by `num_samples` samples.

    Each source in turn plays the new device. Zeros where there are fewer than two sources.
    """
    score = np.zeros(len(GRID))
    if len(source_s) < 2:
        return score
    logs, rng = np.log(source_s.T), stream(seed, "rehearsals")
    for left_out, target in enumerate(logs.T):
        features, group = _features(_standardised(np.delete(logs, left_out, axis=1)), one_hot)
        error = np.zeros(len(GRID))
        for _ in range(max(1, REHEARSED_SAMPLES // num_samples)):
            drawn = rng.permutation(len(logs))[: num_samples + JUDGED_SAMPLES]
            here, there = drawn[:num_samples], drawn[num_samples:]
            if not len(there):  # every sample is measured: judge on those, there is nothing else to predict
                there = here
            for place, weights in enumerate(GRID):
                constant, slope, _ = _posterior(features[here], target[here], np.asarray(weights)[group])
                error[place] += np.abs(np.expm1(constant + features[there] @ slope - target[there])).mean()
        score += np.log(np.maximum(error, 1e-12))
    return score / len(source_s)


def mape(predicted_s: Floats, actual_s: Floats, chosen: NDArray[np.int64]) -> float:
    """Return the mean absolute error in per cent over the samples that were not chosen."""
    rest = np.ones(len(actual_s), bool)
    rest[chosen] = False
    if not rest.any():
        raise InputError("every sample was measured; leave at least one out to judge the predictions.")
    return float(100 * np.abs(predicted_s / actual_s - 1)[rest].mean())


def standardised(source_s: Floats) -> Floats:
    """Return [n, s] log latencies of [s, n] seconds, each source with mean 0 and deviation 1 over all samples."""
    return _standardised(np.log(source_s.T))


def _standardised(columns: Floats) -> Floats:
    """Return columns of mean 0 and deviation 1; one that is constant becomes 0."""
    centred = columns - columns.mean(0)
    standard: Floats = centred / np.maximum(centred.std(0), 1e-12)
    return standard


def _ridge(features: Floats, task: TransferTask) -> Floats:
    """Return seconds by ridge regression on [n, d] features with a free constant."""
    log_s = np.log(task.measured_s)
    base, constant = features[task.chosen].mean(0), log_s.mean()
    left, singular, right = np.linalg.svd(features[task.chosen] - base, full_matrices=False)
    projected = left.T @ (log_s - constant)
    errors = []
    for penalty in PENALTIES:
        # Leave-one-out error without refitting: residual / (1 - leverage); the constant has leverage 1 / k.
        shrunk = singular**2 / (singular**2 + penalty)
        leverage = np.square(left) @ shrunk + 1 / len(log_s)
        residual = log_s - constant - left @ (shrunk * projected)
        errors.append(np.square(residual / np.maximum(1 - leverage, 1e-9)).mean())
    slope = right.T @ (singular / (singular**2 + PENALTIES[int(np.argmin(errors))]) * projected)
    log_prediction: Floats = constant + (features - base) @ slope
    return np.exp(log_prediction)


def _features(standardised: Floats, one_hot: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return [n, d] features of a kernel and [d] the group of each; each group has a mean square of 1 per sample."""
    mean = _standardised(standardised.mean(1, keepdims=True))
    rest = standardised - mean * (mean * standardised).mean(0)
    operators = one_hot - one_hot.mean(0)
    groups = [
        block / max(np.sqrt(np.square(block).sum(1).mean()), 1e-12) if index else block
        for index, block in enumerate((mean, rest, operators))
    ]
    return np.hstack(groups), np.repeat(np.arange(3), [block.shape[1] for block in groups])


def _posterior(features: Floats, log_s: Floats, variance: Floats) -> tuple[float, Floats, float]:
    """Return constant and [d] slopes of the posterior mean, and the mean absolute leave-one-out error.

    With C the inverse covariance of the [k, d] features' samples and P = C - C 1 1' C / (1' C 1), which takes the
    constant out, the error of sample i predicted from the others is (P y)_i / P_ii.
    """
    weighted = features * variance
    inverse = np.linalg.inv(weighted @ features.T + np.eye(len(log_s)))
    ones = inverse.sum(1)
    projected = inverse - np.outer(ones, ones) / ones.sum()
    residual = projected @ log_s
    return ones @ log_s / ones.sum(), weighted.T @ residual, float(np.abs(residual / np.diag(projected)).mean())


def tree(task: TransferTask) -> Floats:
    """Boost regression trees (scikit-learn) on the log latencies of the sources and the operators: a peer."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor  # an extra: nothing else needs it
    except ImportError as error:
        raise InputError("predictor 'tree' needs scikit-learn. Install it: pip install 'headway[learned]'") from error
    features = np.hstack([standardised(task.source_s), task.one_hot])
    model = GradientBoostingRegressor(n_estimators=200, max_depth=3, subsample=0.7, random_state=task.seed)
    # Trees cannot extrapolate: they learn what the device adds to the mean of the sources.
    mean = np.log(task.source_s).mean(0)
    model.fit(features[task.chosen], np.log(task.measured_s) - mean[task.chosen])
    seconds: Floats = np.exp(mean + model.predict(features))
    return seconds


def network(task: TransferTask) -> Floats:
    """Train the published network (CDMPP) on all sources and the device's own samples: a peer, about 35 s."""
    module = importlib.import_module("headway.cost.torch_calibration")  # torch, which nothing else needs
    trained = module.Trained(task)
    seconds: Floats = trained.seconds(task)
    return seconds


PREDICTORS: dict[str, PredictorFn] = {
    "kernel": kernel, "ridge": ridge, "one_hot": one_hot, "tree": tree, "network": network,
}  # fmt: skip
"""Every predictor of a new device. Adding one is adding a line here."""


# Which samples to measure on a new device: at random, or one near the centre of each of k clusters of the sources.

Points = NDArray[np.float64]

ROUNDS = 30
"""Most rounds of k-means; it ends earlier when no point moves."""


class SelectionFn(Protocol):
    """Chooses samples. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, points: Points, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return [size] different indices into `points` [n, d]; `size` <= n."""
        ...


def random(points: Points, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose uniformly."""
    return rng.choice(len(points), size, replace=False)


def clusters(points: Points, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose the sample nearest to the centre of each cluster, largest cluster first (CDMPP, arXiv 2311.09690).

    Lloyd's k-means from randomly chosen points. A cluster whose nearest sample is taken gives its next nearest.
    """
    centres = points[rng.choice(len(points), size, replace=False)]
    owner = np.full(len(points), -1)
    for _ in range(ROUNDS):
        # |p - c|^2 = |p|^2 - 2 p.c + |c|^2, and |p|^2 does not matter for which centre is nearest.
        nearest = (np.square(centres).sum(1) - 2 * points @ centres.T).argmin(1)
        if (nearest == owner).all():
            break
        owner = nearest
        count = np.bincount(owner, minlength=size)
        sums = np.stack([np.bincount(owner, column, minlength=size) for column in points.T], axis=1)
        centres = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], centres)
    chosen: list[int] = []
    taken = np.zeros(len(points), bool)
    for cluster in np.argsort(-np.bincount(owner, minlength=size), kind="stable"):
        distance = np.square(points - centres[cluster]).sum(1)
        chosen.append(int(np.where(taken, np.inf, distance).argmin()))
        taken[chosen[-1]] = True
    return np.array(chosen, np.int64)


SELECTIONS: dict[str, SelectionFn] = {"random": random, "clusters": clusters}
"""Every way to choose what to measure. Adding one is adding a line here."""


# The transform of skewed labels, which training across devices needs.

POWERS = np.linspace(-1, 1, 41)
"""Powers of the transform that are tried."""


def box_cox(values: Floats, power: float) -> Floats:
    """Return (v^p - 1) / p, and log v for p = 0, of positive `values`."""
    found: Floats = np.log(values) if abs(power) < 1e-9 else (values**power - 1) / power
    return found


def box_cox_inverse(labels: Floats, power: float) -> Floats:
    """Return the positive values of `labels`; what lies beyond the transform's range becomes its end."""
    found: Floats = np.exp(labels) if abs(power) < 1e-9 else np.maximum(power * labels + 1, 1e-12) ** (1 / power)
    return found


def box_cox_power(values: Floats) -> float:
    """Return the power of `POWERS` under which [n] `values` are most nearly normal: the greatest likelihood."""
    logs = np.log(values)
    scores = [-0.5 * len(logs) * np.log(box_cox(values, p).var()) + (p - 1) * logs.sum() for p in POWERS]
    return float(POWERS[int(np.argmax(scores))])
