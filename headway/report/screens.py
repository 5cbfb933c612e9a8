"""Terminal screens of every verb but `why`: run, plan, what-if, compare, data stalls, doctor, trace info.

Each takes what the verb prints with `--json` and returns a string; a missing
or null figure is written '-', never guessed. Times in seconds.

>>> print(render_run({"steps_per_s": 21.4, "goodput": 0.561}, width=60))
headway run
<BLANKLINE>
  Done. 21.4 steps/s · goodput 56.1 %
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from msgspec import structs
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headway.core.units import (
    clean,
    count,
    device_seconds,
    finite,
    format_bytes,
    format_rate,
    interval,
    percent,
    plural,
    seconds,
    speedup,
)
from headway.ledger.cause import NOT_RESOLVED
from headway.report.answers import PlanAnswer, ProposalRow, RunAnswer, VerifiedRow, goodput_of, start_of
from headway.report.paper import (
    ScreenOptions,
    add_row,
    command_line,
    draw,
    grid,
    headed,
    joined,
    next_of,
    paragraph,
    title,
)
from headway.trace.events.loader_facts import AppliedRow
from headway.why.answer import Json, Why
from headway.why.verdict import GAIN_WORTH_NAMING, NOTHING_PAYS, ending, predicted, verdict

if TYPE_CHECKING:
    from headway.data.stalls.model import StallReport
    from headway.ledger.answers.compare import BucketChange, RunComparison
    from headway.runtime.host.doctor import Finding
    from headway.sim.whatif import Prediction

WHOLE_PLAN = "plan"
"""The row of `run.applied` that stands for all remedies together, where there is one."""

LONGEST_KEY = 40
"""Characters of a name in `headway trace info`: kernels have names of several lines."""


def render_run(
    answer: Json, *, why: Json | None = None, command: str = "", notes: Sequence[str] = (),
    **screen: Unpack[ScreenOptions],
) -> str:  # fmt: skip
    """Return the last screen of a `headway.run/1` object: how it ended, how fast it was, predicted beside measured.

    The row named 'plan' stands last and in bold; a remedy that was not applied, or was withdrawn, is told below the
    table, then what verification counted and a traceback. Below stand `notes`, what took the time and what to do about
    it, from a `headway.why/2` object, and the `command` to type next.
    """
    run = RunAnswer.of(answer)
    parts: list[RenderableType] = [title("headway run", run.run, width=screen.get("width", 88)), ""]
    rate, failed = finite(run.steps_per_s), ending(run.exit)
    facts = joined([f"{format_rate(rate)} steps/s" if rate is not None else "", goodput_of(run)])
    end = (f"{failed} ", "bold red") if failed else ("Done. ", "bold")
    parts.append(paragraph(Text.assemble(end, facts)))
    if run.applied:
        parts += ["", *_applied(run)]
    if run.verified and (run.verified.compared or run.verified.not_compared):
        parts.append(paragraph(_verified(run.verified)))
    parts += _traceback(run)
    if notes:
        parts += ["", *(paragraph(note) for note in notes)]
    if why is not None:
        parts += ["", *verdict_lines(structs.replace(Why.of(why), exit=None))]  # how it ended is said above
    return draw([*parts, *next_of(command)], **screen)


def verdict_lines(why: Why) -> list[RenderableType]:
    """Return the sentence on where the time went, and below it the fix with its predicted gain."""
    answer = verdict(why)
    parts: list[RenderableType] = [paragraph(answer.sentence, style="bold")]
    if answer.fix:
        gain = f" Predicted {answer.gain} the steps per second." if answer.gain else ""
        parts.append(paragraph(Text.assemble(("Fix: ", "bold"), answer.fix.rstrip(".") + ".", gain)))
    return parts


UNLIKE_START = 0.05
"""By how much the gain over all steps has to differ from that of the steady ones before both are said."""


def _verified(found: VerifiedRow) -> Text:
    """Return how many of the batches under remedies were compared with the script's own, and were equal."""
    if found.compared:
        text = f"Verified: {found.equal} of {found.compared} compared batches equal the script's own"
        text += f", {found.unequal} do not" * bool(found.unequal) + f"; {found.batches} came under remedies"
    else:
        text = f"Not verified: no batch of {found.batches} under remedies was compared with the script's own"
    missed = [f"{count} could not be compared: {clean(reason)}" for reason, count in found.not_compared.items()]
    return Text(f"{joined([text, *missed], '; ')}.", style="bold red" if found.unequal else "")


def _applied(run: RunAnswer) -> list[RenderableType]:
    """Return the table of remedies: predicted, measured, how far apart; refused ones with their reason below."""
    table, done = headed("remedy", "predicted", "measured", "prediction off by"), applied(run.applied)
    for row in done:
        error = prediction_error(row)
        off = "-" if error is None else f"{100 * error:+.1f} %"
        style = "bold" if row.name == WHOLE_PLAN else ""
        measured = "withdrawn" if row.withdrawn else measured_words(row)
        add_row(table, clean(row.name), predicted(row), measured, off, style=style)
    aside = f"  against {clean(run.baseline)}" * bool(run.baseline)
    heading = Text.assemble("  ", ("Predicted and measured", "bold"), (aside, "dim"))
    parts: list[RenderableType] = [heading, table] if done else []
    for row in run.applied:
        steady, whole = finite(row.measured_speedup), finite(row.measured_with_start)
        if steady and whole and abs(whole / steady - 1) > UNLIKE_START and not row.reason_not_applied:
            text = f"{speedup(steady)} is of the steps behind the start; over as many steps of both, the first included"
            parts.append(paragraph(f"{text}: {speedup(whole)}.", style="dim"))
        if row.inconclusive and row is done[-1]:
            gain = f"Measured {speedup(steady)}, which is inconclusive" if steady else "Nothing is measured"
            parts.append(paragraph(f"{gain}: {clean(row.inconclusive)}.", style="dim"))
        if reason := row.reason_not_applied or row.withdrawn:
            what = "not applied" if row.reason_not_applied else "withdrawn while the run went on"
            parts.append(paragraph(Text.assemble(clean(row.name), (f"  {what}: {clean(reason)}", "dim"))))
    return parts


def applied(rows: Sequence[AppliedRow]) -> list[AppliedRow]:
    """Return the rows of what was applied, that of the whole plan last; a plan of one remedy is that remedy's row.

    >>> [row.name for row in applied([AppliedRow(name="plan"), AppliedRow(name="host.gc")])]
    ['host.gc']
    """
    done = sorted((row for row in rows if not row.reason_not_applied), key=lambda row: row.name == WHOLE_PLAN)
    return done if sum(row.name != WHOLE_PLAN for row in rows) > 1 else done[:1]


def measured_words(row: AppliedRow) -> str:
    """Return the measured gain of an applied remedy, or that nothing can be said of it.

    >>> measured_words(AppliedRow(measured_speedup=2.0)), measured_words(AppliedRow(inconclusive="a busy host"))
    ('2.00x', 'inconclusive')
    """
    return "inconclusive" if row.inconclusive else speedup(row.measured_speedup)


def prediction_error(row: AppliedRow) -> float | None:
    """Return predicted / measured - 1 of one applied remedy, None when either is missing or inconclusive.

    >>> round(prediction_error(AppliedRow(predicted_speedup=1.9, measured_speedup=2.0)), 3)
    -0.05
    """
    expected, measured = finite(row.predicted_speedup), finite(row.measured_speedup)
    return None if expected is None or not measured or row.inconclusive else expected / measured - 1


def _traceback(run: RunAnswer) -> list[RenderableType]:
    """Return the first failing rank's traceback line by line, kept verbatim but for control characters."""
    if run.exit is None or not run.exit.traceback:
        return []
    lines = [" " * (len(line) - len(line.lstrip())) + clean(line) for line in run.exit.traceback.splitlines()]
    return ["", *(Text("  " + line, overflow="fold") for line in lines)]


def render_plan(answer: Json, *, source: str = "", apply: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.plan/1` object: proposals, the chosen ones marked, the command to apply them.

    `source` is the run as the user named it, `apply` the command that runs the job under the plan. A recording that no
    launcher began says what to write in the script in place of the command.
    """
    plan, width, unicode = PlanAnswer.of(answer), screen.get("width", 88), screen.get("unicode", True)
    found, proposals = plan.verdict, [row for row in plan.proposals if not row.slows]
    sentence = paragraph(_plan_sentence(plan, source))
    parts: list[RenderableType] = [title("headway plan", source, width=width), "", sentence]
    if not plan.chosen and found.fix and not found.allow:
        is_open = found.fix.startswith(NOT_RESOLVED)
        owner = "Fix" if found.fix.startswith(NOTHING_PAYS) else "For you to do"
        fix = found.fix[:1].upper() + found.fix[1:] if is_open else f"{owner}: {found.fix}"
        parts += ["", paragraph(clean(found.sentence)), paragraph(f"{clean(fix)}.")]
        parts += [command_line("In the script", clean(found.script))] if found.script else []
    if proposals:
        parts += ["", *_proposals(plan, "✓" if unicode else "*")]
    if len(plan.loaders) > 1 or (plan.loaders and plan.chosen and not any(row.remedies for row in plan.loaders)):
        parts += ["", *_loaders(plan)]
    reasons = {clean(r.name): clean(r.left_out.reason) for r in proposals if r.left_out.kind not in ("", "hand")}
    if reasons:
        lines = (paragraph(f"{name}: {reason}", style="dim") for name, reason in reasons.items())
        parts += ["", Text("  Proposed, not in the plan", style="bold"), *lines]
    refused = [f"{clean(r.name)}: {with_gain(r)}" for r in plan.proposals if r.slows]
    refused += [f"{clean(r.name)}: {clean(r.reason)}" for r in plan.refused if clean(r.name) not in reasons]
    if refused:
        parts += ["", Text("  Considered, not proposed", style="bold"), *(paragraph(r, style="dim") for r in refused)]
    if plan.hidden:
        more = f"{count(plan.hidden)} more for losses that this run does not have, or for you to apply"
        parts += ["", paragraph(f"{more}: {shlex.join(_plan_of(source, '--all'))}", style="dim")]
    if plan.failures.note:
        parts += ["", Text("  Lost ranks", style="bold"), paragraph(clean(plan.failures.note))]
    if plan.note:
        parts += ["", paragraph(clean(plan.note), style="dim")]
    if plan.in_script:  # recorded without a launcher: there may be no script to run under the plan
        parts += ["", *(command_line("Next, in the script", clean(terms)) for terms in plan.in_script)]
    elif plan.in_script is None and plan.chosen:
        parts += next_of(apply)
    elif not plan.chosen:
        parts += next_of(found.command)
    return draw(parts, **screen)


def _plan_of(source: str, *options: str) -> list[str]:
    """Return the command that plans for the run `source` (none: the newest) with `options`."""
    return ["headway", "plan", *([source] if source else []), *options]


def _plan_sentence(plan: PlanAnswer, source: str) -> Text:
    """Return what the chosen remedies gain together, or that there is nothing to apply."""
    protecting = {row.name for row in plan.proposals if row.protects}
    guards = [clean(name) for name in plan.chosen if name in protecting]
    number = len(plan.chosen) - len(guards)
    if not plan.chosen:
        return Text(nothing_to_apply(plan, source) + by_hand(plan), style="bold")
    if not number:
        return Text(f"{joined(guards, ', ')} protects the job; it makes no step faster.", style="bold")
    together = f"{number} remedies together" if number > 1 else "One remedy"
    return Text(f"{together}: predicted {predicted(plan)} the steps per second.{start_of(plan)}", style="bold")


def nothing_to_apply(plan: PlanAnswer, source: str = "") -> str:
    """Return the sentence on why no remedy is in the plan of the run `source`: the reason that bars what gains most.

    >>> left_out = {"kind": "memory", "reason": "needs 2 GB"}
    >>> row = {"name": "data.cache", "predicted_speedup": 1.75, "left_out": left_out}
    >>> nothing_to_apply(PlanAnswer.of({"proposals": [row]}))
    'Nothing to apply: data.cache, predicted 1.75x, needs 2 GB.'
    >>> row = {"name": "comm.compress", "reason": "compressed gradients change results: grant --allow lossy"}
    >>> nothing_to_apply(PlanAnswer.of({"refused": [row]}))[-68:]
    'noise of two runs; what needs your consent (--allow) is not counted.'
    """
    barred = [row for row in plan.proposals if row.left_out.kind in ("grant", "memory", "short")]
    best = max(barred, key=lambda row: row.predicted_speedup or 0.0, default=None)
    if best is not None and best.left_out.kind == "grant":
        what = f"{clean(best.name)}, predicted {predicted(best)}"
        if best.protects:  # it is no answer to a cause, of which the verdict speaks
            what = f"{clean(best.name)}, {clean(best.reason)}"
        elif plan.verdict.allow:  # the next command has it
            return f"1 remedy needs your consent: {what}."
        command = shlex.join(_plan_of(source, "--allow", clean(best.allow)))
        return f"1 remedy needs your consent: {what}. Grant it with: {command}"
    if best is not None:
        return f"Nothing to apply: {clean(best.name)}, {with_gain(best)}."
    unsafe = joined([clean(row.name) for row in plan.refused if row.unsafe], ", ")
    asks = any("--allow" in row.reason for row in plan.refused)
    unasked = "; what needs your consent (--allow) is not counted" if asks else ""
    if unsafe:
        what = f"{unsafe} could change results here, and nothing else of headway's own gains more than the noise"
        return f"Nothing to apply: {what}{unasked}."
    return f"Nothing to apply: no remedy of headway's own gains more than the noise of two runs{unasked}."


def with_gain(row: ProposalRow) -> str:
    """Return why a proposal is not in the plan, behind its predicted gain."""
    reason = clean(row.left_out.reason)
    return reason if reason.startswith("predicted ") else f"predicted {predicted(row)}, {reason}"


def whole_amount(total_s: float) -> str:
    """Write all device-seconds of a run or a trace as one word.

    >>> whole_amount(40.31), whole_amount(0.0498)
    ('40.3 device-seconds', '49.8 device-milliseconds')
    """
    number, _, unit = device_seconds(total_s, total_s).partition(" ")
    return f"{number} device-{'seconds' if unit == 's' else 'milliseconds'}"


def by_hand(plan: PlanAnswer) -> str:
    """Return the sentence on what wins most of what only the user can apply, '' where nothing is sure to win.

    >>> links = {"name": "comm.links", "predicted_speedup": 1.2, "interval": [1.1, 1.3], "cost": "cables"}
    >>> by_hand(PlanAnswer.of({"proposals": [links]}))
    ' By hand: comm.links, predicted 1.20x (1.10 to 1.30). cables'
    """
    able = [row for row in plan.proposals if not row.applies and row.interval]
    sure = [row for row in able if row.interval and row.interval[0] >= GAIN_WORTH_NAMING]
    best = max(sure, key=lambda row: row.predicted_speedup or 0.0, default=None)
    if best is None:
        return ""
    return f" By hand: {clean(best.name)}, predicted {predicted(best)}. {clean(best.reason or best.cost)}".rstrip()


def _proposals(plan: PlanAnswer, mark: str) -> list[RenderableType]:
    """Return the table of proposals, chosen ones in bold behind a mark, and the legend of the mark."""
    titles = "", "proposal", "predicted", "applied by", "cost and risk"
    table = headed(*titles, align="left left right left fold")
    for row in (row for row in plan.proposals if not row.slows):
        is_chosen = row.name in plan.chosen
        cost = joined([clean(text) for text in (row.cost, row.risk) if clean(text) not in ("", "none")], "; ") or "none"
        name = Text(clean(row.name), style="bold" if is_chosen else "")
        cells = (mark if is_chosen else " ", name, predicted(row), "headway" if row.applies else "you")
        add_row(table, *cells, Text(cost, style="dim"))
    remark = [paragraph(f"{mark} = in the plan.", style="dim")] if plan.chosen else []
    return [table, *remark]


def _loaders(plan: PlanAnswer) -> list[RenderableType]:
    """Return a line per loader: where, what reads it, its remedy or why none; then shares that evaluations win."""
    lines: list[RenderableType] = [Text("  Loaders", style="bold")]
    for row in plan.loaders:
        where = joined([clean(row.line or ""), clean(row.dataset)], ", ")
        what = joined([clean(name) for name in row.remedies], ", ") or f"left alone: {clean(row.reason)}"
        lines.append(paragraph(f"{row.loader}  {where} ({clean(row.used_by)}): {what}", style="dim"))
    for won in plan.proposals:
        if won.evaluation_share > 0 and won.name in plan.chosen:
            text = f"{percent(won.evaluation_share)} of the time that {clean(won.name)} wins is won in evaluations."
            lines.append(paragraph(text, style="dim"))
    return lines


def render_whatif(found: Prediction, **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway whatif`: seconds per step before and after the edits, and their ratio."""
    edits = joined([clean(edit) for edit in found.edits], ", ") or "no edit"
    steps = f"{seconds(found.base_step_s)} -> {seconds(found.step_s)} per step, "
    sentence = Text.assemble(steps, (speedup(found.speedup), "bold"), f" ({interval(found.interval)})")
    note = [paragraph(clean(found.note), style="dim")] if found.note else []
    return draw(
        [title("headway whatif", edits, width=screen.get("width", 88)), "", paragraph(sentence), *note], **screen
    )


def render_compare(found: RunComparison, *, names: tuple[str, str] = ("", ""), **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway compare`: which run is faster, what each bucket takes in both.

    `names` are the two runs as the user named them.
    """
    aside = " -> ".join(name for name in names if name)
    parts: list[RenderableType] = [title("headway compare", aside, width=screen.get("width", 88)), ""]
    if found.speedup:
        rates = " -> ".join(map(format_rate, found.steps_per_s))
        style = "bold red" if found.regressions else "bold"
        parts.append(paragraph(f"{_pace(found)} ({rates} steps/s).", style=style))
    shares = " -> ".join("unknown" if share is None else percent(share) for share in found.step_goodput)
    parts.append(paragraph(f"Goodput in steps: {shares}.", style="dim"))
    if found.changes:
        parts += ["", _changes(found.changes)]
    if found.regressions:
        parts += ["", *(paragraph(Text.assemble(("regression  ", "red"), clean(row))) for row in found.regressions)]
    elif found.verdict != "inconclusive":
        parts += ["", paragraph(f"No regression past {percent(found.threshold)}.", style="dim")]
    parts += [paragraph(Text.assemble(("note  ", "yellow"), clean(note))) for note in found.notes]
    return draw(parts, **screen)


def _pace(found: RunComparison) -> str:
    """Return which run is faster, with the range of the ratio, or why that cannot be said."""
    ratio, ends = found.speedup, found.interval or ()
    if found.verdict == "inconclusive":
        return f"Inconclusive: {clean(found.inconclusive)}"
    if found.useful_examples_per_s is not None:
        before, after = found.useful_examples_per_s
        rates = f"useful examples per second {before:,.0f} -> {after:,.0f}, {after / before:.2f}x"
        more = "less" if after < before else "more"
        return f"The second run learns {more} per second: {rates}; steps of another batch"
    if found.verdict == "not resolved":
        if not ends:
            return "Not resolved: fewer than four steps; record more of them"
        change, low, high = (f"{100 * (value - 1):+.1f} %" for value in (ratio, *ends))
        return f"No difference resolved: {change} ({low} to {high})"
    times = speedup(max(ratio, 1 / ratio))
    between = " to ".join(f"{end:.2f}" for end in sorted(ends if ratio >= 1 else (1 / end for end in ends)))
    between = between and f" ({between})"
    is_same, word = times == "1.00x", "faster" if ratio >= 1 else "slower"
    return f"The second run is {'as fast as the first' if is_same else f'{times} {word}{between}'}"


def _changes(changes: Sequence[BucketChange]) -> Table:
    """Return seconds per device of each bucket before and after; buckets that are empty in both are left out."""
    titles = "per device", "first", "second", "change", "", ""
    table = headed(*titles, align="left right right right right left")
    for row in changes:
        before, after = row.before_s, row.after_s
        if not before and not after:
            continue
        change = f"{'+' if after > before else '-' if after < before else ''}{seconds(abs(after - before))}"
        relative = f"{100 * (after / before - 1):+.0f} %" if before else "new"
        cells = (row.bucket, seconds(before), seconds(after), change, relative, Text(f"per {row.per}", "dim"))
        add_row(table, *cells, style="red" if row.regressed else "")
    return table


def render_stalls(found: StallReport, *, source: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway data stalls`: a step's input time, the bottleneck, what each fix wins."""
    head = title("headway data stalls", source, width=screen.get("width", 88))
    fractions, epoch = found.fractions, found.per_epoch()
    table = headed("", "per step", "share", "per epoch" if epoch else "")
    for name, share in fractions.items():
        label = name if name == "compute" else f"{name} stall"
        add_row(table, label, seconds(share * found.step_s), percent(share), seconds(epoch[name]) if epoch else "")
    bottleneck = paragraph(f"The bottleneck is {clean(found.bottleneck)}.", style="bold")
    parts: list[RenderableType] = [head, "", bottleneck, "", table]
    if found.fix:
        gains = grid("left", "right")
        for edit, gain_s in found.fix:
            add_row(gains, clean(edit), f"{seconds(gain_s)} less per step")
        parts += ["", Text("  What each fix wins", style="bold"), gains]
    remarks = [remark for remark in (*found.flags, found.note) if remark]
    if remarks:
        parts += ["", *(paragraph(clean(remark), style="dim") for remark in remarks)]
    return draw(parts, **screen)


def render_doctor(rows: Sequence[Finding], **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway doctor`: one line per finding; a fix is told where something is wrong."""
    bad = [row for row in rows if row.ok is False]
    good, wrong = ("✓", "✗") if screen.get("unicode", True) else ("ok", "!!")
    sentence = f"{len(bad)} of {len(rows)} need attention." if bad else f"All {len(rows)} in order."
    table = grid("left", "left", "fold")
    for row in rows:
        mark = Text("-", style="dim") if row.ok is None else Text(good, "green") if row.ok else Text(wrong, "bold red")
        needed = f"  needs {_plain(row.limit)}" if row.limit not in (None, "", row.value) else ""
        fix = f"\n{clean(row.fix)}" if row.fix and not row.ok else ""
        add_row(table, mark, clean(row.name), Text.assemble(_plain(row.value), (needed, "dim"), fix))
    head = title("headway doctor", "", width=screen.get("width", 88))
    return draw([head, "", paragraph(sentence, style="bold"), "", table], **screen)


def render_trace_info(info: Json, **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway trace info`: every fact of the object, names to the left; nested ones indented."""
    source = str(info.get("path", info["source"]))
    table = grid("left", "fold")
    for name, value in info.items():
        if name in ("schema", "path") or value in (None, [], {}):
            continue
        if isinstance(value, Mapping):
            add_row(table, Text(_words(name), style="bold"), "")
            for key, inner in value.items():
                label = clean(key)
                label = label if len(label) <= LONGEST_KEY else label[: LONGEST_KEY - 1] + "…"
                add_row(table, f"  {label}", _plain(inner, str(key)))
        else:
            add_row(table, _words(name), _plain(value, str(name)))
    return draw([title("headway trace info", source, width=screen.get("width", 88)), "", table], **screen)


def _words(name: str) -> str:
    """Return a key as words, its unit suffix dropped: the value carries the unit."""
    words = clean(name)
    for suffix in ("_ns", "_s", "_bytes", "_fraction"):
        words = words.removesuffix(suffix)
    return words.replace("_", " ")


def _plain(value: Any, name: str = "") -> str:
    """Return any JSON value as short text, in the unit that the key's suffix names."""
    number = finite(value)
    if number is not None:
        for suffix, written in (("_ns", lambda v: seconds(v / 1e9)), ("_s", seconds), ("_bytes", format_bytes)):
            if name.endswith(suffix):
                return clean(written(number))
        if name.endswith("_fraction") or name in ("coverage", "goodput"):
            return percent(number)
        return count(number) if number == int(number) else f"{number:.4g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if set(value) == {"events", "duration_ns"}:
            return f"{_plain(value['duration_ns'], 'duration_ns')} in {plural(value['events'], 'event')}"
        return ", ".join(f"{clean(k)}={_plain(v, str(k))}" for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = [_plain(v) for v in value[:12]]
        return ", ".join(shown) + (f", and {len(value) - 12} more" if len(value) > 12 else "")
    return clean(value)
