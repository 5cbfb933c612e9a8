"""Terminal screens of every verb but `why`: run, plan, what-if, compare, data stalls, doctor, trace info.

Each takes the object that the verb prints with `--json` and returns a string;
a missing or null figure is written '-', never guessed. Times in seconds.

>>> print(render_whatif({"base_step_s": 0.2, "step_s": 0.1, "speedup": 2.0, "edits": ["input=none"]}, width=69))
headway whatif                                             input=none
<BLANKLINE>
  200 ms -> 100 ms per step, 2.00x
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headway.core.units import format_bytes, format_rate
from headway.report.figures import (
    GAIN_WORTH_NAMING,
    Json,
    clean,
    count,
    ending,
    finite,
    goodput_of,
    interval,
    percent,
    plural,
    predicted,
    seconds,
    speedup,
)
from headway.report.paper import ScreenOptions, add_row, command_line, draw, grid, joined, next_of, paragraph, title

WHOLE_PLAN = "plan"
"""The row of `run.applied` that stands for all remedies together, where there is one."""

LONGEST_KEY = 40
"""Characters of a name in `headway trace info`: kernels have names of several lines."""


def render_run(run: Json, **screen: Unpack[ScreenOptions]) -> str:
    """Return the last screen of a `headway.run/1` object: how it ended, how fast it was, predicted beside measured.

    Reads `exit` {code, class, first_rank, traceback}, `steps_per_s`, `goodput`,
    `baseline` and `applied`. The row named 'plan' stands last and in bold; a
    remedy with `reason_not_applied` or `withdrawn` is told below the table, then what `verified` counts. A traceback
    ends the screen.
    """
    width = screen.get("width", 88)
    parts: list[RenderableType] = [title("headway run", str(run.get("run", "")), width=width), ""]
    parts.append(paragraph(_run_sentence(run)))
    rows = list(run.get("applied") or ())
    if rows:
        parts += ["", *_applied(rows, str(run.get("baseline") or ""))]
    if run.get("verified") and (run["verified"]["compared"] or run["verified"]["not_compared"]):
        parts.append(paragraph(_verified(run["verified"])))
    return draw([*parts, *_traceback(run)], **screen)


UNLIKE_START = 0.05
"""By how much the gain over all steps has to differ from that of the steady ones before both are said."""


def _verified(found: Json) -> Text:
    """Return how many of the batches under remedies were compared with the script's own, and were equal."""
    wrong = int(found["unequal"])
    words = f"Verified: {found['compared']} of {found['batches']} batches compared with the script's own, "
    words += f"{found['equal']} equal"
    missed = [f"{count} not compared: {clean(reason)}" for reason, count in found["not_compared"].items()]
    told = joined([f"{words}, {wrong} not" if wrong else words, *missed], "; ")
    return Text(f"{told}.", style="bold red" if wrong else "")


def _run_sentence(run: Json) -> Text:
    """Return how the run ended and how fast it was."""
    rate = finite(run.get("steps_per_s"))
    speed = f"{format_rate(rate)} steps/s" if rate is not None else ""
    facts = joined([speed, goodput_of(run)])
    failed = ending(run.get("exit"))
    return Text.assemble((f"{failed} ", "bold red") if failed else ("Done. ", "bold"), facts)


def _applied(rows: Sequence[Json], baseline: str) -> list[RenderableType]:
    """Return the table of remedies: predicted, measured, how far apart; refused ones with their reason below."""
    table = grid("left", "right", "right", "right")
    add_row(table, "remedy", "predicted", "measured", "prediction off by", style="dim")
    done = applied(rows)
    for row in done:
        error = prediction_error(row)
        off = "-" if error is None else f"{100 * error:+.1f} %"
        style = "bold" if row.get("name") == WHOLE_PLAN else ""
        measured = "withdrawn" if row.get("withdrawn") else speedup(row.get("measured_speedup"))
        add_row(table, clean(row.get("name")), predicted(row), measured, off, style=style)
    heading = Text.assemble(
        "  ", ("Predicted and measured", "bold"), (f"  against {clean(baseline)}" * bool(baseline), "dim")
    )
    parts: list[RenderableType] = [heading, table] if done else []
    for row in rows:
        steady, whole = finite(row.get("measured_speedup")), finite(row.get("measured_with_start"))
        if steady and whole and abs(whole / steady - 1) > UNLIKE_START and not row.get("reason_not_applied"):
            parts.append(paragraph(f"Over as many steps of both, the first included: {speedup(whole)}.", style="dim"))
        if row.get("reason_not_applied"):
            reason = (f"  not applied: {clean(row['reason_not_applied'])}", "dim")
            parts.append(paragraph(Text.assemble(clean(row.get("name")), reason)))
        elif row.get("withdrawn"):
            reason = (f"  withdrawn while the run went on: {clean(row['withdrawn'])}", "dim")
            parts.append(paragraph(Text.assemble(clean(row.get("name")), reason)))
    return parts


def applied(rows: Sequence[Json]) -> list[Json]:
    """Return the rows of what was applied, that of the whole plan last; a plan of one remedy is that remedy's row.

    >>> [row["name"] for row in applied([{"name": "plan"}, {"name": "host.gc"}])]
    ['host.gc']
    """
    done = sorted((r for r in rows if not r.get("reason_not_applied")), key=lambda r: r.get("name") == WHOLE_PLAN)
    return done if sum(r.get("name") != WHOLE_PLAN for r in rows) > 1 else done[:1]


def prediction_error(row: Json) -> float | None:
    """Return predicted / measured - 1 of one applied remedy, None when either is missing.

    >>> round(prediction_error({"predicted_speedup": 1.9, "measured_speedup": 2.0}), 3)
    -0.05
    """
    expected, measured = finite(row.get("predicted_speedup")), finite(row.get("measured_speedup"))
    return None if expected is None or not measured else expected / measured - 1


def _traceback(run: Json) -> list[RenderableType]:
    """Return the first failing rank's traceback line by line, kept verbatim but for control characters."""
    text = (run.get("exit") or {}).get("traceback")
    if not text:
        return []
    lines = [" " * (len(line) - len(line.lstrip())) + clean(line) for line in str(text).splitlines()]
    return ["", *(Text("  " + line, overflow="fold") for line in lines)]


def render_plan(plan: Json, *, source: str = "", plan_path: str = "", **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.plan/1` object: proposals, the chosen ones marked, the command to apply them.

    Reads `proposals`, `chosen` (names or objects), `predicted_speedup` and, where given, `interval`, `refused`, `note`,
    and `in_script`: what to write in place of the command, for a recording that no launcher began. `source` is the run
    as the user named it, `plan_path` the file that `headway run --apply` takes.
    """
    width, unicode = screen.get("width", 88), screen.get("unicode", True)
    chosen = {_name_of(c) for c in plan.get("chosen") or ()}
    proposals = list(plan.get("proposals") or ())
    parts: list[RenderableType] = [title("headway plan", source, width=width), "", paragraph(_plan_sentence(plan))]
    found = plan.get("verdict") or {}
    if not chosen and found.get("fix") and not found.get("allow"):
        parts += ["", paragraph(clean(found["sentence"])), paragraph(f"For you to do: {clean(found['fix'])}.")]
        parts += [command_line("In the script", clean(found["script"]))] if found.get("script") else []
    if proposals:
        parts += ["", *_proposals(proposals, chosen, "✓" if unicode else "*")]
    loaders = list(plan.get("loaders") or ())
    if len(loaders) > 1 or (loaders and chosen and not any(row.get("remedies") for row in loaders)):
        parts += ["", *_loaders(loaders), *_evaluations(proposals, chosen)]
    reasons = {
        clean(r.get("name")): clean(r["left_out"]["reason"]) for r in proposals if _left_out(r) not in ("", "hand")
    }
    if reasons:
        lines = (paragraph(f"{name}: {reason}", style="dim") for name, reason in reasons.items())
        parts += ["", Text("  Proposed, not in the plan", style="bold"), *lines]
    rest = [r for r in plan.get("refused") or () if clean(r.get("name")) not in reasons]
    refused = [f"{clean(r.get('name'))}: {clean(r.get('reason', ''))}" for r in rest]
    if refused:
        parts += ["", Text("  Considered, not proposed", style="bold"), *(paragraph(r, style="dim") for r in refused)]
    if plan.get("hidden"):
        more = f"{count(plan['hidden'])} more for losses that this run does not have, or for you to apply"
        parts += ["", paragraph(f"{more}: headway plan --all", style="dim")]
    if plan.get("note"):
        parts += ["", paragraph(clean(plan["note"]), style="dim")]
    by_hand = plan.get("in_script")
    if by_hand:  # recorded without a launcher: there may be no script to run under the plan
        parts += ["", *(command_line("Next, in the script", clean(terms)) for terms in by_hand)]
    elif by_hand is None and chosen and plan_path:
        command = f"headway run --apply {shlex.quote(clean(plan_path))} -- <your script and its arguments>"
        parts += ["", command_line("Next", command)]
    elif not chosen:
        parts += next_of(plan)
    return draw(parts, **screen)


def _name_of(chosen: Any) -> str:
    """Return the name of a chosen remedy, written as a name or as an object."""
    return str(chosen.get("name", "")) if isinstance(chosen, Mapping) else str(chosen)


def _plan_sentence(plan: Json) -> Text:
    """Return what the chosen remedies gain together, or that there is nothing to apply."""
    chosen = plan.get("chosen") or ()
    protecting = {row["name"] for row in plan.get("proposals") or () if row.get("protects")}
    guards = [clean(name) for name in chosen if name in protecting]
    number = len(chosen) - len(guards)
    if not chosen:
        return Text(nothing_to_apply(plan) + by_hand(plan), style="bold")
    if not number:
        return Text(f"{joined(guards, ', ')} protects the job; it makes no step faster.", style="bold")
    together = f"{number} remedies together" if number > 1 else "One remedy"
    bounds = interval(plan.get("interval"))
    gain = speedup(plan.get("predicted_speedup")) + (f" ({bounds})" if bounds else "")
    return Text(f"{together}: predicted {gain} the steps per second.", style="bold")


def _left_out(row: Json) -> str:
    """Return the kind of the reason for which a proposal is not in the plan; '' where none is known."""
    reason = row.get("left_out")
    return str(reason.get("kind", "")) if isinstance(reason, Mapping) else ""


def nothing_to_apply(plan: Json) -> str:
    """Return the sentence on why no remedy is in the plan: the reason that keeps out what gains most.

    >>> row = {"name": "data.cache", "predicted_speedup": 1.75, "left_out": {"kind": "memory", "reason": "needs 2 GB"}}
    >>> nothing_to_apply({"proposals": [row]})
    'Nothing to apply: data.cache, predicted 1.75x, needs 2 GB.'
    """
    barred = [row for row in plan.get("proposals") or () if _left_out(row) in ("grant", "memory")]
    best = max(barred, key=lambda row: row.get("predicted_speedup") or 0.0, default=None)
    if best is not None and _left_out(best) == "grant":
        what = f"{clean(best['name'])}, predicted {predicted(best)}"
        if best.get("protects"):  # it is no answer to a cause, of which the verdict speaks
            what = f"{clean(best['name'])}, {clean(best.get('reason'))}"
        elif (plan.get("verdict") or {}).get("allow"):  # the next command has it
            return f"1 remedy needs your consent: {what}."
        return f"1 remedy needs your consent: {what}. Grant it with: headway plan --allow {clean(best.get('allow'))}"
    if best is not None:
        reason = clean(best["left_out"]["reason"])
        return f"Nothing to apply: {clean(best['name'])}, predicted {predicted(best)}, {reason}."
    unsafe = [clean(row.get("name")) for row in plan.get("refused") or () if row.get("unsafe")]
    if unsafe:
        names = joined(unsafe, ", ")
        return f"Nothing to apply: {names} could change results here, and nothing else gains more than the noise."
    return "Nothing to apply: no remedy of headway's own gains more than the noise of two runs."


def by_hand(plan: Json) -> str:
    """Return the sentence on what wins most of what only the user can apply, '' where nothing is sure to win.

    >>> links = {"name": "comm.links", "predicted_speedup": 1.2, "interval": [1.1, 1.3], "cost": "cables"}
    >>> by_hand({"proposals": [links]})
    ' By hand: comm.links, predicted 1.20x (1.10 to 1.30). cables'
    """
    able = [row for row in plan.get("proposals") or () if not row.get("applies") and row.get("interval")]
    sure = [row for row in able if row["interval"][0] >= GAIN_WORTH_NAMING]
    best = max(sure, key=lambda row: row["predicted_speedup"], default=None)
    if best is None:
        return ""
    how = clean(best.get("reason") or best.get("cost") or "")
    return f" By hand: {clean(best['name'])}, predicted {predicted(best)}. {how}".rstrip()


def _proposals(proposals: Sequence[Json], chosen: set[str], mark: str) -> list[RenderableType]:
    """Return the table of proposals, chosen ones in bold behind a mark, and the legend of the mark."""
    table = grid("left", "left", "right", "left", "fold")
    add_row(table, "", "proposal", "predicted", "applied by", "cost and risk", style="dim")
    for row in proposals:
        name = str(row.get("name", ""))
        applied_by = "headway" if row.get("applies") else "you"
        costs = [text for key in ("cost", "risk") if (text := _plain(row.get(key))) not in ("", "none")]
        cost = joined(costs, "; ") or "none"
        style = "bold" if name in chosen else ""
        cells = (mark if name in chosen else " ", Text(clean(name), style=style), predicted(row), applied_by)
        add_row(table, *cells, Text(cost, style="dim"))
    remark = [paragraph(f"{mark} = in the plan.", style="dim")] if chosen else []
    return [table, *remark]


def _loaders(rows: Sequence[Json]) -> list[RenderableType]:
    """Return a line per loader: where it is, what reads it, and the remedy that it takes or the reason for none."""
    lines: list[RenderableType] = [Text("  Loaders", style="bold")]
    for row in rows:
        where = joined([clean(row[key]) for key in ("line", "dataset") if row.get(key)], ", ")
        taken = joined([clean(name) for name in row.get("remedies") or ()], ", ")
        what = taken or f"left alone: {clean(row.get('reason', ''))}"
        lines.append(paragraph(f"{row['loader']}  {where} ({clean(row['used_by'])}): {what}", style="dim"))
    return lines


def _evaluations(proposals: Sequence[Json], chosen: set[str]) -> list[RenderableType]:
    """Return, of each chosen remedy, which part of the time it wins is won in evaluations."""
    shares = [(clean(row.get("name")), row.get("evaluation_share") or 0.0) for row in proposals]
    return [
        paragraph(f"{percent(share)} of the time that {name} wins is won in evaluations.", style="dim")
        for name, share in shares
        if share > 0 and name in chosen
    ]


def render_whatif(whatif: Json, **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.whatif/1` object: seconds per step before and after the edits, and their ratio.

    An `interval` and a `note` are shown where given.
    """
    edits = ", ".join(_plain(e) for e in whatif.get("edits") or ()) or "no edit"
    bounds = interval(whatif.get("interval"))
    sentence = Text.assemble(
        f"{seconds(whatif.get('base_step_s'))} → {seconds(whatif.get('step_s'))} per step, ".replace("→", "->"),
        (speedup(whatif.get("speedup")), "bold"),
        f" ({bounds})" if bounds else "",
    )
    parts: list[RenderableType] = [
        title("headway whatif", edits, width=screen.get("width", 88)),
        "",
        paragraph(sentence),
    ]
    if whatif.get("note"):
        parts.append(paragraph(clean(whatif["note"]), style="dim"))
    return draw(parts, **screen)


def render_compare(comparison: Json, *, names: tuple[str, str] = ("", ""), **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of a `headway.compare/1` object: which run is faster, what each bucket takes in both.

    Reads `speedup`, `steps_per_s` and `step_goodput` [first, second], `changes` (seconds per device
    and step, or per run), `regressions`, `notes` and `threshold`. `names` are the two
    runs as the user named them.
    """
    aside = " -> ".join(name for name in names if name)
    parts: list[RenderableType] = [title("headway compare", aside, width=screen.get("width", 88)), ""]
    ratio = finite(comparison.get("speedup"))
    regressions = [_plain(r) for r in comparison.get("regressions") or ()]
    if ratio:
        rates = [format_rate(rate) for raw in comparison.get("steps_per_s") or () if (rate := finite(raw)) is not None]
        detail = f" ({' -> '.join(rates)} steps/s)" if len(rates) == 2 else ""
        text = _pace(comparison, ratio) + f"{detail}."
        parts.append(paragraph(text, style="bold red" if regressions else "bold"))
    shares = [percent(share) for raw in comparison.get("step_goodput") or () if (share := finite(raw)) is not None]
    if len(shares) == 2:
        parts.append(paragraph(f"Goodput in steps: {' -> '.join(shares)}.", style="dim"))
    if comparison.get("changes"):
        parts += ["", _changes(comparison["changes"])]
    if regressions:
        parts += ["", *(paragraph(Text.assemble(("regression  ", "red"), r)) for r in regressions)]
    elif comparison.get("threshold") is not None and comparison.get("verdict") != "inconclusive":
        parts += ["", paragraph(f"No regression past {percent(comparison['threshold'])}.", style="dim")]
    parts += [paragraph(Text.assemble(("note  ", "yellow"), _plain(note))) for note in comparison.get("notes") or ()]
    return draw(parts, **screen)


def _pace(comparison: Json, ratio: float) -> str:
    """Return which run is faster, with the range of the ratio, or why that cannot be said."""
    ends = [end for raw in comparison.get("interval") or () if (end := finite(raw))]
    word, verdict = "faster" if ratio >= 1 else "slower", comparison.get("verdict")
    if verdict == "inconclusive":
        return f"Inconclusive: {clean(comparison.get('inconclusive', ''))}"
    if verdict == "not resolved":
        if len(ends) < 2:
            return "Not resolved: fewer than four steps; record more of them"
        change, low, high = (f"{100 * (value - 1):+.1f} %" for value in (ratio, *ends))
        return f"No difference resolved: {change} ({low} to {high})"
    times = speedup(max(ratio, 1 / ratio))
    between = " to ".join(f"{end:.2f}" for end in sorted(ends if ratio >= 1 else (1 / end for end in ends)))
    between = between and f" ({between})"
    return f"The second run is {'as fast as the first' if times == '1.00x' else f'{times} {word}{between}'}"


def _changes(changes: Sequence[Json]) -> Table:
    """Return seconds per device of each bucket before and after; buckets that are empty in both are left out."""
    table = grid("left", "right", "right", "right", "right", "left")
    add_row(table, "per device", "first", "second", "change", "", "", style="dim")
    for row in changes:
        before, after = finite(row.get("before_s")) or 0.0, finite(row.get("after_s")) or 0.0
        if not before and not after:
            continue
        change = f"{'+' if after > before else '-' if after < before else ''}{seconds(abs(after - before))}"
        relative = f"{100 * (after / before - 1):+.0f} %" if before else "new"
        cells = (clean(row.get("bucket")), seconds(before), seconds(after), change, relative)
        add_row(
            table, *cells, Text(f"per {clean(row.get('per', ''))}", "dim"), style="red" if row.get("regressed") else ""
        )
    return table


def render_stalls(stalls: Json, **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway data stalls`: a step's input time, the bottleneck, what each fix wins.

    Reads `compute_s`, `fetch_s`, `prep_s`, `transfer_s`, `fractions`,
    `per_epoch_s`, `bottleneck`, `fix` (pairs of edit and seconds won per step),
    `flags` and `note`.
    """
    parts: list[RenderableType] = [
        title("headway data stalls", str(stalls.get("source", "")), width=screen.get("width", 88)),
        "",
    ]
    if stalls.get("bottleneck"):
        parts.append(paragraph(f"The bottleneck is {clean(stalls['bottleneck'])}.", style="bold"))
    amounts = {name: finite(stalls.get(f"{name}_s")) for name in ("compute", "fetch", "prep", "transfer")}
    known = {name: value for name, value in amounts.items() if value is not None}
    fractions, epoch = stalls.get("fractions") or {}, stalls.get("per_epoch_s") or {}
    table = grid("left", "right", "right", "right")
    add_row(table, "", "per step", "share", "per epoch" if epoch else "", style="dim")
    for name, value in known.items():
        label = name if name == "compute" else f"{name} stall"
        per_epoch = seconds(epoch.get(name)) if epoch else ""
        add_row(table, label, seconds(value), percent(fractions.get(name)), per_epoch)
    if known:
        parts += ["", table]
    fixes = [_knob(fix) for fix in stalls.get("fix") or ()]
    gains = grid("left", "right")
    for knob, gain_s in fixes:
        add_row(gains, clean(knob), f"{seconds(gain_s)} less per step")
    if fixes:
        parts += ["", Text("  What each fix wins", style="bold"), gains]
    remarks = [*(stalls.get("flags") or ()), *filter(None, [stalls.get("note")])]
    if remarks:
        parts += ["", *(paragraph(clean(remark), style="dim") for remark in remarks)]
    return draw(parts, **screen)


def _knob(fix: Any) -> tuple[str, Any]:
    """Return (knob, seconds won) of a fix written as a pair or as an object."""
    if isinstance(fix, Mapping):
        return str(fix.get("knob", fix.get("name", ""))), fix.get("gain_s")
    return str(fix[0]), fix[1]


def render_doctor(findings: Iterable[Json], **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway doctor`: one line per finding (name, value, limit, ok, fix).

    `ok` None means that the finding is only stated. A fix is told where
    something is wrong.
    """
    rows = list(findings)
    bad = [row for row in rows if row.get("ok") is False]
    good, wrong = ("✓", "✗") if screen.get("unicode", True) else ("ok", "!!")
    sentence = f"{len(bad)} of {len(rows)} need attention." if bad else f"All {len(rows)} in order."
    table = grid("left", "left", "fold")
    for row in rows:
        ok = row.get("ok")
        mark = Text("-", style="dim") if ok is None else Text(good, "green") if ok else Text(wrong, "bold red")
        needed = f"  needs {_plain(row['limit'])}" if row.get("limit") not in (None, "", row.get("value")) else ""
        fix = f"\n{clean(row['fix'])}" if row.get("fix") and not ok else ""
        add_row(table, mark, clean(row.get("name")), Text.assemble(_plain(row.get("value")), (needed, "dim"), fix))
    head = title("headway doctor", "", width=screen.get("width", 88))
    return draw([head, "", paragraph(sentence, style="bold"), "", table], **screen)


def render_trace_info(info: Json, **screen: Unpack[ScreenOptions]) -> str:
    """Return the screen of `headway trace info`: every fact of the object, names to the left; nested ones indented."""
    source = str(info.get("path", info.get("source", "")))
    table = grid("left", "fold")
    for name, value in info.items():
        if name in ("schema", "path") or value in (None, [], {}):
            continue
        if isinstance(value, Mapping):
            add_row(table, Text(_words(name), style="bold"), "")
            for key, inner in value.items():
                add_row(table, f"  {_cropped(clean(key), LONGEST_KEY)}", _plain(inner, str(key)))
        else:
            add_row(table, _words(name), _plain(value, str(name)))
    return draw([title("headway trace info", source, width=screen.get("width", 88)), "", table], **screen)


def _cropped(text: str, most: int) -> str:
    """Return `text` with at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


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
