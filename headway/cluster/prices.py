"""What a job would have cost by each strategy, over many start days or from one day on; where it is cheapest now.

Recorded prices: the study's tables (Parquet or CSV), or what the command of AWS prints as JSON.

A folder has `aws_spot` (region, zone, instance_type, usd_per_h, unix_s; a row per record, newest first, one log
after another), and where known `azure_spot` (region, instance_type, device_type, num_devices, date, usd_per_h; a
row per day, no price = not offered), `on_demand` (device_type, usd_per_h per device), `throughputs` (model,
device_type, steps_per_s on one device) and `availability` (see `price_strategies.py`). A file has records of AWS
alone:

    aws ec2 describe-spot-price-history --instance-types p3.2xlarge p3.8xlarge --output json > prices.json
"""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from headway.cluster.price_market import DAY_S, HOUR_S, Market, MarketTerms, Offer
from headway.cluster.price_strategies import (
    STUDY,
    Bought,
    follow,
    hindsight,
    hourly_starts,
    online,
    run_until,
    spans,
    study,
)
from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import number_of, parquet_faults, read_json, read_lines
from headway.core.tables import pick, suggestion

LAST_S = 253402300799.0
"""The last second of the year 9999, since 1970."""

DEVICES: dict[str, tuple[str, int]] = {
    "p2.xlarge": ("k80", 1), "p2.8xlarge": ("k80", 8), "p2.16xlarge": ("k80", 16),
    "p3.2xlarge": ("v100", 1), "p3.8xlarge": ("v100", 4), "p3.16xlarge": ("v100", 8), "p3dn.24xlarge": ("v100", 8),
    "p4d.24xlarge": ("a100", 8), "p4de.24xlarge": ("a100", 8), "p5.4xlarge": ("h100", 1), "p5.48xlarge": ("h100", 8),
    "p5e.48xlarge": ("h200", 8), "p5en.48xlarge": ("h200", 8), "p6-b200.48xlarge": ("b200", 8),
}  # fmt: skip
"""Instance type of AWS -> its devices (docs.aws.amazon.com, accelerated computing instances)."""

AZURE = ("NC24", "NC24s v2", "NC24s v3")
"""Azure's instance types that the study ranks, four devices each."""


@dataclass(frozen=True, slots=True)
class AwsRecord:
    """One record of AWS: from `unix_s` on, an instance costs `usd_per_h`."""

    zone: str
    """Availability zone."""

    region: str
    """Its region."""

    instance_type: str
    """Name of the instance type."""

    usd_per_h: float
    """Price of the whole instance."""

    unix_s: float
    """Seconds since 1970, UTC."""

    log: str = ""
    """The log that it came from; each log has its newest record first."""


@dataclass(slots=True)
class Records:
    """What a folder or a file says of prices and speeds."""

    aws: list[AwsRecord]
    """Records of AWS, newest first within a log."""

    azure: list[dict[str, Any]] = field(default_factory=list)
    """Rows of `azure_spot`."""

    on_demand: dict[str, float] = field(default_factory=dict)
    """Device type -> dollars per device and hour on demand."""

    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Model -> device type -> steps per second on one device."""

    warnings: list[str] = field(default_factory=list)
    """What was mended while reading."""

    def device_types(self) -> list[str]:
        """Return the device types that are offered anywhere."""
        named = {DEVICES[row.instance_type][0] for row in self.aws if row.instance_type in DEVICES}
        return sorted(named | {str(row["device_type"]) for row in self.azure})

    def market(
        self, region: str, reference: str = "v100", *, on_demand: bool = False
    ) -> tuple[Market, list[date]]:  # fmt: skip
        """Return the offers of a region of AWS and of Azure, and the days on which the study starts jobs.

        One record stands for a day: the first one of that date in the logs, which is the newest. The calendar is that
        of the smallest instance of the `reference` device type; its last date has no end. `on_demand` adds single
        devices on demand. Raises `InputError`.
        """
        pick(dict.fromkeys(row.region for row in self.aws), region, "region")
        offers: dict[Offer, dict[date, float]] = {}
        for row in (row for row in self.aws if row.region == region and row.instance_type in DEVICES):
            offer = Offer("aws", region, row.zone, row.instance_type, *DEVICES[row.instance_type])
            day = datetime.fromtimestamp(row.unix_s, UTC).date()
            offers.setdefault(offer, {}).setdefault(day, row.usd_per_h)
        if not offers:
            types = {row.instance_type for row in self.aws if row.region == region}
            raise InputError(f"the devices of {', '.join(sorted(types))} are not known. {suggestion(DEVICES, 'p3')}")
        sizes = [offer.num_devices for offer in offers if offer.device_type == reference]
        calendar = sorted({
            day for offer, record in offers.items() for day in record
            if not sizes or (offer.device_type == reference and offer.num_devices == min(sizes))
        })  # fmt: skip
        for number, line in enumerate(self.azure, 2):
            if line["instance_type"] in AZURE and not _missing(line["usd_per_h"]):
                usd, day = _price(line["usd_per_h"], f"azure_spot row {number}"), _day(line["date"])
                kind = str(line["instance_type"]), str(line["device_type"]), int(line["num_devices"])
                offers.setdefault(Offer("azure", line["region"], line["region"], *kind), {})[day] = usd
        prices = dict(enumerate(offers.values()))
        market = Market.of(list(offers), prices, last=calendar[-1])
        return market.with_on_demand(self.on_demand) if on_demand else market, calendar


def read_records(path: Path) -> Records:
    """Read prices from a folder of tables or one file of AWS; raises `FormatError` that names file and row."""
    if path.is_dir():
        places = (path / "data/cluster/market", path / "cluster/market", path / "market", path)
        folder = next((place for place in places if _table(place, "aws_spot")), None)
        if folder is None:
            raise FormatError(f"{path} has no aws_spot.parquet, .csv or .json. Pass a folder or a file of prices.")
        found = _aws(folder, "aws_spot")
        found.azure = _rows(folder, "azure_spot", ("region", "instance_type", "device_type", "num_devices", "date"))
        for number, row in enumerate(_rows(folder, "on_demand", ("device_type", "usd_per_h")), 2):
            found.on_demand[str(row["device_type"])] = _price(row["usd_per_h"], f"on_demand row {number}")
        for number, row in enumerate(_rows(folder, "throughputs", ("model", "device_type", "steps_per_s")), 2):
            rate = _price(row["steps_per_s"], f"throughputs row {number}")
            found.speeds.setdefault(str(row["model"]), {})[str(row["device_type"])] = rate
        return found
    if not path.is_file():
        raise FormatError(f"{path} does not exist. Pass a folder of tables, or what AWS printed as JSON.")
    return _aws(path.parent, path.stem, path)


def _aws(folder: Path, stem: str, path: Path | None = None) -> Records:
    """Read and check the records of AWS; they are sorted, with a warning, where no log is newest first."""
    path = path or _table(folder, stem)
    if path is None:
        raise FormatError(f"{folder} has no {stem}.parquet, .csv or .json. Pass a folder that has one.")
    if path.suffix == ".json":
        records = _json_records(path)
    else:
        columns = ("zone", "instance_type", "usd_per_h", "unix_s")
        records = [_aws_record(row, f"{path.name} row {number}") for number, row in enumerate(_read(path, columns), 2)]
    if not records:
        raise FormatError(f"{path} holds no price. Export a longer time, or name its instance types.")
    warnings: list[str] = []
    last: dict[tuple[str, str, str], float] = {}
    prices: dict[tuple[str, str, float], float] = {}
    unsorted, conflicts = 0, 0
    for row in records:
        key = (row.log, row.zone, row.instance_type)
        unsorted += row.unix_s > last.get(key, math.inf)
        last[key] = row.unix_s
        conflicts += prices.setdefault((row.zone, row.instance_type, row.unix_s), row.usd_per_h) != row.usd_per_h
    if unsorted:
        records.sort(key=lambda row: -row.unix_s)
        warnings.append(f"{path.name}: {unsorted:,} records are older than the one after them: sorted, newest first")
    if conflicts:
        warnings.append(f"{path.name}: {conflicts:,} records overlap with another price at the same time: first used")
    return Records(records, warnings=warnings)


def _json_records(path: Path) -> list[AwsRecord]:
    """Return the records that `aws ec2 describe-spot-price-history --output json` printed."""
    tree = read_json(path)
    rows = tree.get("SpotPriceHistory") if isinstance(tree, dict) else None
    if not isinstance(rows, list):
        raise FormatError(f"{path} has no list SpotPriceHistory. Pass what `describe-spot-price-history` printed.")
    records = []
    for number, row in enumerate(rows):
        try:
            if "Linux/UNIX" not in row.get("ProductDescription", "Linux/UNIX"):
                continue
            when = datetime.fromisoformat(row["Timestamp"])
            unix_s = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
            named = {"zone": row["AvailabilityZone"], "instance_type": row["InstanceType"]}
            price = {"usd_per_h": float(row["SpotPrice"]), "unix_s": unix_s}
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise FormatError(f"{path}: price {number} has another shape than AWS prints ({fault!r}).") from None
        records.append(_aws_record({**named, **price}, f"{path.name} price {number}"))
    return records


def _aws_record(row: Mapping[str, Any], where: str) -> AwsRecord:
    """Check one record; a region that is not named is the zone without its letter."""
    zone, kind = row["zone"], row["instance_type"]
    if not zone or not kind:
        raise FormatError(f"{where} names no zone or instance type. Remove the row or complete it.")
    region = row.get("region") or str(zone).rstrip("abcdefghijklmnopqrstuvwxyz")
    usd, unix_s = _price(row["usd_per_h"], where), number_of(row["unix_s"], f"{where}, unix_s", most=LAST_S)
    return AwsRecord(str(zone), str(region), str(kind), usd, unix_s, str(row.get("log") or ""))


def _missing(value: Any) -> bool:
    """Return whether a cell is empty."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _price(value: Any, where: str) -> float:
    """Return a number >= 0."""
    return number_of(value, where)


def _day(value: Any) -> date:
    """Return a date that is one, or a text of one."""
    try:
        return value if isinstance(value, date) else date.fromisoformat(str(value)[:10])
    except ValueError:
        raise FormatError(f"{value!r} is not a date. Write it as 2020-03-23.") from None


def _table(folder: Path, stem: str) -> Path | None:
    """Return the file of a table in a folder, None where it has none."""
    return next((p for end in ("parquet", "csv", "json") if (p := folder / f"{stem}.{end}").is_file()), None)


def _rows(folder: Path, stem: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table that a folder may lack."""
    path = _table(folder, stem)
    return _read(path, columns) if path else []


def _read(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a table; raises `FormatError` where it has not these columns."""
    try:
        if path.suffix == ".parquet":
            with parquet_faults(path):
                table = pyarrow.parquet.read_table(path)
        else:
            table = pyarrow.csv.read_csv(io.BytesIO("".join(read_lines(path)).encode()))
    except (OSError, pyarrow.ArrowException) as fault:
        raise FormatError(f"{path} is not a readable table ({fault}). Write Parquet, or CSV with a header.") from None
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise FormatError(f"{path} has no column {missing[0]!r}. Write {', '.join(columns)}.")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def read_events(path: Path, device_type: str) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Return the recorded availability of GCP, and dollars per hour of one device by zone; empty without a table."""
    places = (path / "data/cluster/market", path / "cluster/market", path / "market", path)
    folder = next((place for place in places if _table(place, "availability")), path)
    events = _rows(folder, "availability", ("cloud", "unix_s", "event", "instance", "device_type", "zone"))
    prices: dict[str, float] = {}
    for number, row in enumerate(_rows(folder, "gcp_spot", ("zone", "device_type", "num_devices", "usd_per_h")), 2):
        if row["device_type"] == device_type and row["num_devices"] == 1:
            prices.setdefault(str(row["zone"]), _price(row["usd_per_h"], f"gcp_spot row {number}"))
    return [row for row in events if row["cloud"] == "gcp"], prices


AZURE_REGIONS = {"us_east": "eastus", "us_north_central": "northcentralus", "us_south_central": "southcentralus"}
"""Region as the study writes it -> Azure's own name."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The rest of a job, and how it may be bought."""

    steps: float
    """Steps that are left."""

    reference: str
    """Device type of the baseline."""

    hysteresis: float = 0.1
    """Fraction of a move's cost that the online rule wants to win on top."""

    due_s: float = math.inf
    """Deadline, in seconds after the start."""


def buy(terms: MarketTerms, start: int, rest: Rest) -> dict[str, Bought]:
    """Buy the rest of a job from a day on, by every strategy, the online rule and in hindsight."""
    found = {name: follow(terms, start, rest.steps, study(name, terms, rest.reference)) for name in STUDY}
    rule = online(terms, hysteresis=rest.hysteresis, due_s=rest.due_s)
    found["online"] = follow(terms, start, rest.steps, rule)
    known = min((way.usd for way in found.values() if way.duration_s <= rest.due_s), default=math.inf)
    found["hindsight"] = hindsight(terms, start, rest.steps, due_s=rest.due_s, most_usd=known)
    return found


def history(
    terms: MarketTerms, calendar: Sequence[date], rest: Rest, day: date | None, *, hold: bool
) -> dict[str, object]:
    """Buy on the study's start days (all but the last 5, at most 30), and, where it is named, from one day on.

    A calendar of fewer than 6 days starts on its first one; raises `InputError` where the job is longer than it and
    `hold` does not carry the last prices on.
    """
    starts = [terms.market.index(start) for start in calendar[-35:-5]]
    if not starts:
        fastest = float(terms.steps_per_s.max())
        check_length(terms.market, calendar[0], rest.steps / fastest, hold=hold)
    found = over_starts(terms, starts or [terms.market.index(calendar[0])], rest)
    return found | ({"from": from_day(terms, day, rest, hold=hold)} if day else {})


def over_starts(terms: MarketTerms, starts: Sequence[int], rest: Rest) -> dict[str, object]:
    """Return mean, least and most dollars of each strategy over start days, `hindsight_usd` and `online_usd`.

    As in the study, a job that is not done on the last day of the calendar pays that day's price until it is.
    """
    bought = [buy(terms, start, rest) for start in starts]
    rows = []
    for name in STUDY:
        usd = [ways[name].usd for ways in bought]
        rows.append({"name": name, "mean_usd": float(np.mean(usd)), "min_usd": min(usd), "max_usd": max(usd)})
    ends = [s * DAY_S + max(w.duration_s for w in ways.values()) for s, ways in zip(starts, bought, strict=True)]
    return {
        "starts": [str(terms.market.day(starts[0])), str(terms.market.day(starts[-1]))],
        "num_starts": len(starts),
        "strategies": rows,
        "hindsight_usd": float(np.mean([ways["hindsight"].usd for ways in bought])),
        "online_usd": float(np.mean([ways["online"].usd for ways in bought])),
        "online_moves": float(np.mean([ways["online"].moves for ways in bought])),
        "starts_past_last_day": sum(end > len(terms.usd_per_s) * DAY_S for end in ends),
    }


def from_day(terms: MarketTerms, day: date, rest: Rest, *, hold: bool) -> dict[str, object]:
    """Buy from one day on: what that day's prices predicted, and what the days after it made of it.

    Raises `InputError` where prices end before the job and `hold` does not carry the last ones on.
    """
    start, cost = terms.market.index(day), terms.usd_per_step()
    bought, rows = buy(terms, start, rest), []
    for name, way in bought.items():
        check_length(terms.market, day, way.duration_s, hold=hold)
        rows.append({
            "name": name, "predicted_usd": float(cost[start, way.offers[0]] * rest.steps), "paid_usd": way.usd,
            "hours": way.duration_s / HOUR_S, "moves": way.moves,
            "offers": [terms.market.offers[index].name for index in dict.fromkeys(way.offers)],
        })  # fmt: skip
    return {"day": str(day), "rows": rows}


def check_length(market: Market, day: date, duration_s: float, *, hold: bool) -> None:
    """Raise `InputError` where a job that starts on a day outlives the prices, and they may not be carried on."""
    needed = day + timedelta(math.ceil(duration_s / DAY_S) - 1)
    if needed > market.last and not hold:
        raise InputError(
            f"the trace ends at {market.last}, the job needs {needed}. Pass --extend hold to carry the last prices on, "
            "an earlier --from, or a longer record."
        )


def cheapest(terms: MarketTerms, day: int, steps: float) -> list[dict[str, object]]:
    """Return what the rest of the job costs on each offer that is open on a day, cheapest first."""
    cost = np.where(terms.market.open[day], terms.usd_per_step()[day], np.inf)
    return [
        {
            "offer": terms.market.offers[index].name, "index": index, "usd": float(cost[index] * steps),
            "usd_per_h": float(terms.market.usd_per_h[day, index]), "steps_per_s": float(terms.steps_per_s[index]),
            "hours": float(steps / terms.steps_per_s[index] / HOUR_S),
        }
        for index in np.argsort(cost, kind="stable").tolist() if np.isfinite(cost[index])
    ]  # fmt: skip


def deadlines(
    folder: Path, usd_per_h: Mapping[str, float], reference: str, work_s: float, due_s: float, restart_s: float
) -> dict[str, object] | None:  # fmt: skip
    """Play a deadline from each hour of the recorded availability on; None without a deadline or such a record."""
    if reference not in usd_per_h or not math.isfinite(due_s):
        return None
    on_demand = usd_per_h[reference]
    events, prices = read_events(folder, reference)
    up = [span for span in spans(events, reference) if span.zone in prices]
    starts = hourly_starts(up, due_s)
    if not starts:
        return None
    terms = {"work_s": work_s, "due_s": due_s, "restart_s": restart_s}
    ways = [run_until(up, prices, on_demand, start_s=start, **terms) for start in starts]
    usd, full = float(np.mean([way.usd for way in ways])), on_demand * work_s / HOUR_S
    return {
        "num_starts": len(starts),
        "num_met": sum(way.end_s <= start + due_s + 1e-6 for way, start in zip(ways, starts, strict=True)),
        "mean_usd": usd, "on_demand_usd": full, "cost_fraction": usd / full,
        "mean_restarts": float(np.mean([way.restarts for way in ways])),
        "without_spot_usd": run_until([], {}, on_demand, start_s=0.0, **terms).usd,
    }  # fmt: skip


def sky_task(market: Market, index: int, *, num_devices: int, script: Sequence[str], max_restarts: int) -> str:
    """Return a task of SkyPilot's (YAML) that runs a script on an offer: `sky jobs launch FILE`."""
    offer = market.offers[index]
    hosts, nproc = math.ceil(num_devices / offer.num_devices), min(num_devices, offer.num_devices)
    azure = offer.cloud == "azure"
    region = AZURE_REGIONS.get(offer.region, offer.region)
    kind = "Standard_" + offer.instance_type.replace(" ", "_") if azure else offer.instance_type
    several = (
        '--nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK '
        '--master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" --master-port 29500 '
    ) if hosts > 1 else ""  # fmt: skip
    return "\n".join([
        "name: headway-rest", f"num_nodes: {hosts}", "resources:",
        f"  infra: {offer.cloud}/{region}" + ("" if azure else f"/{offer.zone}"), f"  instance_type: {kind}",
        "  use_spot: true", "  job_recovery:", f"    max_restarts_on_errors: {max_restarts}", "run: |",
        f"  headway run --nproc-per-node {nproc} {several}-- {shlex.join(script)}", "",
    ])  # fmt: skip


def speeds_of(
    table: Mapping[str, float], reference: str, steps_per_s: float, peaks: Mapping[str, float]
) -> dict[str, float]:  # fmt: skip
    """Return steps per second on each type: measured on `reference`, elsewhere by the ratio of table or of peaks."""
    ratios = {kind: rate / table[reference] for kind, rate in table.items()} if table.get(reference) else peaks
    return {kind: steps_per_s * ratio for kind, ratio in ratios.items()} | {reference: steps_per_s}
