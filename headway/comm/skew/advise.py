"""Whether replicas that are averaged now and then would pay: the recorded run, without its collectives, and averages.

A step of 'fedavg:N' takes what it takes without communication; every N-th one is followed by an average of all weights,
which nothing hides:

    compute | compute | ... | compute | average of M bytes |        step = step without collectives + average / N

The bytes and the rate of the link are those of the deep windows. Without windows the average takes at least what was
exposed of a step's collectives, and at most a whole step. The edit `comm=Fx`, for combinations with other remedies, is
the factor on collectives under which the replayed run has that step. What it does to learning is not predicted: the
setting follows what models lose (`headway.comm.skew.advise`), and the tightest of those that are fast is proposed.

SkewScout's controller: how loosely ranks may synchronise, given what a travelling model loses.

Every so many steps each rank's model travels to another partition and classifies examples there. What it loses
against its own partition (AL) says how far the models drifted; the bytes that were sent say what that costs:

    cost(theta) = 50 max(0, AL(theta) - 0.05) + 1 C(theta) / CM

C / CM is the bytes sent per step, as a share of the model's bytes: 1 is a synchronous job. The search is hill climbing
on the ladder with a memory of costs: a rung that was measured within the last 3 travels is not tried again.

           cost   *                              tight rungs: many bytes;  loose rungs: models drift apart
                    *           *
                       *     *                   a neighbour that is known to be cheaper is taken; else one that is not
                          *   <- stays           known is tried: the tighter one where AL is too high, or the looser one
        rungs      0  1  2  3  4

A rung whose AL differs from its last one by more than half of sigma says that the job has changed: what is remembered
of other rungs is forgotten. So does one that loses by as much more than a looser one did: of that one alone, since
looser rungs lose more. A neighbour that was dearer is tried again once its memory is too old and the present
rung's cost or AL has moved; else after 3 travels, and each time that it is dearer again after twice as many.

Source: Hsieh et al., "The non-IID data quagmire of decentralized machine learning", ICML 2020, section 7.2.

>>> controller = SkewController((1, 5, 20, 100))
>>> losses, shares = {1: 0.0, 5: 0.01, 20: 0.03, 100: 0.4}, {1: 1.0, 5: 0.2, 20: 0.05, 100: 0.01}
>>> theta = 5
>>> for _ in range(8):
...     theta = controller.next(theta, losses[theta], shares[theta])
>>> theta, controller.reused > 0
(20, True)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from headway.comm.remedies import LADDERS, rung_of
from headway.core.errors import BarMissedError, InputError
from headway.core.search import threshold
from headway.core.units import NS_PER_S, format_bytes, format_seconds
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.rings.rank_tables import DdpModel

NAME, GRANT = "comm.loose", "lossy"

NEAR = 0.05
"""Of rungs predicted within this of a step without any communication, the tightest is proposed."""

PREFERRED = 0.9
"""Compressed gradients that win this share of it are preferred: they keep replicas equal."""

RUNGS = LADDERS["fedavg"][1:4]
"""Settings that are proposed: 5, where SkewScout begins, to 20, which its authors have for FedAvg."""


def propose_loose(
    program: Program, setup: Setup, models: Sequence[DdpModel], compressed: Proposal | Refusal
) -> Proposal | Refusal:
    """Return the tightest rung of FedAvg that is fast, or why none is proposed; `compressed` is what codecs win."""
    if GRANT not in setup.limits.allow:
        return Refusal(
            NAME, "comm", "replicas that drift apart change results: grant --allow lossy to have it predicted"
        )
    if not models:
        return Refusal(NAME, "comm", "the run noted no model in DistributedDataParallel: record it with deep windows")
    try:
        instant = program.predict(["comm=instant"])
    except (InputError, BarMissedError) as cause:
        return Refusal(NAME, "comm", f"a step without communication is not known: {cause}")
    model_bytes = sum(sum(model.parameter_bytes) for model in models)
    average_s, longest_s, note = _average_s(program, model_bytes, instant.base_step_s - instant.step_s)
    rungs = {steps: instant.step_s + average_s / steps for steps in RUNGS}
    steps = next(
        steps for steps, step_s in rungs.items() if step_s <= instant.step_s * (1 + NEAR) or steps == RUNGS[-1]
    )
    speedup = instant.base_step_s / rungs[steps]
    if isinstance(compressed, Proposal) and compressed.predicted_speedup >= PREFERRED * speedup:
        reason = f"comm.compress wins {compressed.predicted_speedup:.2f}x of {speedup:.2f}x, and keeps replicas equal"
        return Refusal(NAME, "comm", reason)
    if speedup < MIN_SPEEDUP:
        return Refusal(NAME, "comm", f"averages every {steps:g} steps would win {speedup:.3f}x")
    slowest_s = instant.base_step_s / instant.interval[0] + longest_s / steps
    return Proposal(
        name=NAME,
        room="comm",
        edits=(f"comm={_factor(program, rungs[steps]):.4g}x",),
        predicted_speedup=speedup,
        interval=(min(speedup, instant.base_step_s / slowest_s), max(speedup, instant.interval[1])),
        applies=True,
        parameters={"rule": f"fedavg:{steps:g}", "control": True},
        cost="a copy of the model while it is averaged or travels",
        risk="replicas drift apart between averages: compare accuracy with that of a synchronous run, above all where "
        "ranks have unlike data, and swap BatchNorm (headway.comm.swap_norm)",
        allow=GRANT,
        conflicts=("comm.compress", "comm.bucket"),
        reason=f"An average every {steps:g} steps sends {format_bytes(model_bytes / steps)} per step in place of "
        f"{format_bytes(model_bytes)}: a step of {format_seconds(rungs[steps])} in place of "
        f"{format_seconds(instant.base_step_s)}. {note}",
    )


def _average_s(program: Program, model_bytes: int, exposed_s: float) -> tuple[float, float, str]:
    """Return the seconds of one average of all weights, the most that it can take, and what that stands on."""
    try:
        deep = program.windows()
        if deep.busy:
            raise InputError(f"{deep.busy}.")
        link = deep.links[0]
        seconds = (link.latency_ns + link.duration_ns(model_bytes)) / NS_PER_S
        return seconds, seconds, deep.words()
    except (InputError, BarMissedError) as cause:
        longest_s = max(program.measured_s, exposed_s)
        return exposed_s, longest_s, f"An average is taken for what all-reduces leave exposed: {cause}"


def _factor(program: Program, step_s: float) -> float:
    """Return the factor on collectives, 0..1, under which the replayed step takes `step_s`."""

    def is_slower(factor: float) -> bool:
        return program.predict([f"comm={factor}x"], interval=False).step_s >= step_s

    factor = threshold(is_slower, 0.0, 1.0, tolerance=1e-3)
    return 1.0 if factor is None else factor


MEMORY = 3
"""Travels for which a measured rung is remembered."""

MOVED = 0.1
"""Relative change of a cost from which on rejected neighbours are worth another try."""


@dataclass(frozen=True, slots=True)
class RungMeasurement:
    """What was measured on a rung."""

    cost: float
    """Value of the objective."""

    accuracy_loss: float
    """AL, a difference of accuracies: -1..1."""

    travel: int
    """Number of the travel that measured it."""

    patience: int = MEMORY
    """Of one that made a neighbour look dear: travels until the neighbour is tried again."""


class SkewController:
    """Chooses the next theta of a ladder; the same inputs give the same choices, on every rank."""

    def __init__(
        self, ladder: Sequence[float], *, lambda_al: float = 50.0, lambda_c: float = 1.0, sigma: float = 0.05
    ) -> None:
        """Take the settings, the tightest first.

        Raises `InputError` for a ladder without rungs or with equal ones, and for weights below 0.
        """
        self.ladder = tuple(ladder)
        if not self.ladder or len(set(self.ladder)) < len(self.ladder):
            raise InputError(f"the ladder is {list(ladder)}; pass one or more settings, each once, the tightest first.")
        for name, value in (("lambda_al", lambda_al), ("lambda_c", lambda_c), ("sigma", sigma)):
            if not 0 <= value < math.inf:
                raise InputError(f"{name} is {value}; pass a number from 0 upwards.")
        self._weights = (lambda_al, lambda_c, sigma)
        self._memory: dict[int, RungMeasurement] = {}
        self._rejected: dict[int, RungMeasurement] = {}  # rung -> what its neighbour measured when it was preferred
        self.travels = 0
        self.reused = 0
        """How often a remembered cost made a try unnecessary."""

    def next(self, theta: float, accuracy_loss: float, bytes_share: float) -> float:
        """Return the theta to go on with, after a travel that measured the present one.

        accuracy_loss
            AL: mean accuracy of models on their own partitions minus that on the visited ones.
        bytes_share
            C / CM: bytes sent per step / bytes of the model.

        Raises `InputError` for a theta that is no rung, and for measurements that are not finite numbers.
        """
        index = rung_of(self.ladder, theta)
        if not math.isfinite(accuracy_loss) or not 0 <= bytes_share < math.inf:
            raise InputError(
                f"accuracy_loss is {accuracy_loss} and bytes_share {bytes_share}; pass finite numbers, and a share "
                "from 0 upwards."
            )
        sigma, cost = self._weights[2], self.cost(accuracy_loss, bytes_share)
        before = self._memory.get(index)
        if before is not None and abs(accuracy_loss - before.accuracy_loss) > sigma / 2:
            self._memory.clear()
            self._rejected.clear()
        for rung in [rung for rung in self._memory if rung > index]:
            if self._memory[rung].accuracy_loss < accuracy_loss - sigma / 2:
                del self._memory[rung]
        now = self._memory[index] = RungMeasurement(cost, accuracy_loss, self.travels)
        self.travels += 1
        # Where AL is within its bound, a tighter rung can only send more: it is not worth a try.
        towards = (index - 1, index + 1) if accuracy_loss > sigma else (index + 1,)
        around = {rung: self._recent(rung) for rung in (index - 1, index + 1) if 0 <= rung < len(self.ladder)}
        better = [(row.cost, rung) for rung, row in around.items() if row is not None and row.cost < cost]
        self.reused += sum(measured is not None for measured in around.values())
        choice = min(better)[1] if better else index
        if not better:
            choice = next((rung for rung in towards if rung in around and self._worth_a_try(rung, now)), index)
        for rung, measured in around.items():
            then = self._rejected.get(rung)
            if measured is not None and measured.cost >= cost and (then is None or measured.travel > then.travel):
                self._rejected[rung] = now if then is None else replace(now, patience=2 * then.patience)
        if better:
            self._rejected.pop(choice, None)
        return self.ladder[choice]

    def cost(self, accuracy_loss: float, bytes_share: float) -> float:
        """Return the objective of a measurement, as `next` takes it."""
        lambda_al, lambda_c, sigma = self._weights
        return lambda_al * max(0.0, accuracy_loss - sigma) + lambda_c * bytes_share

    def _recent(self, rung: int) -> RungMeasurement | None:
        measured = self._memory.get(rung)
        return measured if measured is not None and self.travels - measured.travel <= MEMORY + 1 else None

    def _worth_a_try(self, rung: int, now: RungMeasurement) -> bool:
        """Say whether a rung is not known any more, and there is a reason to measure it."""
        if self._recent(rung) is not None:
            return False
        then = self._rejected.get(rung)
        if then is None:
            return True
        if self.travels - then.travel > then.patience or abs(now.cost - then.cost) > MOVED * then.cost:
            return True
        return abs(now.accuracy_loss - then.accuracy_loss) > self._weights[2] / 2

    def state_dict(self) -> dict[str, object]:
        """Return the memory, as numbers."""
        return {
            "travels": self.travels, "reused": self.reused,
            **{
                name: [[rung, *astuple(row)] for rung, row in rows.items()]
                for name, rows in (("memory", self._memory), ("rejected", self._rejected))
            },
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take the memory of a controller of the same ladder. Raises `InputError` for rungs that are not there."""
        tables: dict[str, dict[int, RungMeasurement]] = {}
        for name in ("memory", "rejected"):
            rows = state[name]
            assert isinstance(rows, list)
            tables[name] = {int(r): RungMeasurement(*row) for r, *row in rows}
            lost = [rung for rung in tables[name] if rung >= len(self.ladder)]
            if lost:
                raise InputError(f"the state has rung {lost[0]}, the ladder {len(self.ladder)}. Give the same ladder.")
        self._memory, self._rejected = tables["memory"], tables["rejected"]
        self.travels, self.reused = int(str(state["travels"])), int(str(state["reused"]))
