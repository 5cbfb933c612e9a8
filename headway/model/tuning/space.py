"""What may be tuned: ranges and choices, and searchers that propose the next setting from the trials so far.

A setting is a dict, name -> value. A searcher is a plain function of the space,
the trials and a seed, so that a search that is interrupted goes on with the
same proposals. A score is the slope of a trial: lower is better, infinite where it diverged.

>>> space = {"lr": Range(1e-4, 1.0, log=True), "batch": Choice([16, 64])}
>>> first = draw(space, [], 0)
>>> first == draw(space, [], 0), 1e-4 <= first["lr"] <= 1
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.core.tables import pick

DRAWN_FIRST = 6
"""Settings that `tpe` draws before it looks at scores."""

GOOD_FRACTION = 0.25
CANDIDATES = 32

LOWER = 0.3
"""Share of a tunable with a logarithmic range, such as a learning rate, that counts as a lower one."""

NEVER_NEGATIVE = ("lr", "momentum", "weight_decay")
"""Options of optimizers that torch refuses below zero where an optimizer is made, and nowhere later."""

Setting = dict[str, Any]
Trial = tuple[Setting, float]
"""A setting and its score."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, drawn evenly, or, with `log`, their logarithms. Raises `InputError` if empty."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise InputError(f"Range({self.low}, {self.high}) is empty or infinite. Pass finite bounds, low <= high.")
        if self.log and self.low <= 0:
            raise InputError(f"Range({self.low}, {self.high}, log=True): a logarithm needs low > 0, such as 1e-5.")

    @property
    def fixed(self) -> bool:
        """Whether there is one value only."""
        return self.low == self.high

    def at(self, place: float) -> float:
        """Return the value at `place` in [0, 1]."""
        if self.log:
            return min(self.high, max(self.low, self.low * math.exp(place * math.log(self.high / self.low))))
        return self.low + (self.high - self.low) * place

    def place(self, value: float) -> float:
        """Return where a value is, in [0, 1]; the nearest end for one outside."""
        if self.fixed:
            return 0.0
        value = min(self.high, max(self.low, value))
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values. Raises `InputError` without any."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        if isinstance(self.values, str) or not len(self.values):
            raise InputError(f"Choice({self.values!r}) has no values to choose from. Pass a list, such as [16, 64].")

    @property
    def fixed(self) -> bool:
        """Whether there is one value only."""
        return len(self.values) == 1


Space = Mapping[str, Range | Choice]


def lowered(space: Space, setting: Setting) -> Setting:
    """Return a setting with LOWER of each tunable whose range is logarithmic."""
    lower = dict(setting)
    for name, each in space.items():
        if isinstance(each, Range) and each.log:
            lower[name] = max(each.low, setting[name] * LOWER)
    return lower


class SearchFn(Protocol):
    """Proposes a setting. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, space: Space, trials: Sequence[Trial], seed: int) -> Setting:
        """Return the setting to try after `trials`."""
        ...


def draw(space: Space, trials: Sequence[Trial], seed: int) -> Setting:
    """Draw a setting, independent of the scores.

    Places follow an additive recurrence from a random start (Roberts' R sequence): few settings cover the space better
    than independent ones would.
    """
    ratio = 2.0
    for _ in range(32):  # the root of x^(d + 1) = x + 1: for d = 1 the golden ratio
        ratio = (1 + ratio) ** (1 / (len(space) + 1))
    start = stream(seed, "settings").random(len(space))
    places = {name: float((start[axis] + len(trials) * ratio ** -(axis + 1)) % 1.0) for axis, name in enumerate(space)}
    return {
        name: each.at(places[name]) if isinstance(each, Range) else each.values[int(places[name] * len(each.values))]
        for name, each in space.items()
    }


def tpe(space: Space, trials: Sequence[Trial], seed: int) -> Setting:
    """Propose by tree-structured Parzen estimators (Bergstra et al., NeurIPS 2011).

    The best quarter of the trials has density l, the rest g, each a product over tunables; of CANDIDATES drawn from l
    the one with the largest l / g is proposed. The first DRAWN_FIRST are drawn evenly.
    """
    if len(trials) < DRAWN_FIRST:
        return draw(space, trials, seed)
    rng = stream(seed, "tpe", len(trials))
    order = sorted(range(len(trials)), key=lambda index: trials[index][1])
    cut = max(1, math.ceil(GOOD_FRACTION * len(trials)))
    ratio, columns = np.zeros(CANDIDATES), {}
    for name, each in space.items():
        good, bad = ([trials[index][0][name] for index in part] for part in (order[:cut], order[cut:]))
        if isinstance(each, Range):
            near, far = (np.array([each.place(value) for value in part]) for part in (good, bad))
            drawn = _drawn(near, rng)
            ratio += np.log(_density(drawn, near)) - np.log(_density(drawn, far))
            columns[name] = [each.at(float(place)) for place in drawn]
        else:
            count = [1 + sum(value == one for value in good) for one in each.values]
            others = [1 + sum(value == one for value in bad) for one in each.values]
            picked = rng.choice(len(count), CANDIDATES, p=np.array(count) / sum(count))
            ratio += np.log(np.array(count) / sum(count))[picked] - np.log(np.array(others) / sum(others))[picked]
            columns[name] = [each.values[index] for index in picked]
    best = int(ratio.argmax())
    return {name: column[best] for name, column in columns.items()}


def _width(places: NDArray[np.float64]) -> float:
    """Return the bandwidth of a kernel in [0, 1]: the more places, the narrower, never below 1/20."""
    return max(0.05, 1 / (1.5 * math.pow(len(places) + 1, 0.8)))


def _drawn(places: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw [CANDIDATES] from the kernels of `places` and one even one, reflected into [0, 1]."""
    index = rng.integers(len(places) + 1, size=CANDIDATES)
    even = rng.random(CANDIDATES)
    around = np.append(places, 0.0)[index] + _width(places) * rng.standard_normal(CANDIDATES)
    return np.where(index == len(places), even, np.abs(1 - np.abs(1 - around % 2)))


def _density(at: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the density [CANDIDATES] of the kernels of `places` and an even one, at `at`."""
    width = _width(places)
    distance = (at[:, None] - places[None, :]) / width
    kernels = np.exp(-(distance**2) / 2).sum(1) / (width * math.sqrt(2 * math.pi))
    return np.asarray((1.0 + kernels) / (len(places) + 1))


def optuna(space: Space, trials: Sequence[Trial], seed: int) -> Setting:
    """Ask Optuna's TPE for a setting, after telling it the trials so far. Raises `InputError` where it is missing."""
    try:
        import optuna as peer
    except ImportError as cause:
        raise InputError("the searcher 'optuna' needs the package optuna. Install it, or pass 'tpe'.") from cause
    spread = peer.distributions
    known = {
        name: spread.FloatDistribution(each.low, each.high, log=each.log)
        if isinstance(each, Range)
        else spread.CategoricalDistribution(list(each.values))
        for name, each in space.items()
    }
    peer.logging.set_verbosity(peer.logging.WARNING)
    study = peer.create_study(sampler=peer.samplers.TPESampler(seed=seed + len(trials), n_startup_trials=DRAWN_FIRST))
    for setting, score in trials:
        value = score if math.isfinite(score) else 1e30
        study.add_trial(peer.trial.create_trial(params=setting, distributions=known, value=value))
    return dict(study.ask(known).params)


SEARCHERS: dict[str, SearchFn] = {"tpe": tpe, "random": draw, "optuna": optuna}
"""Searcher -> its function. Adding one is adding a line here."""


def searcher(name: str) -> SearchFn:
    """Return a searcher; a miss names the valid ones."""
    return pick(SEARCHERS, name, "searcher")


def parsed(text: str) -> tuple[str, Range | Choice]:
    """Return the tunable that an option writes: NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=VALUE,VALUE.

    >>> parsed("lr=1e-5:1:log"), parsed("nesterov=0,1")
    (('lr', Range(low=1e-05, high=1.0, log=True)), ('nesterov', Choice(values=[0, 1])))
    """
    name, _, spread = text.partition("=")
    try:
        if not name or not spread:
            raise ValueError
        if ":" not in spread:
            values = [_number(word) for word in spread.split(",")]
            found: Range | Choice = Choice(values)
            least = min(values)
        else:
            low, high, *rest = spread.split(":")
            if rest not in ([], ["log"]):
                raise ValueError
            found = Range(float(low), float(high), log=bool(rest))
            least = found.low
    except InputError:
        raise
    except ValueError as cause:
        raise InputError(
            f"--setting {text!r} is no tunable. Write NAME=LOW:HIGH, NAME=LOW:HIGH:log, or NAME=VALUE,VALUE, such as "
            "lr=1e-5:1:log."
        ) from cause
    if name in NEVER_NEGATIVE and least < 0:
        raise InputError(
            f"--setting {text!r} begins at {least}; {name} is never below 0. Write {name}=0:1, for example."
        )
    return name, found


def _number(word: str) -> int | float:
    return int(word) if word.lstrip("-").isdigit() else float(word)
