"""Recorded queues: Slurm, Philly, CSV; what was observed beside what policies would have made of it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import cluster_backfill
from headway.cli import main
from headway.cluster import Cluster, Jobs, compare_policies, simulate
from headway.cluster.queue.compare import FIDELITY
from headway.cluster.queue.logs import RecordedQueue, read_queue
from headway.cluster.queue.recorded_rates import RunRate, queue_rates
from headway.core.errors import FormatError, InputError
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.answers.ledger import Ledger
from headway.trace.recording.runs import Run
from tests.launching import json_of, refusal
from tests.paths import GOLDEN, shared


def served_in_order(seed=0, n=60, devices=8):
    """A queue that a first-come scheduler served: (arrival, run, devices, start), walked through second by second."""
    rng = np.random.default_rng(seed)
    arrival = np.sort(rng.integers(0, 40_000, n))
    run, size = rng.integers(600, 9000, n), rng.choice([1, 2, 4, 8], n)
    rows, ends, last = [], [], 0
    for when, seconds, scale in zip(arrival.tolist(), run.tolist(), size.tolist(), strict=True):
        at = max(when, last)
        while sum(k for end, k in ends if end > at) + scale > devices:
            at = min(end for end, _ in ends if end > at)
        ends.append((at + seconds, scale))
        rows.append((when, seconds, scale, at))
        last = at
    return rows


def sacct(rows, *, newer):
    """What `sacct --json` prints of them, in the shape of older or newer versions."""
    wrap = (lambda n: {"set": True, "infinite": False, "number": n}) if newer else (lambda n: n)
    base = 1_700_000_000
    jobs = [
        {
            "job_id": number, "name": f"job{number}", "user": "ada" if number % 3 else "bob", "array": {"job_id": 0},
            "time": {"submission": base + when, "start": base + at, "end": base + at + run, "elapsed": run},
            "state": {"current": ["COMPLETED"] if newer else "COMPLETED"},
            "tres": {"allocated": [
                {"type": "cpu", "name": None, "count": 8}, {"type": "gres", "name": "gpu", "count": wrap(scale)},
                {"type": "gres", "name": "gpu:a100", "count": wrap(scale)},
            ]},
        }
        for number, (when, run, scale, at) in enumerate(rows)
    ]  # fmt: skip
    never = {**jobs[0], "job_id": 999, "time": {"submission": base, "start": 0, "end": base + 5, "elapsed": 0}}
    return {"jobs": [*jobs, never], "meta": {"slurm": {"release": "24.05.1"}}}


@pytest.mark.parametrize("seed", range(3))
def test_backfill_starts_each_job_when_a_scheduler_that_plans_all_of_them_each_second_does(seed):
    """The oracle shares no code with the policy; times are whole seconds, so its seconds miss no event."""
    drawn = cluster_backfill.drawn(seed, 60)
    short = [
        replace(job, run_s=job.run_s // 60, limit_s=job.limit_s / 60, arrival_s=job.arrival_s // 60) for job in drawn
    ]
    queue = RecordedQueue.of(cluster_backfill.served(short, 1), "oracle")
    found = compare_policies(queue, Cluster.parse("a100=64"), np.ones((60, 1)), ("backfill", "fifo"))

    assert found.policies["backfill"].start_s.tolist() == pytest.approx(queue.start_s.tolist())
    assert (queue.start_s > queue.jobs.arrival_s).any()
    assert found.explained("backfill") == pytest.approx(0.0)
    assert found.policies["backfill"].rho.tolist() == pytest.approx(found.observed.rho.tolist())


def test_a_job_behind_the_first_starts_where_it_delays_no_reservation():
    """Four devices: a uses 3 for 10 s, b needs 4; c and d want 1 each, for longer and for shorter than a lasts."""
    jobs = Jobs(list("abcd"), [3, 4, 1, 1], [10.0, 5.0, 11.0, 8.0], [0.0, 1.0, 2.0, 2.0])
    start_s = {
        name: simulate(jobs, {"a100": 4}, name, rates=np.ones((4, 1)), fills=True).start_s.tolist()
        for name in ("easy", "backfill")
    }

    assert start_s["backfill"] == start_s["easy"] == [0.0, 10.0, 15.0, 2.0]
    # By a time limit of 8 s c would end in time; it does not, and b waits for it.
    limited = replace(jobs, limit_s=np.array([10.0, 5.0, 8.0, 9.0]))
    late = simulate(limited, {"a100": 4}, "easy", rates=np.ones((4, 1)), fills=True)
    assert late.start_s.tolist() == [0.0, 13.0, 2.0, 18.0]


@pytest.mark.slow
@pytest.mark.parametrize("newer", [False, True])
def test_an_export_of_sacct_is_replayed_as_it_was_and_policies_are_ranked(tmp_path, newer):
    rows = served_in_order()
    path = tmp_path / "sacct.json"
    path.write_text(json.dumps(sacct(rows, newer=newer)))
    answer = json_of(
        "cluster", "compare", "--jobs", str(path), "--devices", "a100=8", "--policies", "fifo,las", "--json"
    )

    assert answer["observed"]["mean_jct_s"] == pytest.approx(np.mean([at + run - when for when, run, _, at in rows]))
    assert abs(answer["replay_error_fraction"]) < 1e-9
    assert [found["policy"] for found in answer["policies"]] == ["fifo", "las"]
    best = min(answer["policies"], key=lambda found: found["mean_jct_s"])
    assert answer["best"] == best["policy"]
    assert answer["skipped"] == 1
    hours = answer["observed"]["device_hours_by_owner"]
    assert sum(hours.values()) == pytest.approx(sum(run * scale for _, run, scale, _ in rows) / 3600)
    assert (answer["restart_s"], answer["restart_source"]) == (60.0, "assumed; see --restart-s")


def test_moves_cost_what_is_given_or_what_runs_measured_and_the_page_shows_each_queue(tmp_path, capsys):
    table, out = tmp_path / "queue.csv", tmp_path / "page.html"
    lines = [f"{i},{when},{run},{scale},{at}" for i, (when, run, scale, at) in enumerate(served_in_order())]
    table.write_text("\n".join(["id,arrival_s,run_s,num_devices,start_s", *lines]))
    answers = []
    for words in (["0"], ["300"], ["300", "-o", str(out)]):
        with pytest.raises(SystemExit) as leaving:
            main(["cluster", "compare", "--jobs", str(table), "--devices", "a100=8", "--json", "--restart-s", *words])
        assert leaving.value.code == 0
        answers.append({row["policy"]: row for row in json.loads(capsys.readouterr().out)["policies"]})
    free, paid, _ = answers

    assert free["las"]["moves"] > 0
    assert paid["las"]["mean_jct_s"] > free["las"]["mean_jct_s"]
    assert paid["backfill"] == {**free["backfill"], "decide_s": paid["backfill"]["decide_s"]}  # moves nobody
    assert [out.read_text().count(f"<figcaption>{name}:") for name in ("observed", *free)] == [1] * 5


def test_devices_that_do_not_explain_the_queue_give_no_ranking(tmp_path, capsys):
    path = tmp_path / "sacct.json"
    path.write_text(json.dumps(sacct(served_in_order(), newer=True)))
    answer = json_of("cluster", "compare", "--jobs", str(path), "--devices", "a100=32", "--json", code=3)

    assert answer["replay_error_fraction"] < -FIDELITY
    assert (answer["policies"], answer["best"]) == ([], None)
    with pytest.raises(SystemExit):
        main(["cluster", "compare", "--jobs", str(path), "--devices", "a100=32"])
    assert "No ranking: the replay misses the observed mean completion time" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"the log names devices 'a100'; --devices has v100, k80"):
        compare_policies(read_queue(path), Cluster.parse("v100=32,k80=4"), np.ones((60, 2)))
    with pytest.raises(InputError, match=r"job '\d+' needs 8 devices of one type|ran on 8 devices of a100"):
        compare_policies(read_queue(path), Cluster.parse("a100=4"), np.ones((60, 1)))


def test_the_piped_form_and_a_csv_hold_the_same_queue(tmp_path):
    rows = served_in_order(n=5)
    text = ["JobID|User|Submit|Start|End|State|AllocTRES"]
    day = "2026-01-01T"
    clock = lambda s: f"{day}{s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}"  # noqa: E731 - one line is clearer here
    for number, (when, run, scale, at) in enumerate(rows):
        times = "|".join(clock(t) for t in (when, at, at + run))
        text += [f"{number}|ada|{times}|COMPLETED|cpu=8,gres/gpu:a100={scale},gres/gpu={scale},node=1",
                 f"{number}.batch||{times}|COMPLETED|cpu=8"]  # fmt: skip
    text.append(f"77|ada|{clock(5)}|Unknown|Unknown|PENDING|")
    text = [f"{line}|{'30' if number else 'TimelimitRaw'}" for number, line in enumerate(text)]
    piped, table = tmp_path / "sacct.txt", tmp_path / "queue.csv"
    piped.write_text("\n".join(text))
    lines = [f"{i},{when},{run},{scale},{at},a100" for i, (when, run, scale, at) in enumerate(rows)]
    table.write_text("\n".join(["id,arrival_s,run_s,num_devices,start_s,device_type", *lines]))
    first, second = read_queue(piped), read_queue(table)

    assert first.skipped == 1
    assert first.device_type == second.device_type == ("a100",) * 5
    for name in ("steps", "arrival_s", "scale"):
        assert getattr(first.jobs, name).tolist() == getattr(second.jobs, name).tolist()
    assert first.start_s.tolist() == second.start_s.tolist()
    assert first.jobs.limit_s.tolist() == [1800.0] * 5


def test_a_policy_that_cannot_take_a_job_is_one_line_beside_the_others_and_an_error_alone(tmp_path, capsys):
    table = tmp_path / "queue.csv"
    table.write_text("id,arrival_s,run_s,num_devices,device_type\na,0,100,2,\nb,0,100,1,\n")
    command = ["cluster", "compare", "--jobs", str(table), "--devices", "v100=2", "--policies"]
    for more in (["--json"], []):
        with pytest.raises(SystemExit) as leaving:
            main([*command, "allox,fifo", *more])
        assert not leaving.value.code
    answer, _, screen = capsys.readouterr().out.partition("\n")

    assert [row["policy"] for row in json.loads(answer)["policies"]] == ["fifo"]
    assert "allox is left out: allox takes jobs of one device" in screen
    with pytest.raises(SystemExit) as leaving:
        main([*command, "allox"])
    assert leaving.value.code == InputError.exit_code


def test_speeds_of_types_come_from_the_makers_or_from_the_caller(tmp_path):
    table = tmp_path / "queue.csv"
    table.write_text("id,arrival_s,run_s,num_devices,device_type\na,0,100,1,v100\nb,0,100,1,\n")
    queue = read_queue(table)
    cluster = Cluster.parse("a100=1,v100=1")

    assert queue.rates(cluster, {})[0].tolist() == pytest.approx([312 / 125, 1.0])
    assert queue.rates(cluster, {"a100": 1.5, "v100": 1.0}).tolist() == [[1.5, 1.0], [1.0, 1.0]]
    with pytest.raises(InputError, match=r"no speed of device type 'zz9' is known. Pass --speed zz9=1.0"):
        queue.rates(Cluster.parse("zz9=1,v100=1"), {})


BEFORE = GOLDEN / "runs" / "before"


def test_what_runs_measured_says_how_long_jobs_take_that_have_not_run(tmp_path):
    table = tmp_path / "queue.csv"
    table.write_text("id,arrival_s,num_steps,num_devices,model\na,0,2000,2,train\nb,0,1000,2,big\n")
    rate = steps_per_s(Ledger.of(Run.open(BEFORE)))
    command = ["cluster", "sim", "--trace", str(table), "--devices", "cpu=4", "--policy", "fifo", "--json", "--runs"]
    answer = json_of(*command, f"{BEFORE},big={BEFORE}")

    assert answer["max_jct_s"] == pytest.approx(2000 / rate)
    assert answer["mean_jct_s"] == pytest.approx(1500 / rate)
    assert [row["source"] for row in answer["rates"]] == ["measured", "measured"]
    for runs, job in ((str(BEFORE), "big"), (f"x={BEFORE}", "train")):
        assert f"no run measured {job!r} on 2 devices" in refusal(*command, runs)


def test_a_job_of_a_log_goes_as_much_faster_on_another_type_as_its_runs_did(tmp_path):
    table = tmp_path / "queue.csv"
    table.write_text(
        "id,arrival_s,run_s,num_devices,device_type,model\n"
        "a,0,100,1,v100,bert\nb,0,100,1,k80,resnet\nc,0,100,1,v100,other\nd,0,100,8,v100,bert\n"
    )
    runs = [
        RunRate("bert", 1, "v100", 6.0), RunRate("bert", 1, "v100", 8.0), RunRate("bert", 1, "v100", 90.0),
        RunRate("bert", 1, "k80", 2.0), RunRate("resnet", 1, "v100", 30.0),
    ]  # fmt: skip
    cluster, speed = Cluster.parse("v100=8,k80=1,p100=1"), {"v100": 1.0, "k80": 0.3, "p100": 0.5}
    rates, shown = queue_rates(read_queue(table), cluster, speed, runs)

    # bert's median is 8; resnet on k80 is fitted to bert, which ran on both; no run has seen p100.
    assert rates[0].tolist() == pytest.approx([1.0, 0.25, 0.5])
    assert rates[1].tolist() == pytest.approx([4.0, 1.0, 2.0], rel=1e-3)
    assert rates[2].tolist() == pytest.approx([1.0, 0.3, 0.5])
    assert rates[3].tolist() == pytest.approx(rates[0].tolist())
    assert [row["source"] for row in shown.rows()[3:]] == ["measured", "fitted to other jobs", "by relative speed"]
    strangers = [RunRate("bert", 1, "v100", 8.0), RunRate("resnet", 1, "k80", 3.0)]
    apart = queue_rates(read_queue(table), cluster, speed, strangers)[1]
    assert apart.rates.tolist() == [pytest.approx([8.0, 2.4, 4.0]), pytest.approx([10.0, 3.0, 5.0])]


def test_runs_that_no_job_has_the_name_of_are_refused(tmp_path):
    table = tmp_path / "queue.csv"
    table.write_text("id,arrival_s,run_s,num_devices,model\na,0,100,1,resnet\n")
    steps = tmp_path / "steps.csv"
    steps.write_text("id,arrival_s,num_steps,num_devices,model\na,0,100,1,resnet\n")
    for words, message in (
        (["compare", "--jobs", str(table), "--runs", str(BEFORE)], "no job of the log has the name of a run (train)"),
        (["compare", "--jobs", str(table), "--runs", str(tmp_path)], "is not a run folder"),
        (["compare", "--jobs", str(steps)], "the queue has num_steps; how long a step takes, runs say"),
        (["sim", "--trace", "gavel:single", "--policy", "las", "--runs", str(BEFORE)], "Leave --runs out"),
    ):
        assert message in refusal("cluster", *words, "--devices", "cpu=2")


@pytest.mark.slow
def test_a_part_of_philly_is_ranked_without_a_check_by_replay():
    queue = read_queue(shared("cluster/philly/jobs.parquet"), "11cb48")
    part = type(queue)(queue.jobs.take(slice(0, 300)), queue.start_s[:300], queue.device_type[:300])
    found = compare_policies(part, Cluster.parse("v100=16"), np.ones((300, 1)), ["fifo", "las"])

    assert len(queue.jobs) == 16091
    assert found.observed is None
    assert found.best in ("fifo", "las")
    assert all(math.isfinite(outcome.jct_s.mean()) for outcome in found.policies.values())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"jobs": [{"job_id": 1, "times": {}}], "meta": {"slurm": {"release": "99.05"}}}',
         r"job 0 of Slurm 99\.05 has another shape than known ones .* Export with `sacct -P"),
        ("a.json", '{"rows": []}', r"has no list 'jobs'"),
        ("a.json", '{"jobs": []}', r"holds no job that ran on devices"),
        ("a.csv", "id,arrival_s\n", r"has no column num_devices. Write a header"),
        ("a.csv", "id,arrival_s,run_s,num_devices\na,0,long,1\n", r"a\.csv:2: could not convert"),
        ("a.txt", "JobID|Submit\n", r"has no column Start. Export with"),
        ("a.csv", "id,arrival_s,run_s,num_devices,start_s\na,50,10,1,3\n", r"job 'a' starts before it is submitted"),
    ],
)  # fmt: skip
def test_files_that_are_no_queue_say_what_to_do(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(FormatError, match=message):
        read_queue(path)
