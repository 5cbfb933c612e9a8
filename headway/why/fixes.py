"""What a plan means in the user's own terms: lines of the script, commands to type, a remedy for each loader.

`headway run --apply` runs a script under a plan. A notebook is no script, so what it can do is change the line itself.

>>> row = Proposal("data.workers", "data", ("workers=8",), 2.0, (1.9, 2.1), applies=True,
...                parameters={"num_workers": 8, "prefetch_factor": 2, "persistent_workers": True, "pin_memory": False})
>>> script_terms(row)
'DataLoader(..., num_workers=8, prefetch_factor=2, persistent_workers=True)'

What a plan does with each loader of the run: the remedy that it takes, or why it takes none.

>>> row = Proposal("data.threads", "data", ("workers=4@0",), 2.0, (1.8, 2.2), applies=True, loaders=(0,),
...                left_alone={1: "it draws random numbers"})
>>> loaders = {"0": LoaderFacts(dataset="Train"), "1": LoaderFacts(dataset="Test")}
>>> [(row.remedies, row.reason) for row in loader_rows([row], [], ("data.threads",), loaders, evaluation={1})]
[(('data.threads',), ''), ((), 'data.threads: it draws random numbers')]
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway.catalog import RECORDS, causes_of
from headway.cluster.advise import BATCH
from headway.comm.advise import settings_in_vain
from headway.core.errors import BarMissedError, InputError
from headway.core.units import format_fraction
from headway.fault.remedies import FOLLOWS_FAILURES
from headway.ledger.answers.causes import Fix
from headway.ledger.answers.ledger import TRY
from headway.ledger.cause import NOT_RESOLVED, RECORD_ANEW, Cause
from headway.plan.proposal import Gain, Proposal, Refusal
from headway.trace.events.loader_facts import AppliedRow, LoaderFacts
from headway.trace.recording.run_facts import RunFacts
from headway.why.answer import LoaderRow
from headway.why.verdict import NOTHING_PAYS

if TYPE_CHECKING:
    from headway.plan.planner import Plan
    from headway.sim.recorded.program import Program

KEPT = "persistent=true"
"""The edit that keeps a loader's workers for the next pass."""

LINE = "line"
"""Key of the line of the script in the parameters of a proposal that only the user can make."""

OF_REMEDY: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "data.workers": lambda given: call(
        "DataLoader", given, "num_workers", "prefetch_factor", "persistent_workers", "pin_memory"
    ),
    "data.threads": lambda given: call(
        "headway.data.DataLoader", {**given, "workers": "threads"}, "num_workers", "workers"
    ),
    "data.cache": lambda given: call("headway.data.DataLoader", {"cache_bytes": given.get("bytes")}, "cache_bytes"),
    "data.server": lambda given: call("headway.data.DataLoader", {"server": "auto"}, "server"),
    "fault.warm": lambda given: "",  # a launcher's
    "fault.interval": lambda given: FOLLOWS_FAILURES,
    "cluster.batch": lambda given: "",  # its plan is that of headway cluster batch
    "cluster.fork": lambda given: "",  # a launch, not a line of the script: headway cluster fork -- SCRIPT
    "comm.bucket": lambda given: call(
        "DistributedDataParallel", {"bucket_cap_mb": given.get("bucket_mb")}, "bucket_cap_mb"
    ),
    "comm.gradient_view": lambda given: call(
        "DistributedDataParallel", {"gradient_as_bucket_view": True}, "gradient_as_bucket_view"
    ),
    "comm.overlap": lambda given: "headway.comm.ag_matmul(x, w, group), headway.comm.matmul_rs(a, b, group)",
    "comm.compress": lambda given: f"headway.comm.compress(model, {given.get('codec', 'half')!r})",
    "comm.loose": lambda given: f"headway.comm.loose(model, {given.get('rule', 'fedavg:5')!r})",
    "comm.static_graph": lambda given: call("DistributedDataParallel", {"static_graph": True}, "static_graph"),
    "compute.fused_optimizer": lambda given: "",  # the cause names the optimizer
    "compute.tf32": lambda given: "torch.set_float32_matmul_precision('high')",
    "compute.autocast": lambda given: "with torch.autocast(device, torch.bfloat16): ...",
    "compute.channels_last": lambda given: "model.to(memory_format=torch.channels_last)",
    "compute.cudnn_benchmark": lambda given: "torch.backends.cudnn.benchmark = True",
    "compute.compile": lambda given: "model.compile()",
    "host.gc": lambda given: f"gc.freeze() and gc.disable(), then gc.collect() every {given.get('every_steps')} steps",
    "host.logging": lambda given: (
        "q = queue.Queue(); logging.handlers.QueueListener(q, *log.handlers).start(); "
        "log.handlers = [logging.handlers.QueueHandler(q)]"
    ),
    "parallel.schedule": lambda given: "",  # torch has no public way to give a schedule another order
    "checkpoint.async": lambda given: "headway.Checkpointer(root, model=..., opt=...) in place of the save",
}  # fmt: skip
"""Remedy -> its parameters in the script's own terms."""


def script_terms(row: Proposal) -> str:
    """Return what to write for a proposal; '' where the cause's own advice says it already."""
    terms, given = OF_REMEDY.get(row.name), row.parameters
    if LINE in given:
        return str(given[LINE])
    if row.edits == (KEPT,):  # the script has these workers already
        given = {"persistent_workers": True}
    return "" if terms is None else terms(given)


def chosen_terms(proposals: Iterable[Proposal], chosen: Collection[str]) -> list[str]:
    """Return what to write for each of the `chosen` proposals that has terms of the script's own, in their order."""
    found = [script_terms(row) for row in proposals if row.name in chosen]
    return [terms for terms in found if terms]


def call(name: str, given: Mapping[str, Any], *keys: str) -> str:
    """Return a call with those of `keys` that are given and not False, beside what it has already.

    >>> call("f", {"a": 1, "b": False, "c": "x"}, "a", "b", "c", "d")
    "f(..., a=1, c='x')"
    """
    return f"{name}({', '.join(['...', *(f'{key}={given[key]!r}' for key in keys if given.get(key))])})"


# Of the causes of a run: which remedy answers each, and what else the run says of them.


FAR = 20.0
"""A range whose ends lie further apart than this says nothing, and is not written."""


def fixes_of(
    plan: Plan, refused: Collection[str] = (), *, launched: bool = True, allow: Collection[str] = ()
) -> dict[str, Fix]:
    """Return, for each cause, the proposal that wins most against it; a `refused` one is left to the script.

    What headway can apply is promised only where the plan holds it, or would hold it with one more consent: that one
    is named, with the consent, where no other one wins. Where one that needs none may win, and this run is too noisy to
    tell, that is said instead.
    Of a proposal that headway cannot apply the prediction is taken; what to do is what the cause's rule says.
    """
    fixes: dict[str, Fix] = {}
    unsure: dict[str, Fix] = {}
    short = {row.name for row in plan.left_out if row.kind == "short"}  # by hand it costs no trial
    rows = [_by_hand(row) if row.name in short or not row.clear else row for row in plan.proposals]
    short |= {row.name for row, planned in zip(rows, plan.proposals, strict=True) if row is not planned}
    free = [row for row in rows if row.allow is None or row.allow in allow]
    rest = [row for row in rows if row not in free]
    free = [row for row in free if not row.applies or row.name in (*plan.chosen, *refused, *short)]
    won = {cause for row in free if row.clear for cause in causes_of(row.name)}
    for row in rows:
        if not (row.applies and row.allow is None and row.gain.unresolved):
            continue
        tells = row.interval[1] <= FAR * row.interval[0]
        wins = f"{row.name} may win {row.gain}" if tells else f"this run does not tell what {row.name} wins"
        text = f"{NOT_RESOLVED}: {wins}; {RECORD_ANEW}"
        found = Fix(text, row.predicted_speedup, row.interval, script_terms(row))
        unsure |= {cause: found for cause in causes_of(row.name) if cause not in won}
    for row in [*free, *rest]:
        won_in_evaluations = row.evaluation_share > 1 / 2
        for cause in ("eval",) if won_in_evaluations else causes_of(row.name):
            best = fixes.get(cause)
            if row in rest and won.union(unsure).intersection(causes_of(row.name)):
                continue  # beside a small cause it would stand with what it wins of the large one
            if row.clear and (best is None or row.predicted_speedup > best.predicted_speedup):
                grant = "" if row in free else f" --allow {row.allow}"
                how = f"headway plan{grant}, then headway run --apply"
                how = f"{RECORDS[row.name].changes or DRAWS}: {how}" if grant else how
                how = "in the script itself: headway could not apply it" if row.name in refused else how
                edits = ", ".join(edit for edit in row.edits if not edit.startswith(("op:", "accelerator=")))
                if row.name in short:
                    how, edits = "in the script itself: this job is too short to win back what trying it costs", ""
                    how = SHARED_CORES if LINE in row.parameters else how
                text = f"{row.name}: {edits} ({how})" if edits else f"{row.name} ({how})"
                if not launched:
                    text = script_terms(row)
                by_headway = row.applies and row.name not in (*refused, *short)
                of_rule = row.name == "data.workers" or not cause.startswith("input.")  # what the cause's rule advises
                said = by_headway or row.name in refused or (row.applies and not of_rule) or LINE in row.parameters
                text = text if said else ""
                fixes[cause] = Fix(
                    text,
                    row.predicted_speedup,
                    row.interval,
                    script_terms(row),
                    row.name if by_headway else "",
                    row.allow or "" if by_headway and grant else "",
                )
    return {**unsure, **fixes}


def _by_hand(row: Proposal) -> Proposal:
    """Return the proposal with what the script itself wins by it, where that is known and clear."""
    if row.by_hand is None or not row.by_hand.clear:
        return row
    given = {LINE: row.by_hand_script} if row.by_hand_script else row.parameters
    gain = row.by_hand
    return replace(row, predicted_speedup=gain.predicted_speedup, interval=gain.interval, parameters=given)


SHARED_CORES = (
    "in the script itself, with fewer threads for torch's operators, so that workers have cores: sums are rounded in "
    "another order"
)


def fixes_of_run(plan: Plan, facts: RunFacts, refused: Collection[str], allow: Collection[str]) -> dict[str, Fix]:
    """Return the same of a run; workers are the fix too of what they would do besides reading."""
    fixes = fixes_of(plan, refused, launched=facts.launched, allow=allow)
    workers = next((fix for fix in fixes.values() if fix.remedy == "data.workers"), None)
    keeps = any(row.name == "data.workers" and KEPT in row.edits for row in plan.proposals)
    also = {"input.start": keeps}
    return fixes | {cause: workers for cause, does in also.items() if does and workers is not None}


def notes_of(plan: Plan, applied: Sequence[AppliedRow]) -> tuple[str, ...]:
    """Say what became of remedies in the run, and what a plan has beside its proposals."""
    return (
        *(f"{name} was not applied to this run: {why}" for name, why in refusals(applied).items()),
        *(f"{name} was withdrawn while the run went on: {why}" for name, why in withdrawn(applied).items()),
        *(
            f"{row.reason}: {row.name} guards against that, with headway plan --allow {row.allow}"
            for row in plan.proposals
            if row.protects and row.allow
        ),
        *(f"{row.name}: {row.reason}" for row in plan.refused if row.name == BATCH),
    )


DRAWS = "with other random draws of the same distribution"
"""What a grant admits, as a fix says it, of a remedy whose record does not say: it needs one for some scripts alone."""


def refuted(cause: Cause, plan: Plan) -> Cause:
    """Take back the advice to try an edit where the planner tried its like on this run and none of it surely pays."""
    tried = [row for row in plan.proposals if cause.cause in causes_of(row.name)]
    given = [f"{row.name} {row.known}" for row in plan.refused if row.known and cause.cause in causes_of(row.name)]
    if TRY not in cause.fix or not (tried or given) or any(row.clear for row in tried):
        return cause
    predicted = ", ".join(f"{row.name} {row.predicted_speedup:.2f}x" for row in tried)
    known = [*([f"predicted: {predicted}"] if tried else []), *given]
    unsure = any(row.gain.unresolved for row in tried)
    fix = f"{f'{NOT_RESOLVED}: inside the noise of two runs' if unsure else NOTHING_PAYS} ({'; '.join(known)})"
    fix += f"; {RECORD_ANEW}" if unsure else ""
    return replace(cause, fix=fix, predicted_speedup=None, interval=None, at_most=False, script="")


def with_doubt(cause: Cause) -> Cause:
    """Say of advice that its gain is not resolved, and what to do about that, where this run is too noisy to tell.

    >>> line = Cause("compute.batch", "train.py:7", 2.0, "", "larger batches", 1.31, (0.79, 2.72))
    >>> with_doubt(line).fix
    'larger batches; its gain is not resolved: record for longer, or on a quieter host'
    """
    if cause.at_most or cause.predicted_speedup is None or cause.interval is None or NOT_RESOLVED in cause.fix:
        return cause
    if cause.interval[1] > FAR * cause.interval[0]:
        fix = f"{cause.fix}; this run does not tell what it wins: {RECORD_ANEW}"
        return replace(cause, fix=fix, predicted_speedup=None, interval=None)
    unsure = Gain(cause.predicted_speedup, cause.interval).unresolved
    return replace(cause, fix=f"{cause.fix}; its gain is {NOT_RESOLVED}: {RECORD_ANEW}") if unsure else cause


KEEPS = "persistent_workers=True"
FEWER_DRAWS = "workers that are kept draw one random number less a pass: later passes have other ones"


def with_draws(cause: Cause) -> Cause:
    """Say of a line that is left to the user that it changes the script's random numbers: headway's workers do not."""
    if cause.remedy or KEEPS not in cause.script:
        return cause
    return replace(cause, fix=f"{cause.fix}; {FEWER_DRAWS}")


def with_reasons(cause: Cause, program: Program) -> Cause:
    """Say of a pipeline's bubble, or of DDP's communication, what it comes from, where the run shows it."""
    if cause.cause == "comm.exposed" and (in_vain := settings_in_vain(program)) is not None:
        shows, fix, script = in_vain
        cause = replace(cause, evidence=f"{cause.evidence}; {shows}")
        if cause.remedy or cause.script:
            return cause
        return replace(cause, fix=fix, script=script, predicted_speedup=None, interval=None, at_most=False)
    if cause.cause != "bubble.p2p":
        return cause
    from headway.parallel.advise import reasons_of

    try:
        reasons = reasons_of(program)
    except (InputError, BarMissedError):
        return cause
    order, unequal, transfers = (
        format_fraction(max(reasons[name], 0.0) / program.measured_s) for name in ("order", "unequal", "transfers")
    )
    said = f"the order costs {order} of a step, unequal stages {unequal}, transfers {transfers}"
    return replace(cause, evidence=f"{cause.evidence}; {said}")


# What `headway run --verify` found: batches under remedies compared with the script's own, over all ranks.

COUNTS = ("batches", "compared", "equal", "unequal")


def verified(applied: Iterable[AppliedRow]) -> dict[str, object] | None:
    """Return how many batches of a run remedies made, how many of them were compared, equal and unequal.

    `not_compared` says why some that were due were not. None where the run was not verified, or no remedy was applied.
    """
    found: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "not_compared": {}}
    facts = [row.facts for row in applied if row.facts is not None and "verification" in row.facts]
    for fact in facts:
        for name in COUNTS:
            found[name] += int(fact["verification"][name])
        for reason, count in fact["not_compared"].items():
            found["not_compared"][reason] = found["not_compared"].get(reason, 0) + int(count)
    return found if facts else None


def withdrawn(applied: Iterable[AppliedRow]) -> dict[str, str]:
    """Return remedy -> why it was taken away from a loader, or gave one back, while the run went on."""
    found: dict[str, dict[str, None]] = {}
    for row in applied:
        reasons = [(entry, entry.reason) for entry in row.decisions("withdrawn")]
        taken = set()
        for entry in row.decisions("loaders"):  # in the order of the decisions
            if entry.reason_not_applied is None:
                taken.add(entry.dataset)
            elif row.applied and entry.had_it and entry.dataset in taken:  # not one that evaluates, and never had it
                reasons.append((entry, entry.reason_not_applied))
        for entry, reason in reasons:
            name = ", ".join(filter(None, (entry.line, entry.dataset)))
            found.setdefault(row.name, {})[f"{name}: {reason}"] = None
    return {name: "; ".join(reasons) for name, reasons in found.items()}


def run_command(facts: RunFacts, *options: str) -> str:
    """Return what runs a recorded script again with `options`, on as many ranks of this host.

    What several hosts recorded is started as they were: that is left to the user.
    """
    alone = facts.launched and len(facts.hosts) < 2
    script = facts.script if alone and facts.script and facts.script[0].endswith(".py") else ()
    ranks = ["--nproc-per-node", f"{facts.nproc}"] if alone and (facts.nproc or 1) > 1 else []
    command = shlex.join(["headway", "run", *ranks, *options])
    return f"{command} -- {shlex.join(script) if script else '<your script and its arguments>'}"


def loader_rows(
    proposals: Sequence[Proposal],
    refused: Sequence[Refusal],
    chosen: Collection[str],
    loaders: Mapping[str, LoaderFacts],
    *,
    evaluation: Collection[int],
) -> list[LoaderRow]:
    """Return a row per loader: where it is, what reads it, the chosen remedies for it, or the reason for none.

    `evaluation` are the groups of the loaders that evaluations read.
    """
    about: list[Proposal | Refusal] = [row for row in proposals if row.loaders]
    about += [row for row in refused if row.left_alone]
    rows = []
    for name, facts in sorted(loaders.items(), key=lambda pair: int(pair[0])):
        group = int(name)
        taken = [row.name for row in proposals if row.name in chosen and group in row.loaders]
        used_by = "evaluation" if group in evaluation else "training"
        reason = "" if taken else _reason(group, about, chosen)
        rows.append(LoaderRow(group, facts.place or None, facts.dataset, used_by, tuple(taken), reason))
    return rows


def _reason(group: int, about: Sequence[Proposal | Refusal], chosen: Collection[str]) -> str:
    """Return why a loader takes no remedy: of the chosen ones if they leave it alone, else of the first that does."""
    leaving = [row for row in about if group in row.left_alone]
    if leaving:
        first = min(leaving, key=lambda row: row.name not in chosen)
        return f"{first.name}: {first.left_alone[group]}"
    if any(group in row.loaders for row in about if isinstance(row, Proposal)):
        return "no remedy for it is in the plan"
    return "the replayed steps did not wait for it" if about else "no remedy was considered"


def outcomes(applied: Iterable[AppliedRow]) -> dict[str, AppliedRow]:
    """Return remedy -> its outcome over all ranks: refused as soon as one rank refused it."""
    found: dict[str, AppliedRow] = {}
    for row in applied:
        if row.name not in found or row.reason_not_applied:
            found[row.name] = row
    return found


def refusals(applied: Iterable[AppliedRow]) -> dict[str, str]:
    """Return remedy -> why it was not applied, for those of a run that were not."""
    return {name: why for name, row in outcomes(applied).items() if (why := row.reason_not_applied)}
