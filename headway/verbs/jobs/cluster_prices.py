"""`headway cluster prices`: dollars of the rest of a job on each offer, and what each way of buying it comes to."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from headway.cluster.adaptive.recorded import batch_answer, write_batch_plan
from headway.cluster.advise import batch_command
from headway.cluster.price_market import DAY_S, HOUR_S, ON_DEMAND, Market, MarketTerms
from headway.cluster.prices import (
    Records,
    Rest,
    cheapest,
    deadlines,
    history,
    read_records,
    sky_task,
    speeds_of,
)
from headway.cluster.queue.logs import relative_speed
from headway.cluster.queue.recorded_rates import device_name
from headway.core.errors import InputError
from headway.core.files.planfile import granted
from headway.core.files.safe_files import whole_file
from headway.core.tables import pick
from headway.core.units import parse_bytes
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.answers.ledger import Ledger
from headway.report.page.plots import Bars, Candidate, picture_page, write_page
from headway.report.paper import ScreenOptions, add_row, draw, headed, next_of, paragraph, uncut
from headway.trace.recording.runs import Run
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import GivenPath, NewestRun, OutPath, RunPath, Size, run_at
from headway.why.fixes import run_command

Facts = dict[str, Any]
"""An answer, as it is printed as JSON."""


def prices(
    run: RunPath | None = None, /, *, data: Path, model: str = "", days: float = 4.0, steps_left: float = 0.0,
    region: str = "us-east-1", device_type: str = "", move_usd: float = 0.0, checkpoint: Size = "0",
    egress_usd_per_gb: float = 0.09, move_s: float = 0.0, hysteresis: float = 0.1,
    from_: Annotated[str, Parameter(name="--from")] = "", extend: str = "", due_hours: float = math.inf,
    restart_s: float = 900.0, sky: GivenPath | None = None, max_restarts: int = 3, out: OutPath | None = None,
    json: AsJson = False,
) -> int:  # fmt: skip
    """Price the rest of a job on each offer, and what each way of buying it would have come to.

    By recorded prices: the study's strategies (baseline, gpu_type, packed, multi_cloud, preemption), an online rule
    that knows the past alone, and the least possible in hindsight. Nothing is bought, all is simulated.

    Example: `headway cluster prices --model A3C --data shared --days 4 --region us-east-1`

    Args:
      run: A run folder: its steps per second and devices are those of the job. Without --model, the newest one.
      data: Folder of price tables, or one file: CSV, Parquet, or JSON of `aws ec2 describe-spot-price-history`.
      model: A row of the table of throughputs: the job itself, or, with RUN, the ratios between device types.
      days: Size of the job: days on the device type it was measured on.
      steps_left: Size of the job in steps, instead of --days.
      region: Region of AWS.
      device_type: What RUN ran on, and what the baseline rents; v100 without RUN.
      move_usd: Dollars of each move.
      checkpoint: Bytes that a move carries, such as 12GB; they cost --egress-usd-per-gb.
      egress_usd_per_gb: Dollars per 10^9 bytes that leave a cloud.
      move_s: Seconds paid at each move without progress: spin-up and lost work.
      hysteresis: The online rule moves where it wins the cost of the move and this fraction more.
      from_: Buy from this day on (2020-03-01): what its prices predicted beside what was paid.
      extend: hold: carry the last prices on where the record ends before the job.
      due_hours: Deadline after the start: on demand once the slack is used up.
      restart_s: Seconds without progress at each start, for deadlines on recorded availability.
      sky: Write the task of the cheapest offer as YAML of SkyPilot's; needs RUN.
      max_restarts: Restarts on errors that SkyPilot may make.
      out: Also write a page of the dollars of each offer and of each way of buying: -o page.html.
    """
    if not (0 < days < 1e5 and steps_left >= 0 and due_hours > 0 and extend in ("", "hold")):
        raise InputError("--days and --due-hours must be above 0, --steps-left not below, --extend empty or hold.")
    records, recorded = read_records(data), None if model and run is None else run_at(run)
    reference, num_devices, speeds = _job(recorded, records, model, device_type)
    market, calendar = records.market(region, reference, on_demand=math.isfinite(due_hours))
    move = move_usd + parse_bytes(checkpoint) / 1e9 * egress_usd_per_gb
    terms = MarketTerms.of(market, speeds, num_devices=num_devices, whole=bool(recorded), move_usd=move, move_s=move_s)
    rest = Rest(steps_left or days * DAY_S * speeds[reference], reference, hysteresis, due_hours * HOUR_S)
    try:
        day = date.fromisoformat(from_) if from_ else market.last
    except ValueError:
        raise InputError(f"--from is {from_!r}; write a day such as 2020-03-01.") from None
    offers = cheapest(terms, market.index(day), rest.steps)
    result: Facts = {
        "schema": "headway.cluster-prices/1", "simulated": True, "model": model or None, "region": region,
        "run": str(recorded.path) if recorded else None, "device_type": reference, "num_devices": num_devices,
        "steps": rest.steps, "day": str(day), "offers": offers[:20], "warnings": records.warnings,
        "basis": "steps per second of the run" if recorded else "table of throughputs",
    }  # fmt: skip
    result |= history(terms, calendar, rest, day if from_ else None, hold=extend == "hold")
    times = rest.steps / speeds[reference], rest.due_s, restart_s
    result["deadline"] = deadlines(data, records.on_demand, reference, *times)
    if sky is not None:
        result["sky"] = _write_task(sky, recorded, market, offers, num_devices, max_restarts)
    if out is not None:
        result["page"] = _cost_page(out, model or str(run), result)
    return emit(result, lambda screen: _screen(result, screen), as_json=json)


def _cost_page(path: Path, name: str, result: Facts) -> str:
    """Write a page of dollars: of each offer by the prices of one day, and of each way of buying as a mean."""
    offers = {row["offer"]: row["usd"] for row in result["offers"]}
    ways = {row["name"]: row["mean_usd"] for row in result["strategies"]} | {"online": result["online_usd"]}
    charts = [
        Bars(title, [Candidate(way, usd, f"{usd:,.2f} USD", usd == best) for way, usd in rows.items()])
        for title, rows, best in (
            (f"Dollars of the rest by the prices of {result['day']}", offers, min(offers.values())),
            (
                f"Dollars by way of buying, mean of {result['num_starts']} start days",
                ways | {"hindsight": result["hindsight_usd"]}, min(ways.values()),
            ),
        )
    ]  # fmt: skip
    return write_page(path, picture_page(name, "cost of the rest of the job", charts))


def _job(recorded: Run | None, records: Records, model: str, device_type: str) -> tuple[str, int, dict[str, float]]:
    """Return the device type that a job was measured on, its devices, and its steps per second on each type."""
    table = pick(records.speeds, model, "model") if model else {}
    if recorded is None:
        pick(table, device_type or "v100", f"device type of {model}")
        return device_type or "v100", 1, table
    ledger = Ledger.of(recorded)
    if not device_type and recorded.facts.device_type == "cpu":
        raise InputError("the run used no accelerator, and offers have some. Pass --device-type, such as v100.")
    reference, rate = device_type or device_name(recorded.facts.device_type), steps_per_s(ledger)
    if not rate > 0:
        raise InputError(f"{recorded.path} has no step: its speed is unknown. Record a run that trains.")
    ratios = {} if table.get(reference) else _peak_ratios(reference, records)
    return reference, ledger.devices, speeds_of(table, reference, rate, ratios)


def _write_task(
    path: Path, recorded: Run | None, market: Market, offers: list[dict[str, Any]], num_devices: int, max_restarts: int
) -> str:
    """Write the task that runs a run's script on the cheapest offer of a cloud; raises `InputError` without a run."""
    if recorded is None:
        raise InputError("--sky writes the command of a run. Name RUN, a run folder.")
    best = next(row["index"] for row in offers if market.offers[row["index"]].cloud != ON_DEMAND)
    script = list(recorded.facts.script)
    with whole_file(path) as draft:
        draft.write_text(sky_task(market, best, num_devices=num_devices, script=script, max_restarts=max_restarts))
    return str(path)


def _peak_ratios(reference: str, records: Records) -> dict[str, float]:
    """Return speeds relative to the reference by makers' peaks; a type without one is left out, with a warning."""
    own, found = relative_speed(reference, {}), {}
    for kind in records.device_types():
        try:
            found[kind] = relative_speed(kind, {}) / own
        except InputError:
            records.warnings.append(f"no speed of {kind} is known: its offers are left out")
    return found


def _screen(result: Facts, screen: ScreenOptions) -> str:
    offers = headed(f"offer on {result['day']}", "USD/h", "hours", "rest, USD")
    for row in result["offers"][:8]:
        add_row(offers, row["offer"], f"{row['usd_per_h']:.3f}", f"{row['hours']:.1f}", f"{row['usd']:,.2f}")
    ways = headed(f"{result['num_starts']} start days", "mean USD", "least", "most")
    for row in result["strategies"]:
        add_row(ways, row["name"], *(f"{row[key]:,.2f}" for key in ("mean_usd", "min_usd", "max_usd")))
    add_row(ways, "online", f"{result['online_usd']:,.2f}", "", "", style="bold")
    add_row(ways, "hindsight", f"{result['hindsight_usd']:,.2f}", "", "")
    parts: list[Any] = [uncut(offers), "", uncut(ways)]
    if "from" in result:
        paid = headed(f"from {result['from']['day']}", "predicted", "paid", "hours", "moves")
        for row in result["from"]["rows"]:
            figures = (f"{row[key]:,.2f}" for key in ("predicted_usd", "paid_usd", "hours"))
            add_row(paid, row["name"], *figures, str(row["moves"]))
        parts += ["", uncut(paid)]
    if result.get("deadline"):
        found = result["deadline"]
        parts += ["", paragraph(
            f"Deadline: met {found['num_met']} of {found['num_starts']} times on recorded availability, "
            f"{found['mean_usd']:,.2f} USD on average, {found['cost_fraction']:.2f} of on demand."
        )]  # fmt: skip
    if result["starts_past_last_day"]:
        count = result["starts_past_last_day"]
        parts += ["", paragraph(f"{count} of the start days reach past the record: its last prices are taken to stay.")]
    parts += [paragraph(f"warning: {text}", style="yellow") for text in result["warnings"]]
    note = "Simulated with recorded prices, one per day. Nothing is bought."
    head = Text(f"  {result['steps']:,.0f} steps, by the {result['basis']}, {result['region']}")
    return draw([head, "", *parts, "", paragraph(note, style="dim")], **screen)


def batch(
    run: NewestRun = None, /, *, also: str = "", batch_size: int = 0, largest: int = 0, micro_most: int = 0,
    devices: int = 0, out: GivenPath | None = None, allow: str | None = None, json: AsJson = False,
) -> int:  # fmt: skip
    """Find the batch size, accumulation and number of devices with the most useful examples per second.

    Useful: throughput times how much of it still teaches something, by the noise scale of the gradients. A run that
    has no noise scale is ranked by throughput alone; the plan that --out writes then measures it.

    Example: `headway cluster batch headway-runs/train-1 --out batch.json --allow lossy`

    Args:
      also: Further run folders of the same job with other batches or ranks, separated by commas: they fit the speed.
      batch_size: Examples per rank and step, where no loader says it.
      largest: Largest batch of all ranks; 16 times the recorded one by default.
      micro_most: Most examples that fit a device at once; not limited by default: memory is not modelled.
      devices: Devices that may be used; those of the run by default.
      out: Write a plan for `headway run --apply`.
      allow: 'lossy': the plan may change the batch, which changes what is learned.
    """
    if min(batch_size, largest, micro_most, devices) < 0:
        raise InputError("--batch-size, --largest, --micro-most and --devices must not be below 0; 0 = not given.")
    runs = [run_at(run), *(run_at(Path(name.strip())) for name in also.split(",") if name.strip())]
    result = batch_answer(runs, batch_size=batch_size, largest=largest, micro_most=micro_most, devices=devices)
    if out is not None:
        if result["noise_scale"] is not None and "lossy" not in granted(allow):
            raise InputError("another batch size changes what is learned. Grant it: --allow lossy, or drop --out.")
        result["plan"] = {"path": str(out), "does": write_batch_plan(result, out, str(runs[0].path))}
        result["next"] = run_command(runs[0].facts, "--apply", str(out))
    else:
        result["next"] = batch_command(str(runs[0].path), lossy=result["noise_scale"] is not None)
    return emit(result, lambda screen: _batch_screen(result, screen), as_json=json)


def _batch_screen(result: Facts, screen: ScreenOptions) -> str:
    noise, now, best = result["noise_scale"], result["now"], result["best"]
    rows = headed("devices", "batch", "of each", "accumulated", "step, s", "useful examples/s")
    for row in result["table"]:
        cells = [f"{row[key]:,}" for key in ("num_replicas", "batch_size", "microbatch_size", "accumulation")]
        style = "bold" if row == best else ""
        add_row(rows, *cells, f"{row['step_s']:.4g}", f"{row['useful_examples_per_s']:,.1f}", style=style)
    words = [f"Now: a batch of {now['batch_size']:,}, {now['useful_examples_per_s']:,.1f} useful examples per second."]
    if now["predicted_useful_examples_per_s"]:
        words.append(f"The plan in force promised {now['predicted_useful_examples_per_s']:,.1f}.")
    if noise is None:
        words.append("No noise scale was measured: throughput only.")
    else:
        kind = ", from consecutive gradients (biased)" if result["biased"] else ""
        words.append(f"Noise scale: {noise:,.0f} examples, from {result['noise_steps']:,} steps{kind}.")
    if result["skipped_steps"]:
        words.append(f"{result['skipped_steps']:,} steps had gradients that were not finite, and are left out.")
    if result["num_configurations"] < 2:
        words.append("The speed is fitted to one configuration, and a guess for others: --also RUN adds some.")
    if "plan" in result:
        words.append(f"{result['plan']['path']} {result['plan']['does']}.")
    head = Text(f"  best: {best['batch_size']:,} on {best['num_replicas']}, by {result['basis']}")
    return draw([head, "", uncut(rows), "", *(paragraph(word) for word in words), *next_of(result["next"])], **screen)
