"""Recorded prices: the study's dollars, hindsight against brute force, deadlines, and what is refused."""

import csv
import itertools
import json
from datetime import date, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cluster.price_market import DAY_S, HOUR_S, Market, MarketTerms, Offer
from headway.cluster.price_strategies import STUDY, UptimeSpan, follow, hindsight, online, run_until, study
from headway.cluster.prices import read_records, sky_task
from headway.core.errors import FormatError, InputError
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.answers.ledger import Ledger
from headway.trace.recording.runs import Run
from tests.launching import code_and_json, refusal
from tests.paths import ROOT, shared

FIRST = date(2020, 3, 1)
RUN = ROOT / "tests" / "golden" / "runs" / "before"


def market_of(usd_per_h, types):
    """Return a market of rows of prices, a day each; None = no record of that day."""
    offers = [Offer("aws", "r", f"r{zone}", kind, kind, 1) for zone, kind in enumerate(types)]
    prices = {
        index: {FIRST + timedelta(day): row[index] for day, row in enumerate(usd_per_h) if row[index] is not None}
        for index in range(len(types))
    }
    return Market.of(offers, prices)


def by_brute_force(terms, steps):
    """Try every sequence of offers and return the least dollars."""
    num_days, num_offers = terms.usd_per_s.shape
    best = np.inf
    for path in itertools.product(range(num_offers), repeat=num_days):
        best = min(best, follow(terms, 0, steps, lambda day, *_, path=path: path[day]).usd)
    return best


def small_market(seed):
    """Return the terms of a job on a few offers for a few days, and its steps."""
    rng = np.random.default_rng(seed)
    num_days, num_offers = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    kinds = [f"t{kind}" for kind in rng.integers(0, 3, num_offers)]
    market = market_of(rng.uniform(0.1, 3.0, (num_days, num_offers)).tolist(), kinds)
    speeds = {f"t{kind}": float(rng.uniform(0.5, 4.0)) for kind in range(3)}
    terms = MarketTerms.of(market, speeds, move_usd=float(rng.uniform(0, 8)), move_s=float(rng.uniform(0, 3600)))
    return terms, float(rng.uniform(0.5, 3.5)) * DAY_S * float(terms.steps_per_s.max())


@pytest.mark.parametrize("seed", range(50))
def test_hindsight_is_the_least_of_all_sequences_and_no_strategy_is_cheaper(seed):
    terms, steps = small_market(seed)
    least = hindsight(terms, 0, steps)

    assert least.usd == pytest.approx(by_brute_force(terms, steps), rel=1e-12)
    offers = list(least.offers) + [least.offers[-1]] * len(terms.usd_per_s)
    assert follow(terms, 0, steps, lambda day, *_: offers[day]).usd == pytest.approx(least.usd, rel=1e-12)
    ways = [study(name, terms, "t0") for name in STUDY if name != "baseline"] + [online(terms)]
    assert all(least.usd <= follow(terms, 0, steps, way).usd * (1 + 1e-12) for way in ways)


@pytest.mark.parametrize("seed", range(10))
def test_dearer_moves_never_make_hindsight_cheaper(seed):
    terms, steps = small_market(seed)
    speeds = {offer.device_type: rate for offer, rate in zip(terms.market.offers, terms.steps_per_s, strict=True)}
    usd = [hindsight(MarketTerms.of(terms.market, speeds, move_usd=move), 0, steps).usd for move in (0, 0.5, 2, 9, 1e6)]

    assert usd == sorted(usd)


@given(st.lists(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), min_size=2, max_size=6))
def test_without_a_cost_of_moving_and_at_one_speed_hindsight_is_the_sum_of_daily_minima(rows):
    terms = MarketTerms.of(market_of(rows, ["t", "t", "t"]), {"t": 2.0})
    bought = hindsight(terms, 0, len(rows) * DAY_S * 2.0)

    assert bought.usd == pytest.approx(24 * sum(min(row) for row in rows))
    assert follow(terms, 0, len(rows) * DAY_S * 2.0, online(terms, hysteresis=0)).usd == pytest.approx(bought.usd)


def test_an_offer_in_use_keeps_its_last_price_and_is_not_begun_on_a_day_without_records():
    azure = Offer("azure", "z", "z", "n", "t", 1)
    market = Market.of([azure, Offer("aws", "r", "ra", "m", "t", 1)], {
        0: {FIRST: 1.0, FIRST + timedelta(2): 5.0},
        1: {FIRST: 2.0, FIRST + timedelta(1): 2.0, FIRST + timedelta(3): 2.0},
    })  # fmt: skip
    terms = MarketTerms.of(market, {"t": 1.0})

    assert market.open[:, 0].tolist() == [True, False, True, False]
    assert market.open[:, 1].all()
    assert follow(terms, 0, 2 * DAY_S, study("multi_cloud", terms)).usd == pytest.approx(48.0 / 2 + 24.0)
    assert hindsight(terms, 1, DAY_S).offers == (1,)


def test_a_speed_of_zero_is_never_chosen_and_a_job_without_an_offer_is_refused():
    market = market_of([[0.01, 1.0]], ["a", "b"])
    terms = MarketTerms.of(market, {"a": 0.0, "b": 1.0})

    assert follow(terms, 0, 100.0, online(terms)).offers == (1,)
    assert hindsight(terms, 0, 100.0).offers == (1,)
    with pytest.raises(InputError, match=r"runs on no offer: no speed is known on a, b\. Pass"):
        MarketTerms.of(market, {"c": 1.0})


def test_a_deadline_leaves_slow_offers_while_there_is_time():
    market = market_of([[0.1, 1.0]] * 6, ["slow", "fast"]).with_on_demand({"fast": 3.0})
    terms = MarketTerms.of(market, {"slow": 0.25, "fast": 1.0})
    steps, due_s = 3 * DAY_S, 4 * DAY_S
    bought = follow(terms, 0, steps, online(terms, due_s=due_s))

    assert follow(terms, 0, steps, online(terms)).duration_s > due_s
    assert bought.duration_s <= due_s + 1e-6
    assert bought.offers[0] == 0
    assert hindsight(terms, 0, steps, due_s=due_s).usd <= bought.usd
    with pytest.raises(InputError, match=r"ends within 48 h\. Pass a later --due-hours"):
        hindsight(terms, 0, steps, due_s=2 * DAY_S)


spans_made = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 2), st.sampled_from("ab")), max_size=8
)


@given(spans_made, st.integers(0, 60), st.integers(0, 12))
def test_no_deadline_that_devices_on_demand_can_meet_is_missed(made, restart_min, spare_h):
    up = [UptimeSpan(z, s * HOUR_S, (s + n) * HOUR_S, (s + n) * HOUR_S + seen * 900) for s, n, seen, z in made]
    restart_s, work_s = restart_min * 60.0, 10 * HOUR_S
    due_s = work_s + restart_s + spare_h * HOUR_S
    found = run_until(
        up, {"a": 1.0, "b": 2.0}, 9.0, start_s=0, work_s=work_s, due_s=due_s, restart_s=restart_s
    )  # fmt: skip

    assert found.end_s <= due_s + 1e-6
    assert found.end_s >= work_s + restart_s - 1e-6
    assert found.spot_s <= work_s + 1e-6


def test_a_restart_is_paid_and_work_ends_where_the_instance_goes():
    up = [UptimeSpan("a", 0, 5 * HOUR_S, 6 * HOUR_S), UptimeSpan("b", 5 * HOUR_S, 99 * HOUR_S, 99 * HOUR_S)]
    found = run_until(up, {"a": 1.0, "b": 2.0}, 9.0, start_s=0, work_s=8 * HOUR_S, due_s=14 * HOUR_S, restart_s=HOUR_S)

    assert (found.usd, found.end_s, found.restarts) == (6.0 + 2.0 * 5, 10 * HOUR_S, 2)
    with pytest.raises(InputError, match=r"8 h of work and a restart of 1 h do not fit into 8 h"):
        run_until(up, {"a": 1.0, "b": 2.0}, 9.0, start_s=0, work_s=8 * HOUR_S, due_s=8 * HOUR_S, restart_s=HOUR_S)


def answer(*words):
    """Return the exit code of `headway cluster prices`, and its JSON."""
    return code_and_json("cluster", "prices", *words, "--json")


@pytest.mark.parametrize("model", ["A3C", "ResNet-50 (batch size 128)", "Transformer (batch size 256)"])
def test_the_published_dollars_of_the_study(model):
    folder = shared("cluster/market/published.csv").parent
    with (folder / "published.csv").open() as file:
        published = {row["strategy"]: row for row in csv.DictReader(file) if row["model"] == model}
    code, found = answer("--data", folder, "--model", model, "--days", 4, "--region", "us-east-1")
    ours = {row["name"]: row for row in found["strategies"]}

    assert code == 0
    for name, row in ours.items():
        assert row["mean_usd"] == pytest.approx(float(published[name]["mean_usd"]), rel=5e-3)
    assert found["hindsight_usd"] <= min(row["mean_usd"] for row in ours.values()) + 1e-9
    assert found["hindsight_usd"] <= found["online_usd"] + 1e-9
    if model == "A3C":
        factors = [ours["baseline"]["mean_usd"] / row["mean_usd"] for row in ours.values()]
        assert factors == pytest.approx([1, 1.32, 1.71, 3.10, 3.53], abs=0.01)


def by_the_rule(folder, region, days, model):
    """Return the study's mean dollars by walking through the days as its text says, in plain Python."""
    from datetime import UTC, datetime

    import pyarrow.parquet as pq

    kinds = {"p2.xlarge": ("k80", 1), "p2.8xlarge": ("k80", 8), "p2.16xlarge": ("k80", 16),
             "p3.2xlarge": ("v100", 1), "p3.8xlarge": ("v100", 4), "p3.16xlarge": ("v100", 8)}  # fmt: skip
    with (folder / "throughputs.csv").open() as file:
        speed = {r["device_type"]: float(r["steps_per_s"]) for r in csv.DictReader(file) if r["model"] == model}
    per_device = {}  # (type, zone, devices) -> date -> dollars per device and hour
    for row in pq.read_table(folder / "aws_spot.parquet").to_pylist():
        if row["region"] == region:
            kind, devices = kinds[row["instance_type"]]
            day = datetime.fromtimestamp(row["unix_s"], UTC).date()
            record = per_device.setdefault((row["instance_type"], row["zone"], kind), {})
            record.setdefault(day, row["usd_per_h"] / devices)
    calendar = sorted({day for key, record in per_device.items() if key[0] == "p3.2xlarge" for day in record})
    with (folder / "azure_spot.csv").open() as file:
        for row in csv.DictReader(file):
            if row["instance_type"] in ("NC24", "NC24s v2", "NC24s v3") and row["usd_per_h"]:
                key = (row["instance_type"], row["region"], row["device_type"])
                per_device.setdefault(key, {})[date.fromisoformat(row["date"])] = float(row["usd_per_h"]) / 4
    allowed = {
        "baseline": lambda name: name == "p3.2xlarge", "gpu_type": lambda name: name in ("p3.2xlarge", "p2.xlarge"),
        "packed": lambda name: name in kinds, "multi_cloud": lambda name: True, "preemption": lambda name: True,
    }  # fmt: skip
    means = {}
    for strategy, may in allowed.items():
        bills = []
        for day in calendar[-35:-5]:
            left, usd, key, price = days * 86400 * speed["v100"], 0.0, None, None
            while left > 1e-6:
                if key is None or strategy == "preemption":
                    offered = [k for k, record in per_device.items() if may(k[0]) and day in record]
                    key = max(offered, key=lambda k: speed.get(k[2], 0) / per_device[k][day], default=key)
                price = per_device[key].get(day, price)
                part = min(1.0, left / (86400 * speed[key[2]]))
                usd, left = usd + 24 * price * part, left - part * 86400 * speed[key[2]]
                day = min(day + timedelta(1), calendar[-1])
            bills.append(usd)
        means[strategy] = sum(bills) / len(bills)
    return means


@pytest.mark.parametrize(("region", "days"), [("us-east-2", 0.5), ("us-east-2", 8), ("eu-west-1", 0.5)])
def test_another_region_and_size_cost_what_a_script_of_the_same_rule_says(region, days):
    folder = shared("cluster/market/published.csv").parent
    _, found = answer("--data", folder, "--model", "A3C", "--days", days, "--region", region)

    expected = by_the_rule(folder, region, days, "A3C")
    assert {row["name"]: row["mean_usd"] for row in found["strategies"]} == pytest.approx(expected)


def test_deadlines_on_recorded_availability_are_met_at_less_than_two_fifths_of_on_demand():
    folder = shared("cluster/market/published.csv").parent
    _, found = answer("--data", folder, "--model", "A3C", "--days", 1, "--due-hours", 36, "--restart-s", 900)

    assert found["deadline"]["num_met"] == found["deadline"]["num_starts"] >= 30
    assert found["deadline"]["cost_fraction"] <= 0.4
    assert found["deadline"]["without_spot_usd"] == pytest.approx(2.85 * 24.25)


def aws_json(tmp_path, num_days=12, **change):
    """Write what the command of AWS prints: two types in two zones, newest first."""
    rows = [
        {"AvailabilityZone": f"us-east-1{zone}", "InstanceType": kind, "ProductDescription": "Linux/UNIX",
         "SpotPrice": f"{usd + 0.01 * day:.6f}", "Timestamp": f"2026-05-{day + 1:02}T03:00:00.000Z"}
        for day in reversed(range(num_days)) for zone in "ab" for kind, usd in (("p3.2xlarge", 1), ("p5.48xlarge", 30))
    ]  # fmt: skip
    rows[0] |= change
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"SpotPriceHistory": rows}))
    return path


def test_the_json_of_aws_is_read_and_sky_gets_a_task(tmp_path):
    records = read_records(aws_json(tmp_path))
    market, calendar = records.market("us-east-1")
    index = next(i for i, offer in enumerate(market.offers) if offer.instance_type == "p5.48xlarge")

    assert len(calendar) == 12
    assert records.warnings == []
    assert market.usd_per_h[0, index] == pytest.approx(30.0)
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load(sky_task(market, index, num_devices=16, script=["train.py", "--a b"], max_restarts=3))
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "infra": "aws/us-east-1/us-east-1a", "instance_type": "p5.48xlarge", "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 3},
    }  # fmt: skip
    assert "--nproc-per-node 8" in task["run"]
    assert task["run"].endswith("-- train.py '--a b'\n")


def test_the_rest_of_a_run_is_priced_by_its_own_speed(tmp_path):
    prices, task = aws_json(tmp_path), tmp_path / "task.yaml"
    terms = ("--data", prices, "--device-type", "v100", "--steps-left", 1e6, "--move-s", 600)
    code, found = answer(RUN, *terms, "--sky", task)
    rate = steps_per_s(Ledger.of(Run.open(RUN)))
    first = next(row for row in found["offers"] if "p3.2xlarge" in row["offer"])

    assert code == 0
    assert first["hours"] == pytest.approx(1e6 / rate / 3600)
    assert first["usd"] == pytest.approx(first["usd_per_h"] * found["num_devices"] * first["hours"])
    assert "headway run --nproc-per-node" in task.read_text()
    assert "the run used no accelerator" in refusal("cluster", "prices", str(RUN), "--data", str(prices))


def test_records_out_of_order_or_at_odds_are_sorted_and_warned_of(tmp_path):
    header = "region,zone,instance_type,usd_per_h,unix_s\n"
    rows = [f"r,ra,p3.2xlarge,{1 + day},{day * 86400 + 5}" for day in range(4)]
    for name, lines in (
        ("sorted", rows[::-1]),
        ("oldest_first", rows),
        ("twice", [*rows[::-1], rows[0].replace("1,", "9,", 1)]),
    ):
        (tmp_path / f"{name}.csv").write_text(header + "\n".join(lines) + "\n")
    found = {name: read_records(tmp_path / f"{name}.csv") for name in ("sorted", "oldest_first", "twice")}

    prices = [records.market("r")[0].usd_per_h.tolist() for records in found.values()]
    assert prices[0] == prices[1] == prices[2] == [[1.0], [2.0], [3.0], [4.0]]
    assert found["sorted"].warnings == []
    assert "sorted, newest first" in found["oldest_first"].warnings[0]
    assert "overlap" in found["twice"].warnings[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SpotPrice": "-0.5"}, r"prices\.json price 0 has '-0\.5' where a number from 0 to"),
        ({"SpotPrice": ""}, r"price 0 has another shape"),
        ({"AvailabilityZone": None}, r"price 0 names no zone"),
        ({"Timestamp": "today"}, r"price 0 has another shape"),
    ],
)
def test_prices_that_are_none_say_where(tmp_path, change, message):
    with pytest.raises(FormatError, match=message):
        read_records(aws_json(tmp_path, **change))


def test_bad_words_exit_with_two():
    folder = shared("cluster/market/published.csv").parent
    for words, message in [
        (("--model", "A3D"), "Did you mean 'A3C'"),
        (("--model", "A3C", "--region", "us-west-1"), "unknown region"),
        (("--model", "A3C", "--from", "2020-03-21"), "the trace ends at 2020-03-23, the job needs 2020-03-2"),
        (("--model", "A3C", "--from", "2030-01-01"), "no prices of 2030-01-01 are recorded"),
        (("--model", "A3C", "--move-usd", "-1"), "move_usd is -1"),
        (("--model", "A3C", "--sky", "x.yaml"), "Name RUN"),
    ]:
        assert message in refusal("cluster", "prices", "--data", str(folder), *words)
    code, found = answer("--data", folder, "--model", "A3C", "--from", "2020-03-21", "--extend", "hold")
    assert code == 0
    assert {row["name"] for row in found["from"]["rows"]} == {*STUDY, "online", "hindsight"}
