"""Which examples are worth a backward pass: the higher the loss among recent ones, the likelier (Selective-Backprop).

Use it when the forward pass is cheap beside the backward pass and many
examples are learnt already. An example is kept with probability
percentile ** beta, so 1 / (beta + 1) of them are kept; the percentile is that
of its loss among the last `history` losses, its own batch included. The
method is biased by design and can cost accuracy: watch the held-out error.
A higher beta pays where the passes it saves go into more epochs, and `stale=3`
leaves a third of the scoring (`headway bench selective_backprop`).

Losses, history and decisions are those of all ranks together, and a decision
is keyed by (seed, step, id): any number of ranks selects the same examples of a
global batch. Torch is needed only for `train_batches` and for several ranks.

>>> selector = LossSelector(beta=1.0, warmup=0, seed=1)
>>> ids = np.arange(1000)
>>> kept = [selector.select(np.random.default_rng(step).random(1000), ids) for step in range(4)]
>>> round(float(np.mean(kept)), 1)
0.5
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.tables import pick
from headway.data.bytes.order import item_seeds, occurrences

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TORCH_PART = "headway.data.torch_selection"
"""Where the losses of several ranks are gathered and batches are made: only that needs torch."""

UNKNOWN, STORED, FRESH = range(3)
"""Where the loss of an example in a step is from: nowhere (it is warming up), an earlier forward pass, this step's."""


def mean_over_ties(below: Floats, up_to: Floats, beta: float) -> Floats:
    """Return the mean of u ** beta over the ranks [below, up_to] that equal losses share: 1 / (beta + 1) on average."""
    width = np.maximum(up_to - below, np.finfo(np.float64).tiny)
    mean: Floats = (up_to ** (beta + 1) - below ** (beta + 1)) / ((beta + 1) * width)
    return np.clip(mean, 0.0, 1.0)


def strictly_below(below: Floats, up_to: Floats, beta: float) -> Floats:
    """Return below ** beta: the published percentile, which keeps too few when many losses are equal."""
    kept: Floats = below**beta
    return kept


TIES: dict[str, Callable[[Floats, Floats, float], Floats]] = {"mid": mean_over_ties, "strict": strictly_below}
"""How equal losses share their ranks: (fraction of losses below, fraction not above, beta) -> probability to keep."""

COUNTERS = ("num_steps", "num_candidates", "num_kept", "num_forwards", "num_dropped", "rounds")
"""What a selector counts, over all ranks."""

NON_FINITE: dict[str, str] = {
    "error": "a loss that is NaN or infinite is an error that names the examples",
    "drop": "such examples are left out of the step and of the history, and counted",
}
"""What becomes of a loss that is no number."""


class LossSelector:
    """Selects examples by loss, and remembers what it needs for that: `state_dict` is exact.

    `floor` is the least probability to keep; `stale` the number of an
    example's appearances that one forward pass serves (SB-stale); `warmup`
    the number of first appearances (epochs) in which every example is kept;
    `ignore_top_fraction` leaves out the highest losses, which mislabelled
    examples have. `group` is the process group whose ranks share the batch
    (default: all of torch.distributed, once it is set up). Raises `InputError`.
    """

    def __init__(
        self,
        beta: float = 1.0,
        history: int = 1024,
        floor: float = 0.0,
        stale: int = 1,
        warmup: int = 1,
        ties: str = "mid",
        *,
        seed: int = 0,
        non_finite: str = "error",
        ignore_top_fraction: float = 0.0,
        group: Any = None,
    ) -> None:
        """Begin with no history. Raises `InputError` on what cannot be."""
        if not (np.isfinite(beta) and beta >= 0):
            raise InputError(f"beta is {beta}; it must be 0 (keep all) or more. Use 1.0 to keep half.")
        if not 0 <= floor <= 1 or not 0 <= ignore_top_fraction < 1:
            raise InputError(f"floor is {floor}, ignore_top_fraction {ignore_top_fraction}; pass fractions, 0 to 1.")
        for name, value, least in (("history", history, 1), ("stale", stale, 1), ("warmup", warmup, 0)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise InputError(f"{name} is {value!r}; it must be a whole number, {least} or more.")
        pick(NON_FINITE, non_finite, "non_finite")
        self.beta, self.history, self.floor, self.stale, self.warmup = float(beta), history, float(floor), stale, warmup
        self.ties, self.seed, self.non_finite, self.ignore_top_fraction = ties, seed, non_finite, ignore_top_fraction
        self.group = group
        self.num_steps = self.num_candidates = self.num_kept = self.num_forwards = self.num_dropped = 0
        self._probability = pick(TIES, ties, "ties")
        self._key = derived_seed(seed, "select")
        self._recent: Floats = np.zeros(0)
        self._known = _Known()
        self.queue: list[tuple[int, Any]] = []
        """(count, batch): this rank's kept examples that wait for a full batch."""
        self.queued: list[int] = []
        """Examples that wait on each rank."""
        self.rounds = 0
        """Candidate batches of the epoch that `train_batches` is in."""

    @property
    def keeps_all(self) -> bool:
        """Whether every example is kept whatever its loss: then training is plain and nothing is scored."""
        return (self.beta == 0 or self.floor == 1) and self.ignore_top_fraction == 0

    def due(self, ids: Any) -> Flags:
        """Return [B] whether an example needs a forward pass: past its warm-up, and its loss unknown or stale."""
        number = _ids(ids)
        if self.keeps_all:
            return np.zeros(len(number), np.bool_)
        seen, served, _ = self._known.look(number)
        due: Flags = (seen >= self.warmup) & ((served == 0) | (served >= self.stale))
        return due

    def select(self, losses: Any, ids: Any, *, fresh: Any = None) -> Flags:
        """Return [B] which of this rank's examples to train on.

        `losses` [B] are per example (numpy or torch), `ids` [B] whole numbers
        that name the examples. With `fresh` [B] flags, `losses` holds one
        value per flag that is set, and the others are as `due` left them.
        Every rank must call it equally often. Raises `InputError` on shapes
        that differ, on a loss that is NaN or infinite, on one that is missing.
        """
        return self.decide(losses, ids, fresh=fresh)[0]

    def decide(self, losses: Any, ids: Any, *, fresh: Any = None) -> tuple[Flags, list[tuple[int, int]]]:
        """Return what `select` returns, and (candidates, kept) of each rank in this step."""
        number = _ids(ids)
        loss, source = self._filled(losses, number, fresh)
        blocks = self._gathered(np.stack([number, loss.view(np.int64), source], axis=1))
        rows = np.concatenate(blocks)
        kept = self._step(rows[:, 0], rows[:, 1].copy().view(np.float64), rows[:, 2])
        cuts = np.cumsum([len(block) for block in blocks])[:-1]
        parts: list[Flags] = np.split(kept, cuts)
        rank = int(sys.modules["torch.distributed"].get_rank(self.group)) if len(blocks) > 1 else 0
        return parts[rank], [(len(part), int(part.sum())) for part in parts]

    def train_batches(
        self,
        loader: Any,
        score: Callable[[Any], Any],
        *,
        ids: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Any]:
        """Yield one epoch of full training batches of kept examples; `score(batch)` gives [B] losses.

        See `headway.data.torch_selection.train_batches`; `scoring(model)` of that module makes the forward
        pass safe.
        """
        batches: Iterator[Any] = importlib.import_module(TORCH_PART).train_batches(
            self, loader, score, ids=ids, batch_size=batch_size
        )
        return batches

    def report(self) -> dict[str, float | int]:
        """Return what was offered, kept, scored and dropped so far, over all ranks."""
        offered = max(1, self.num_candidates)
        return {
            "num_steps": self.num_steps, "num_candidates": self.num_candidates, "num_kept": self.num_kept,
            "num_forwards": self.num_forwards, "num_dropped": self.num_dropped,
            "kept_fraction": self.num_kept / offered, "forward_fraction": self.num_forwards / offered,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return history, known losses, counters and the kept examples that wait for a full batch: all it needs."""
        return {
            "version": 1, "options": self._options(), "recent": self._recent.tolist(),
            **{name: getattr(self, name) for name in COUNTERS}, "known": self._known.state(),
            "queue": list(self.queue), "queued": list(self.queued),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; raises `InputError` when it belongs to a selector with other options."""
        if state.get("version") != 1:
            raise InputError(f"the state has version {state.get('version')!r}; pass what state_dict() gave.")
        wrong = [name for name, value in self._options().items() if state["options"].get(name) != value]
        if wrong:
            raise InputError(f"the state was made with another {', '.join(wrong)}. Pass the same options.")
        for name in COUNTERS:
            setattr(self, name, state[name])
        self._recent = np.array(state["recent"], np.float64)
        self._known = _Known.of(state["known"])
        self.queue, self.queued = list(state["queue"]), list(state["queued"])

    def _options(self) -> dict[str, Any]:
        """Return what decides, next to the losses."""
        names = ("beta", "history", "floor", "stale", "warmup", "ties", "seed", "non_finite", "ignore_top_fraction")
        return {name: getattr(self, name) for name in names}

    def _filled(self, losses: Any, ids: Ints, fresh: Any) -> tuple[Floats, Ints]:
        """Return [B] a loss per example, and where it is from."""
        given = _array(losses).astype(np.float64)
        flags = np.ones(len(ids), np.bool_) if fresh is None else _array(fresh).astype(np.bool_)
        if given.ndim != 1 or flags.shape != ids.shape or len(given) != int(flags.sum()):
            raise InputError(
                f"losses have shape {given.shape} for {int(flags.sum())} fresh of {len(ids)} examples. "
                "Pass one loss per fresh example: use reduction='none'."
            )
        seen, served, loss = self._known.look(ids)
        source = np.where(served > 0, STORED, UNKNOWN)
        loss[flags], source[flags] = given, FRESH
        lost = (source == UNKNOWN) & (seen >= self.warmup)
        if lost.any() and not self.keeps_all:
            raise InputError(f"no loss is known of examples {_listed(ids[lost])}. Compute those that due() names.")
        return loss, source

    def _gathered(self, block: Ints) -> list[Ints]:
        """Return the blocks of all ranks, in the order of ranks."""
        ranks = _distributed(self.group)
        if ranks == 1:
            return [block]
        gathered: list[Ints] = importlib.import_module(TORCH_PART).gathered(block, self.group)
        return gathered

    def _step(self, ids: Ints, loss: Floats, source: Ints) -> Flags:
        """Decide over the examples of all ranks; returns [global batch] which to keep."""
        if not len(ids):
            return np.zeros(0, np.bool_)
        # The same order on any number of ranks: repeated examples are told apart by their losses.
        order = np.lexsort((source, loss, ids))
        ids, loss, source = ids[order], loss[order], source[order]
        finite = np.isfinite(loss) | (source == UNKNOWN)
        if not finite.all() and self.non_finite == "error":
            raise InputError(
                f"the loss of examples {_listed(ids[~finite])} is NaN or infinite. Look at them, "
                "or pass non_finite='drop'."
            )
        draw = item_seeds(self._key, self.num_steps, ids, np.array(occurrences(ids.tolist()), np.int64))
        kept = self._kept(ids, loss, finite & (source != UNKNOWN), draw) & finite
        self._known.note(ids[finite], loss[finite], source[finite])
        self._known.forget(ids[~finite])
        self.num_steps += 1
        self.num_candidates += len(ids)
        self.num_kept += int(kept.sum())
        self.num_forwards += int((source == FRESH).sum())
        self.num_dropped += int((~finite).sum())
        back = np.empty(len(ids), np.bool_)
        back[order] = kept
        return back

    def _kept(self, ids: Ints, loss: Floats, ranked: Flags, draw: NDArray[np.uint64]) -> Flags:
        """Return [B] what to keep; the losses of `ranked` examples join the history first."""
        joining = np.flatnonzero(ranked)
        # Of a batch larger than the history a random part stays, not the part with the highest ids.
        joining = joining[np.argsort(draw[joining], kind="stable")]
        recent = np.concatenate([self._recent, loss[joining]])[-max(self.history, len(joining)) :]
        self._recent = recent[-self.history :]
        if self.keeps_all:
            return np.ones(len(ids), np.bool_)
        ordered = np.sort(recent)
        place = [np.searchsorted(ordered, loss, side=side) / max(1, len(ordered)) for side in ("left", "right")]
        probability = np.maximum(self.floor, self._probability(place[0], place[1], self.beta))
        # A part of a tie may lie above the cut: that part of its chance goes.
        width = np.maximum(place[1] - place[0], np.finfo(np.float64).tiny)
        probability *= np.clip((1 - self.ignore_top_fraction - place[0]) / width, 0, 1)
        chosen: Flags = (draw >> np.uint64(11)) * 2.0**-53 < probability
        return chosen | (self._known.look(ids)[0] < self.warmup)


class _Known:
    """What is known of each example: appearances, last loss, how many appearances that loss has served (0: none)."""

    def __init__(self) -> None:
        # Row 0 is that of an example nobody has seen.
        self._row: dict[int, int] = {}
        self._seen, self._served, self._loss = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1)

    def look(self, ids: Ints) -> tuple[Ints, Ints, Floats]:
        """Return [B] appearances, [B] appearances served by the loss that is known, [B] that loss."""
        row = self._rows(ids)
        return self._seen[row], self._served[row], self._loss[row]

    def note(self, ids: Ints, loss: Floats, source: Ints) -> None:
        """Count an appearance of each example and a use of its stored loss, or keep the fresh one."""
        for example in ids.tolist():
            self._row.setdefault(example, len(self._row) + 1)
        self._grow(len(self._row) + 1)
        row = self._rows(ids)
        np.add.at(self._seen, row, 1)
        np.add.at(self._served, row[source == STORED], 1)
        fresh = source == FRESH
        self._loss[row[fresh]], self._served[row[fresh]] = loss[fresh], 1

    def forget(self, ids: Ints) -> None:
        """Count an appearance of examples whose loss is of no use."""
        self.note(ids, np.zeros(len(ids)), np.full(len(ids), FRESH))
        self._served[self._rows(ids)] = 0

    def state(self) -> dict[str, list[Any]]:
        """Return plain lists."""
        rows = slice(1, len(self._row) + 1)
        columns = {"seen": self._seen[rows], "served": self._served[rows], "loss": self._loss[rows]}
        return {"ids": list(self._row), **{name: column.tolist() for name, column in columns.items()}}

    @classmethod
    def of(cls, state: Mapping[str, list[Any]]) -> _Known:
        """Return what `state` was taken of."""
        known = cls()
        known._row = {example: row for row, example in enumerate(state["ids"], start=1)}
        known._seen, known._served = (np.array([0, *state[name]], np.int64) for name in ("seen", "served"))
        known._loss = np.array([0.0, *state["loss"]])
        return known

    def _rows(self, ids: Ints) -> Ints:
        return np.fromiter(map(self._row.get, ids.tolist(), repeat(0)), np.int64, len(ids))

    def _grow(self, size: int) -> None:
        if size > len(self._seen):
            more = max(size, 2 * len(self._seen)) - len(self._seen)
            self._seen, self._served, self._loss = (
                np.concatenate([column, np.zeros(more, column.dtype)])
                for column in (self._seen, self._served, self._loss)
            )


def _distributed(group: Any) -> int:
    """Return the number of ranks that share a batch; 1 where torch.distributed is not set up."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1
    return int(dist.get_world_size(group))


def _array(values: Any) -> NDArray[Any]:
    """Return numbers of numpy, torch or a list as an array."""
    return np.asarray(values.detach().cpu().double().numpy() if hasattr(values, "detach") else values)


def _ids(ids: Any) -> Ints:
    """Return ids as [B] int64."""
    number = np.asarray(ids.detach().cpu().numpy() if hasattr(ids, "detach") else ids)
    if number.ndim != 1 or (number.size and number.dtype.kind not in "iu"):
        raise InputError(f"ids have shape {number.shape} and type {number.dtype}; pass [B] whole numbers.")
    if number.dtype.kind == "u" and number.size and int(number.max()) > np.iinfo(np.int64).max:
        raise InputError(
            f"ids hold {int(number.max())}; pass whole numbers below 2^63. A 64-bit hash fits once its top bit is "
            "dropped: ids >> 1, or ids & (2**63 - 1)."
        )
    return number.astype(np.int64)


def _listed(ids: Ints) -> str:
    """Name the first few ids."""
    return ", ".join(map(str, ids[:8].tolist())) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
