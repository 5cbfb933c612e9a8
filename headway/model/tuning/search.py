"""MLtuner's search: which trial runs next, for how long, and which setting wins.

All trials begin at the same parent state and see the same batches. Nothing is
trained here: the caller runs the trial that `next_run` names, reports its
losses, and asks again; what it decides is a pure function of the losses.

    no trial converges yet:  a new proposal, all live trials run to the same length; then twice that length
    one has converged:       its length is the trial length; each further proposal runs so long, the better one stays
    the end:                 most_trials, or the five best slopes differ by less than 10 %
    ours, before it wins:    the best one goes on to twice that length, beside one with lower rates; which is ahead?

The last rule is for a bias of short trials (Wu et al., ICLR 2018, arXiv 1803.02021):
a loss falls fastest at first where the rate is too high, which shows its noise, and
the units that it puts out of use for good, only later.

More rules of ours save most of the steps. While no trial converges, LIVE of them
stay. One that converges, but is behind another, does not end that. And a proposal
is dropped after a quarter or half of its length when it is behind the best trial:
the batches are the same, so that the noise of differences is small.

>>> from headway.model.tuning.space import Range
>>> search = Search({"lr": Range(0.0, 1.0)}, most_steps=80, most_trials=3, seed=0)
>>> while (run := search.next_run()) is not None:  # a task whose loss falls as fast as its learning rate
...     run.losses.append((1 - 0.01 * run.setting["lr"]) ** len(run.losses))
>>> search.winner.setting["lr"] == max(trial.setting["lr"] for trial in search.trials), search.winner.summary.label
(True, 'converging')

What the losses of a short trial say: does it converge, how fast, how noisily.

The first value is the progress at the start. The rest is cut in `windows`
equal windows, each of which counts as the mean of its values:

    y_0 | y_1 | y_2 | ... | y_K        range = y_K - y_0,  noise = max(0, largest y_i+1 - y_i)
    slope = (range + noise) / (t_K - t_0): negative is progress, what is certain in spite of the noise

    diverged     a value is not finite, or y_K > 10 y_0 > 0
    unstable     noise > |range| / K, or range >= 0, or the fall is within 3.5 standard errors of the values
    converging   else

The first two rules are MLtuner's (arXiv 1803.07445, section 4.1). The third is
ours: where windows are long their means hardly vary, and a start that is high
by chance would look like a fall. Values that only vary from step to step (white
noise) are called converging in less than one case of 1,000.

>>> found = summarise([8.0, *(8.0 * 0.9**i for i in range(1, 41))], range(41))
>>> found.label, round(found.slope, 3)
('converging', -0.197)
>>> summarise([1.0, float("nan"), 1.0], range(3), windows=2).label
'diverged'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import InputError
from headway.model.tuning.space import SEARCHERS, Space, lowered

# What the losses of a short trial say: does it converge, how fast, how noisily.

WINDOWS = 10
DIVERGED_FACTOR = 10.0
STANDARD_ERRORS = 3.5
CONVERGING, UNSTABLE, DIVERGED = "converging", "unstable", "diverged"


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trial's losses say."""

    label: str
    """'converging', 'unstable' or 'diverged'."""

    slope: float
    """Change of the loss per unit of time; negative is progress, infinite where a value is not finite."""

    noise: float
    """The largest rise from one window to the next, in the loss's unit; >= 0."""


def summarise(
    values: Sequence[float], times: Sequence[float], windows: int = WINDOWS, *, start_count: int = 1
) -> Summary:
    """Summarise losses [n] at times [n], increasing; `start_count` losses were averaged for the first value.

    Raises `InputError` on lengths that differ, on fewer than `windows` values behind the first one, on times that do
    not increase, on `windows` < 2 and `start_count` < 1.
    """
    y, t = np.asarray(values, float), np.asarray(times, float)
    if windows < 2 or start_count < 1:
        raise InputError(f"windows is {windows} and start_count {start_count}; pass at least 2 and at least 1.")
    if y.ndim != 1 or y.shape != t.shape:
        raise InputError(f"there are {y.size} values and {t.size} times. Pass one time for each value.")
    if len(y) <= windows:
        raise InputError(
            f"{len(y)} values do not fill {windows} windows behind the first value. Pass {windows + 1} or more."
        )
    if not (np.diff(t) > 0).all():
        raise InputError("the times do not increase. Pass steps or seconds since the start, in order.")
    if not np.isfinite(y).all():
        return Summary(DIVERGED, math.inf, math.inf)
    behind = y[1:]
    # Equal windows: of 41 values in 4 windows the first has 11. reduceat sums from each bound to the next.
    bounds = [round(place * len(behind) / windows) for place in range(windows + 1)]
    means = np.add.reduceat(behind, bounds[:-1]) / np.diff(bounds)
    progress = np.concatenate((y[:1], means))
    change, noise = float(progress[-1] - y[0]), max(0.0, float(np.diff(progress).max()))
    slope = (change + noise) / float(t[-1] - t[0])
    # Half the mean square of successive differences is the variance without the trend (von Neumann 1941).
    variance = float((np.diff(behind) ** 2).mean()) / 2
    error = math.sqrt(variance * (1 / start_count + windows / len(behind)))
    if y[0] > 0 and progress[-1] > DIVERGED_FACTOR * y[0]:
        label = DIVERGED
    elif change < 0 and noise <= -change / windows and -change > STANDARD_ERRORS * error:
        label = CONVERGING
    else:
        label = UNSTABLE
    return Summary(label, slope, noise)


FIRST_STEPS = WINDOWS + 1
"""Steps of the first trial: its start, and a value for each window."""

SAME_SLOPES = 5
SAME_FRACTION = 0.1
"""So many best slopes that differ by less than this end a search."""

LIVE = 3
"""Trials that go on while none converges."""

BEHIND = 2.0
"""Standard errors of the difference of losses by which a proposal is behind."""

MOST_CONFIRMED = 4
"""Times the trial length until which a rival with lower rates is given; then the one with the lower loss wins."""

ENOUGH = 6
"""Trials of the greatest length, none of which converges, after which the best unstable one is taken."""


class Trial(msgspec.Struct):
    """A setting, and the losses of its branch."""

    number: int
    setting: dict[str, Any]
    losses: list[float] = []
    live: bool = True
    summary: Summary | None = None
    """Of all losses so far, when the trial reached a length at which trials are compared."""

    reason: str = ""
    """Why it counts as diverged, where it raised."""

    @property
    def slope(self) -> float:
        """The slope, or infinity where there is none to trust."""
        return math.inf if self.summary is None or self.summary.label == DIVERGED else self.summary.slope


@dataclass(slots=True)
class Search:
    """One search: its trials so far, and what follows from them."""

    space: Space
    most_steps: int
    """Longest trial: an epoch, or what is left of the run."""

    most_trials: int
    seed: int
    searcher: str = "tpe"
    start: float | None = None
    """Loss at the parent state; None: the first loss of each trial, which comes before its first update."""

    start_count: int = 1
    """Losses that `start` is a mean of."""

    first: Sequence[dict[str, Any]] = ()
    """Settings to try before the searcher's: the one in force."""

    trials: list[Trial] = field(default_factory=list)
    trial_steps: int = 0
    """Steps after which trials are compared."""

    converged: bool = False
    """Whether a trial converged, which fixed `trial_steps`."""

    compared_at: int = 0
    """The trial length, once the best trial goes on from there beside its rival; 0 before."""

    winner: Trial | None = None
    """The trial to go on from when the search has ended; None: none made progress, the parent goes on."""

    def next_run(self) -> Trial | None:
        """Return the trial that takes the next step; None when the search has ended."""
        while True:
            for trial in self.trials:
                if trial.live:
                    if not all(map(math.isfinite, trial.losses[-1:])):
                        self.fail(trial, "its loss is not finite")
                    elif len(trial.losses) < min(self.trial_steps, self.most_steps) and not self._drop_if_behind(trial):
                        return trial
            for trial in self._live():
                self._summarise(trial)
            if not self._advance():
                return None

    def fail(self, trial: Trial, reason: str) -> None:
        """Count a trial as diverged."""
        trial.live, trial.reason, trial.summary = False, reason, Summary(DIVERGED, math.inf, math.inf)

    def stop_at(self, steps: int) -> None:
        """Compare trials at this length at most: the data has ended there."""
        self.most_steps = min(self.most_steps, steps)

    def settle(self) -> None:
        """End the search with what is known.

        The best live trial that makes progress wins, an unstable one where none converges. Where the first trial is the
        setting in force, that goes on unless another one is ahead of it.
        """
        control = self.trials[0] if self.first and self.trials and self.trials[0].live else None
        found = [trial for trial in self._live() if trial.slope < 0 and trial is not control]
        if not self.converged and self.first:
            found = [trial for trial in self._live() if self._is_behind(self.trials[0], trial)]
        self.winner = min(found, key=_late, default=control) if not self.converged else self._best(self._live())
        if self.compared_at:  # compared by their losses: at that length noise may be more than the fall
            self.winner = min(self._live(), key=_late, default=None)
        for trial in self.trials:
            trial.live = trial is self.winner

    def _live(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.live]

    def _drop_if_behind(self, trial: Trial) -> bool:
        """Drop a proposal that is behind the best trial after a quarter or half of its length; True if so."""
        count = len(trial.losses)
        if (
            not self.converged
            or self.compared_at
            or count < FIRST_STEPS
            or count not in (self.trial_steps // 4, self.trial_steps // 2)
        ):
            return False
        best = next(each for each in self.trials if each.live)  # the other live one: it came first
        if best is trial or not self._is_behind(trial, best):
            return False
        self._summarise(trial)
        trial.live = False
        return True

    @staticmethod
    def _is_behind(trial: Trial, other: Trial) -> bool:
        """Whether the losses of a trial are higher than another's, over the later half of the steps of both."""
        count = min(len(trial.losses), len(other.losses))
        behind = np.subtract(trial.losses[count // 2 : count], other.losses[count // 2 : count])
        return trial is not other and count > 1 and behind.mean() > BEHIND * behind.std() / math.sqrt(len(behind))

    def _summarise(self, trial: Trial) -> None:
        """Summarise the losses of a trial, up to the length of comparison."""
        losses = trial.losses[: min(self.trial_steps, self.most_steps)]
        if len(losses) < FIRST_STEPS:
            self.fail(trial, f"it has {len(losses)} losses; a trial needs {FIRST_STEPS}")
            return
        values = losses if self.start is None else [self.start, *losses]
        trial.summary = summarise(values, range(len(values)), start_count=self.start_count)
        if trial.summary.label == DIVERGED:
            trial.live = False

    def _advance(self) -> bool:
        """Decide what follows when all live trials have the same length; False when the search has ended."""
        if self.compared_at:
            return self._judge_rival()
        converging = [trial for trial in self._live() if trial.summary and trial.summary.label == CONVERGING]
        at_end = self.trial_steps >= self.most_steps
        # A trial that converges, but more slowly than one that is too noisy to say, is no measure yet.
        ahead = [
            trial for trial in converging if at_end or not any(self._is_behind(trial, each) for each in self._live())
        ]
        self.converged = self.converged or bool(ahead)
        best = self._best(converging)
        kept = [best] if self.converged else sorted(self._live(), key=_late)[:LIVE]
        for index, trial in enumerate(self.trials):
            is_control = bool(self.first) and index == 0 and not self.converged
            trial.live = trial in kept or (is_control and trial.live)
        full = len(self.trials) >= self.most_trials
        enough = full if self.converged else at_end and (full or len(self.trials) >= ENOUGH)
        if enough or (self.converged and self._slopes_agree()):
            return self._add_rival()
        if not self.converged:
            self.trial_steps = min(self.most_steps, 2 * self.trial_steps) if self.trial_steps else FIRST_STEPS
        if not full:
            self._propose()
        return True

    def _add_rival(self) -> bool:
        """Let the best trial go on beside one with lower rates; False, and the search ends, where there is none."""
        best = self._best(self._live()) if self.converged else None
        setting = lowered(self.space, best.setting) if best else {}
        is_last = not self.compared_at and self.trial_steps >= self.most_steps
        if best is None or setting == best.setting or is_last:
            self.settle()
            return False
        if not self.compared_at:
            self.compared_at, self.trial_steps = self.trial_steps, min(self.most_steps, 2 * self.trial_steps)
        self.trials.append(Trial(len(self.trials), setting))
        return True

    def _judge_rival(self) -> bool:
        """Drop the one of the two that is behind, or let both go on to twice the length; False at the end.

        A rival that is ahead gets one with still lower rates, until the lower ones are behind.
        """
        order = sorted(self._live(), key=_late)
        longest = min(self.most_steps, MOST_CONFIRMED * self.compared_at)
        if len(order) > 1 and not self._is_behind(order[1], order[0]) and self.trial_steps < longest:
            self.trial_steps = min(longest, 2 * self.trial_steps)
            return True
        for other in order[1:]:
            other.live = False
        if len(order) > 1 and order[0] is self.trials[-1]:
            return self._add_rival()
        self.settle()
        return False

    @staticmethod
    def _best(trials: Sequence[Trial]) -> Trial | None:
        """Return the trial with the steepest fall."""
        falling = [trial for trial in trials if trial.slope < 0]
        return min(falling, key=lambda trial: (trial.slope, trial.number), default=None)

    def _propose(self) -> None:
        number = len(self.trials)
        if number < len(self.first):
            setting = dict(self.first[number])
        else:
            # Losses fall most at first, so a trial that was dropped early counts as if it had not fallen any further.
            scores = [(trial.setting, trial.slope * len(trial.losses) / self.trial_steps) for trial in self.trials]
            setting = SEARCHERS[self.searcher](self.space, scores, self.seed)
        self.trials.append(Trial(number, setting))

    def _slopes_agree(self) -> bool:
        whole = [trial for trial in self.trials if trial.slope < 0 and len(trial.losses) == self.trial_steps]
        slopes = sorted(trial.slope for trial in whole)[:SAME_SLOPES]
        return len(slopes) == SAME_SLOPES and slopes[-1] - slopes[0] <= SAME_FRACTION * -slopes[0]


def _late(trial: Trial) -> float:
    """Return the mean loss over the later half of a trial."""
    return float(np.mean(trial.losses[len(trial.losses) // 2 :]))
