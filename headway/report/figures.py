"""Figures as words: how numbers, buckets and verdicts are written, on every screen and page.

One place decides how many digits a share has, what a bucket is called and
which colour it wears, so that the terminal and the HTML report never
disagree. Inputs are plain floats in the units of `headway.core.units`.

>>> percent(0.6199), speedup(1.904), interval((1.75, 2.02)), device_seconds(4031.2)
('62.0 %', '1.90x', '1.75 to 2.02', '4,031 s')
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.core import units
from headway.core.units import format_seconds

Json = Mapping[str, Any]
"""One parsed JSON object of the `--json` contracts."""

GAIN_THAT_LEADS = 1.05
"""From here on what a remedy wins leads the verdict, however large the losses that none wins back."""

LEAST_HEADLINE = 0.02
"""Share of the device time below which a loss is no headline: two runs of one script differ by as much."""

NOT_RESOLVED = "not resolved"
"""What a fix says whose gain this run is too short or too disturbed to tell."""

NOTHING_PAYS = "none that pays is known"
"""How the fix of a cause begins against which the planner tried everything in vain."""

GAIN_WORTH_NAMING = 1.02
"""A predicted speedup below this is not offered as a win: it drowns in the noise of two runs."""


@dataclass(frozen=True, slots=True)
class BucketStyle:
    """How one bucket of the ledger is named and coloured, everywhere."""

    losing: str
    """What losing time to it is called, to follow 'went to'."""

    light: str
    """Colour on a light page, `#rrggbb`."""

    dark: str
    """Colour on a dark page, `#rrggbb`."""

    ansi: int
    """Colour of a 256-colour terminal, readable on both backgrounds."""

    short: str = ""
    """The same in a list of shares; '' where `losing` is short enough."""

    hatched: bool = False
    """Drawn with stripes: tells greys and wines apart without relying on hue."""


BUCKET_STYLES: dict[str, BucketStyle] = {
    "useful": BucketStyle("useful work", "#328ad4", "#4290dc", 68),
    "eval": BucketStyle("evaluation", "#7828e6", "#dca0fa", 141, hatched=True),
    "input": BucketStyle("waiting for input", "#db7b16", "#f78f13", 208),
    "comm": BucketStyle("exposed communication", "#f7c512", "#fed967", 178),
    "bubble": BucketStyle("pipeline bubbles", "#43c4e7", "#91e9f0", 80),
    "straggler": BucketStyle("waiting for stragglers", "#cd2b0b", "#e44f2e", 160),
    "checkpoint": BucketStyle("checkpoint stalls", "#772698", "#933da9", 133),
    "startup": BucketStyle("start-up", "#979797", "#7e8084", 103),
    "restart": BucketStyle("restarts", "#3b444d", "#56595d", 242),
    "rework": BucketStyle("work lost in failed attempts", "#4b1b2a", "#63383c", 89, hatched=True),
    "host": BucketStyle(
        "host work (GC, logging, the script's own code, launch gaps)", "#317860", "#8bbc92", 35, short="host work"
    ),
    "idle": BucketStyle("idle devices", "#dee1e3", "#2e2e2e", 248),
    "unknown": BucketStyle("time nobody recorded", "#aaafb5", "#676d75", 245, hatched=True),
}
"""Bucket -> style, in the ledger's order. Colours keep apart under the three common colour deficiencies (tested)."""

UNKNOWN_STYLE = BUCKET_STYLES["unknown"]


def bucket_style(bucket: str) -> BucketStyle:
    """Return the style of a bucket, that of `unknown` for a name from a newer ledger."""
    return BUCKET_STYLES.get(bucket, UNKNOWN_STYLE)


def finite(value: object) -> float | None:
    """Return `value` as a float, None when it is missing, not a number or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def percent(fraction: object) -> str:
    """Write a fraction in percent with one decimal; '-' when it is missing.

    >>> percent(0.00004), percent(1.0), percent(None)
    ('< 0.1 %', '100.0 %', '-')
    """
    value = finite(fraction)
    if value is None:
        return "-"
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def speedup(value: object) -> str:
    """Write a ratio of speeds: '1.90x', '12.4x'; '-' when it is missing."""
    ratio = finite(value)
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:,.0f}x"


def interval(bounds: object) -> str:
    """Write the bounds of a prediction: '1.75 to 2.02'; '' when there are none."""
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        return ""
    low, high = finite(bounds[0]), finite(bounds[1])
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def predicted(row: Json) -> str:
    """Write a row's `predicted_speedup` with its `interval`: '1.90x (1.75 to 2.02)'; '-' when there is none.

    >>> predicted({"predicted_speedup": 1.9, "interval": [1.75, 2.02], "at_most": True})
    'at most 1.90x'
    """
    if row.get("at_most") and finite(row.get("predicted_speedup")) is not None:
        most = finite(row["predicted_speedup"]) or 0.0
        return f"at most {speedup(most)}" if most <= 10 else "at most over 10x"
    text, bounds = speedup(row.get("predicted_speedup")), interval(row.get("interval"))
    return f"{text} ({bounds})" if bounds and text != "-" else text


def seconds(value: object) -> str:
    """Write a time in seconds with a fitting unit; '-' when it is missing."""
    time_s = finite(value)
    return "-" if time_s is None else "0 s" if time_s == 0 else format_seconds(time_s)


def device_seconds(value: object, beside: float | None = None) -> str:
    """Write device-seconds in seconds only, so that a column of them compares at a glance.

    `beside` is the largest figure of the column: all of it is written with the
    digits that suit that one.

    >>> [device_seconds(x) for x in (0.0, 0.004, 1.0, 40.31, 86400.0)]
    ['0 s', '< 0.01 s', '1.00 s', '40.3 s', '86,400 s']
    >>> [device_seconds(x, beside=51.2) for x in (0.004, 1.0, 51.2)]
    ['< 0.1 s', '1.0 s', '51.2 s']
    """
    amount = finite(value)
    if amount is None:
        return "-"
    if amount == 0:
        return "0 s"
    scale = abs(amount if beside is None else beside)
    digits = 2 if scale < 10 else 1 if scale < 1000 else 0
    smallest = 10.0**-digits
    return f"{amount:,.{digits}f} s" if abs(amount) >= smallest / 2 else f"< {smallest:g} s"


def count(value: object) -> str:
    """Write a whole number with thousands separators; '-' when it is missing.

    >>> count(20000), count(None)
    ('20,000', '-')
    """
    number = finite(value)
    return "-" if number is None else f"{number:,.0f}"


def plural(number: object, noun: str) -> str:
    """Write a number with its noun: '1 step', '2 devices'."""
    known = finite(number)
    return f"- {noun}s" if known is None else units.plural(round(known), noun)


def clean(text: object) -> str:
    """Return `text` without characters that could steer a terminal or reorder a page; each becomes a space.

    >>> clean("train\\x1b[31m.py\\n")
    'train [31m.py'
    """
    raw = str(text)
    if raw.isascii() and raw.isprintable():  # nearly always, and a live page writes a hundred such texts a second
        return " ".join(raw.split())
    kept = (" " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in raw)
    return " ".join("".join(kept).split())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer in one breath."""

    sentence: str
    """Where the time went: '62 % of 2 devices x 41.3 s went to waiting for input.'"""

    fix: str
    """What to do about it; '' when there is nothing to do."""

    gain: str
    """Predicted gain: '1.90x (1.75 to 2.02)'; '' when there is none."""

    cause: str = ""
    """The cause that the sentence is about; '' where it is about none."""

    remedy: str = ""
    """The remedy by which headway applies the fix; '' where the user does."""

    allow: str = ""
    """The consent that it needs; '' where it needs none."""

    script: str = ""
    """What the user can write in the script instead, a line to copy; '' where the fix says all that is known."""

    def to_json(self) -> dict[str, str]:
        """Return the `verdict` entry of a `headway.why/2` object."""
        return asdict(self)

    @property
    def confidence(self) -> str:
        """How sure the fix is: 'predicted', 'upper bound', 'not resolved' or 'no prediction'; '' without a fix.

        >>> [Verdict("", "use workers", gain).confidence for gain in ("1.90x (1.75 to 2.02)", "at most 1.2x")]
        ['predicted', 'upper bound']
        """
        if not self.fix:
            return ""
        if self.fix.startswith(NOT_RESOLVED):
            return NOT_RESOLVED
        if "(" in self.gain:
            return "predicted"
        return "upper bound" if self.gain else "no prediction"

    def line(self) -> str:
        """Return everything as one line, for the end of a run and for logs."""
        fix = f" Fix: {self.fix.rstrip('.')}" if self.fix else ""
        gain = f", predicted {self.gain}" if fix and self.gain else ""
        return f"{self.sentence}{fix}{gain}{'.' if fix else ''}"


def total_device_s(why: Json) -> float:
    """Return devices x wall, in seconds."""
    wall_s = finite(why.get("wall_s"))
    if wall_s is None:
        wall_s = (finite(why.get("wall_ns")) or 0.0) / 1e9
    return (finite(why.get("devices")) or 0.0) * wall_s


def share(part: object, whole: float) -> float | None:
    """Return part / whole, None when either is missing or `whole` is zero."""
    amount = finite(part)
    return None if amount is None or whole <= 0 else amount / whole


def verdict(why: Json) -> Verdict:
    """Say in one sentence where the time of a `headway.why/2` object went, and what to do first.

    The largest loss that a remedy wins back, or may win back, leads where that is 5 % or more, else the largest loss
    that advice may mend, or one that is `FAR_LARGER` and that nothing known mends: its bucket gives the share. A run
    without a loss above the noise is told so, and what headway's recording took is never what to mend. How a run ended
    that did not end well comes before everything else. What took more of the time than the headline's loss (useful
    work, the start-up of a short run) is said behind it.
    """
    devices, wall = plural(why.get("devices"), "device"), seconds(why.get("wall_s"))
    end = ending(why.get("exit"), why.get("steps"))
    end += " " * bool(end)
    if not finite(why.get("steps")):
        earlier = (why.get("ledger") or {}).get("restart")
        what = "No step of the last attempt" if earlier else "No training step"
        rest = _larger_loss(why, "") if earlier else ""
        return Verdict(f"{end}{what} was recorded in {devices} x {wall}{rest}.", "", "")
    if (why.get("hang") or {}).get("ended_the_run"):
        goodput = percent(why.get("goodput"))
        sentence = f"The run made no more progress after {plural(why.get('steps'), 'step')} and was ended: it hung."
        return Verdict(f"{sentence} {goodput} of {devices} x {wall} was useful work.", HUNG, "")
    named = [c for c in why.get("causes") or () if worth_naming(c, why)]
    known = [c.get("remedy") or str(c.get("fix") or "").startswith(NOT_RESOLVED) for c in named]
    gains = [(finite(c.get("predicted_speedup")) or 0.0) * bool(by) for c, by in zip(named, known, strict=True)]
    first = next((c for c, gain in zip(named, gains, strict=True) if gain >= GAIN_THAT_LEADS), None)
    if first is None:
        first = next((c for c in named if headline(c, why)), None)
        most = max((c for c in named if c.get("cause") != "host.recording"), key=_lost_s, default=None)
        first = most if first and most and _lost_s(most) > FAR_LARGER * _lost_s(first) else first
    if first is None:
        goodput = percent(why.get("goodput"))
        rest = _larger_loss(why, "") or "; no loss stands out"
        return Verdict(f"{end}{goodput} of {devices} x {wall} was useful work{rest}.", "", "")
    rest = _larger_loss(why, str(first.get("cause", "")).partition(".")[0])
    sentence = f"{end}{_lost_share(first, why)} of {devices} x {wall} {_losing(first)}{rest}."
    gain = predicted(first) if (finite(first.get("predicted_speedup")) or 0) >= GAIN_WORTH_NAMING else ""
    gain = "" if str(first.get("fix") or "").startswith(NOT_RESOLVED) else gain
    names = (str(first.get(key) or "") for key in ("cause", "remedy", "allow", "script"))
    return Verdict(sentence, clean(first.get("fix") or ""), gain, *names)


def goodput_of(facts: Json) -> str:
    """Write the goodput of a run, and that of its steps where start-up and the like make it another; '' without it.

    >>> goodput_of({"goodput": 0.388, "step_goodput": 0.91}), goodput_of({"goodput": 0.9, "step_goodput": 0.91})
    ('goodput 38.8 % (in its steps 91.0 %)', 'goodput 90.0 %')
    """
    whole, steps = finite(facts.get("goodput")), finite(facts.get("step_goodput"))
    if whole is None:
        return ""
    apart = steps is not None and steps - whole >= STARTS_SHOW
    return f"goodput {percent(whole)}" + (f" (in its steps {percent(steps)})" if apart else "")


STARTS_SHOW = 0.05
"""Difference of the goodput of a run and that of its steps from which both are said."""


def ending(end: Json | None, steps: object = None) -> str:
    """Say how a run ended from its `exit` {code, class, first_rank, traceback}; '' when well, or when it is not known.

    >>> raised = TRACEBACK + '\\n  File "a.py"\\nKeyError: 7'
    >>> ending({"code": 1, "class": "user", "first_rank": 0, "traceback": raised}, 3)
    'Rank 0 failed after 3 steps (exit code 1): KeyError: 7.'
    >>> ending({"code": 143, "class": "preempted"}), ending({"code": 0})
    ('The run was stopped from outside (exit code 143).', '')
    """
    if not end or not end.get("code"):
        return ""
    after = f" after {plural(steps, 'step')}" if finite(steps) else ""
    if end["code"] == CTRL_C:
        return f"The run was stopped by Ctrl-C{after}."
    rank = end.get("first_rank")
    who = f"Rank {clean(rank)}" if rank is not None else "The run"
    what = ENDINGS.get(str(end.get("class")), "failed")
    who = "The run" if what == ENDINGS["preempted"] else who
    raised = _raised(str(end.get("traceback") or ""))
    return f"{who} {what}{after} (exit code {clean(end['code'])}){': ' * bool(raised)}{raised}."


def _raised(traceback: str) -> str:
    """Return what the last exception of a traceback said, in one short line; '' without a traceback."""
    _, found, last = traceback.rpartition(TRACEBACK)
    said = next((line for line in last.splitlines() if line[:1].strip()), "") if found else ""
    line = clean(said).rstrip(".")
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 3] + "..."


TRACEBACK = "Traceback (most recent call last):"
"""The line above the frames; the first line below them that is not indented names the exception."""

LONGEST_MESSAGE = 120
"""Characters of an exception that the verdict repeats."""

CTRL_C = 130
"""Exit code of a run that was interrupted: nobody failed."""

ENDINGS: dict[str, str] = {
    "oom": "ran out of memory",
    "hang": "made no more progress",
    "preempted": "was stopped from outside",
}
"""Exit class -> what a run or its first failing rank did, in words; any other class failed."""

HUNG = "look at the rank that the others wait for: headway hang shows where it stands"
"""What to do first about a run that a hang ended."""

OVERSHADOWED = 0.2
"""Share of the device time from which another bucket is named beside the first cause."""


def _larger_loss(why: Json, bucket: str) -> str:
    """Return '; start-up took 43 %, useful work 36 %' of the buckets that took more than `bucket` and much; else ''."""
    ledger = {name: finite(value) or 0.0 for name, value in (why.get("ledger") or {}).items()}
    total_s, least = total_device_s(why), ledger.get(bucket, 0.0)
    others = sorted(((amount, name) for name, amount in ledger.items() if name != bucket), reverse=True)
    if not bucket:  # the sentence is about useful work then
        others = [row for row in others if row[1] != "useful"]
    larger = [row for row in others if row[0] > least and (share(row[0], total_s) or 0.0) >= OVERSHADOWED][:2]
    said = [f"{100 * amount / total_s:.0f} %" for amount, _ in larger]
    said = [f"{bucket_style(name).short or bucket_style(name).losing} {'' if at else 'took '}{part}"
            for at, ((_, name), part) in enumerate(zip(larger, said, strict=True))]  # fmt: skip
    return f"; {', '.join(said)}" if said else ""


FAR_LARGER = 3.0
"""So many times a loss that advice may mend is one that leads although no remedy pays."""


def _lost_s(cause: Json) -> float:
    """Return the device-seconds that a cause lost."""
    return finite(cause.get("lost_device_s")) or 0.0


def headline(cause: Json, why: Json) -> bool:
    """Tell whether a cause may be what a verdict is about: above the noise, to be mended, and not headway's own."""
    lost = share(cause.get("lost_device_s"), total_device_s(why)) or 0.0
    mended = not str(cause.get("fix") or "").startswith(NOTHING_PAYS)
    return lost >= LEAST_HEADLINE and mended and cause.get("cause") != "host.recording"


def named_causes(why: Json) -> list[Json]:
    """Return the causes that are worth naming, in order; those that one fix answers follow the first of them.

    The fix and its gain are said once, with the first: of the others `with` is that one's place.
    """
    groups: dict[object, list[Json]] = {}
    for place, cause in enumerate(cause for cause in why.get("causes") or () if worth_naming(cause, why)):
        wins = (finite(cause.get("predicted_speedup")) or 0) >= GAIN_WORTH_NAMING
        groups.setdefault((cause.get("fix"), cause.get("script")) if wins else place, []).append(cause)
    named: list[Json] = []
    for first, *others in groups.values():
        place = len(named) + 1
        named += [first, *({**cause, "fix": f"as for cause {place}", "script": "", "with": place} for cause in others)]
    return named


def gain_words(cause: Json) -> str:
    """Say what the fix of one of `named_causes` wins, and who applies it where that is the user.

    >>> links = {"fix": "faster links", "predicted_speedup": 1.2, "interval": [1.1, 1.3], "at_most": False}
    >>> links["remedy"] = ""
    >>> gain_words(links), gain_words({**links, "remedy": "data.workers"}), gain_words({**links, "with": 1})
    ('by hand, predicted 1.20x (1.10 to 1.30)', 'predicted 1.20x (1.10 to 1.30)', 'won with cause 1')
    """
    if cause.get("with"):
        return f"won with cause {cause['with']}"
    if str(cause.get("fix") or "").startswith(NOT_RESOLVED):
        return NOT_RESOLVED
    if finite(cause.get("predicted_speedup")) is None:
        return "no prediction"
    user = "by hand, " if "remedy" in cause and not cause["remedy"] and not cause.get("at_most") else ""
    return f"{user}predicted {predicted(cause)}"


def is_win(cause: Json) -> bool:
    """Whether the fix of one of `named_causes` has a gain of its own that is worth naming."""
    is_own = not cause.get("with") and not str(cause.get("fix") or "").startswith(NOT_RESOLVED)
    return is_own and (finite(cause.get("predicted_speedup")) or 0) >= GAIN_WORTH_NAMING


def worth_naming(cause: Json, why: Json) -> bool:
    """Tell whether a cause lost at least 0.5 % of the device time or promises a gain."""
    lost = share(cause.get("lost_device_s"), total_device_s(why)) or 0.0
    return lost >= 0.005 or (finite(cause.get("predicted_speedup")) or 0.0) >= GAIN_WORTH_NAMING


CAUSE_PHRASES: dict[str, str] = {
    "straggler.worker": "slow workers",
    "straggler.last_stage": "a slow last pipeline stage",
    "straggler.sequence": "sequence-length imbalance",
    "straggler.rank": "a slow rank",
    "host.gc": "garbage collection",
    "host.script": "the script's own code between steps",
    "host.logging": "logging",
    "host.recording": "headway's own work",
    "host.launch": "launch gaps",
    "startup.compile": "start-up and compilation",
}
"""Cause -> what time was lost to, where the cause costs more or less than its bucket holds."""


def _losing(cause: Json) -> str:
    name = str(cause.get("cause", ""))
    phrase = CAUSE_PHRASES.get(name)
    return f"was lost to {phrase}" if phrase else f"went to {bucket_style(name.partition('.')[0]).losing}"


def _lost_share(cause: Json, why: Json) -> str:
    """Return the share of the cause's whole bucket, or of the cause itself where the bucket holds others too."""
    name = str(cause.get("cause", ""))
    booked = None if name in CAUSE_PHRASES else (why.get("ledger") or {}).get(name.partition(".")[0])
    fraction = share(booked or cause.get("lost_device_s"), total_device_s(why))
    return "-" if fraction is None else f"{100 * fraction:.0f} %" if fraction >= 0.1 else percent(fraction)
