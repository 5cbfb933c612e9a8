"""What compressed gradients would take: laws of the replay, what it refuses, and what the adviser makes of it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.comm.compression.advise import CANDIDATES, MEASURED, best_table, propose_compression
from headway.core.errors import InputError
from headway.cost.codecs import CodecTimes
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.sim.recorded.program import Program
from headway.sim.whatif import scenario_of
from headway.trace.rings.rank_tables import DdpModel
from tests.ddp_made import Job, play
from tests.refusals import refused
from tests.runs_made import MS, RunMaker

SLOW = Job(bytes_per_s=6e6)
"""A link of about 100 Mbit/s."""


def times(seconds_per_number: float) -> CodecTimes:
    """Every codec takes that long, from a microsecond on."""
    sizes = {n: 1e-9 + n * seconds_per_number for n in (1_000, 1_000_000)}
    rows = [{"codec": name, "numel": n, "encode_s": s, "decode_s": s} for name in MEASURED for n, s in sizes.items()]
    return CodecTimes.from_json({"rows": rows})


def replayed(job: Job, codecs: CodecTimes | None, edit: str, cores: int = 8, **facts: Any) -> int:
    deep = DdpReplay.from_windows([play(job).window], models=[DdpModel(**{**job.model(), **facts})], cores=cores)
    return int(replace(deep, codecs=codecs).makespans_ns(scenario_of([edit] if edit else [])).sum())


@pytest.mark.parametrize("job", [SLOW, Job(), replace(SLOW, ranks=3, lag=(1.0, 1.2, 1.0))])
def test_half_the_bytes_by_a_free_codec_are_a_link_of_twice_the_rate(job: Job) -> None:
    twice, half = replayed(job, None, "bandwidth=2x"), replayed(job, times(0.0), "compress=half")
    collectives = sum(-(-sum(job.size[layer] for layer in bucket) // 4_000_000) * 2 for bucket in job.buckets())

    assert twice * 0.99 <= half <= twice + collectives * job.latency_ns * job.steps + 0.02 * twice


def test_a_slower_codec_never_makes_a_shorter_step_and_a_shared_core_neither() -> None:
    found = [replayed(SLOW, times(cost), "compress=sign") for cost in (0.0, 1e-9, 1e-8, 1e-7)]
    shared = [replayed(SLOW, times(cost), "compress=sign", cores=2) for cost in (0.0, 1e-9, 1e-8, 1e-7)]

    assert found == sorted(found)
    assert found[0] < found[-1]
    assert all(apart <= together for apart, together in zip(found, shared, strict=True))
    # Three million numbers and more at 1e-7 s: encoded, decoded, added several times.
    assert found[-1] - found[0] > SLOW.steps * sum(SLOW.size) / 4 * 1e-7 * 1e9


@pytest.mark.parametrize("cores", [2, 8])
def test_what_collectives_need_of_the_cores_is_part_of_the_step(cores: int) -> None:
    fast = Job(bytes_per_s=5e9)
    found = [
        replayed(fast, replace(times(1e-9), collective_s=cost), "compress=sign", cores=cores)
        for cost in (0.0, 0.5e-3, 2e-3)
    ]

    # Each bucket is sent and answered: of the last one nothing can hide behind backward.
    assert found[1] - found[0] > fast.steps * 2 * 0.5 * MS
    assert found[2] - found[0] > fast.steps * 2 * 2 * MS


def test_fewer_bytes_are_never_slower_behind_a_slow_link() -> None:
    names = ("half", "int8", "dither:4", "sign", "topk:0.01")
    found = [replayed(SLOW, times(0.0), f"compress={name}") for name in names]

    assert found == sorted(found, reverse=True)
    assert replayed(SLOW, None, "") > 1.8 * found[0]


def test_small_tensors_travel_raw() -> None:
    small = replace(SLOW, size=(60_000,) * 40, forward_ns=(MS,) * 40)

    assert replayed(small, times(0.0), "compress=sign") > 0.9 * replayed(small, None, "")


def test_compression_and_another_bucket_size_are_replayed_together() -> None:
    deep = DdpReplay.from_windows([play(SLOW).window], models=[DdpModel(**SLOW.model())], cores=8)
    made = replace(deep, codecs=times(1e-9)).makespans_ns(scenario_of(["compress=half", "bucket_mb=1", "bandwidth=2x"]))

    assert int(made.sum()) < replayed(SLOW, times(1e-9), "compress=half")


test_a_codec_without_a_measured_table_is_refused = refused(
    ("compress=half", None, "was not measured. Measure it into the run folder: headway comm bench -o RUN/codecs"),
    ("compress=topk:0.5", times(0.0), r"the codec topk:0.5 was not measured on this host"),
    by=lambda edit, codecs: replayed(SLOW, codecs, edit),
)


def test_an_unknown_codec_is_no_edit() -> None:
    with pytest.raises(InputError, match=r"compress: unknown codec 'sgin'\. Did you mean 'sign'"):
        scenario_of(["compress=sgin"])


def advice(folder: Path, job: Job, seconds_per_number: float, allow: str, cores: int = 8) -> Proposal | Refusal:
    made = RunMaker(ranks=2, steps=60, cores=8, comm_ns=20 * MS).make()
    deep = DdpReplay.from_windows([play(job).window], models=[DdpModel(**job.model())], cores=cores)
    table = times(seconds_per_number)
    rows = [
        {"codec": name, "numel": n, "encode_s": encode, "decode_s": decode}
        for name, sizes in table.rows.items()
        for n, encode, decode, *_ in sizes
    ]
    (folder / "codecs.json").write_text(json.dumps({"schema": "headway.comm-bench/1", "rows": rows}))
    program = replace(Program.from_trace(made.trace, made.meta), deep=[deep], run=SimpleNamespace(path=folder))
    return propose_compression(program, Setup.from_facts(made.meta, allow=(allow,) if allow else ()))


def test_behind_a_slow_link_the_codec_of_the_shortest_step_is_proposed(tmp_path: Path) -> None:
    row = advice(tmp_path, SLOW, 1e-9, "lossy")

    assert (row.name, row.allow, row.clear, row.applies) == ("comm.compress", "lossy", True, True)
    assert row.parameters["codec"] in ("sign", "topk:0.01:bf16")
    assert row.interval[0] < row.predicted_speedup < row.interval[1]
    assert all(codec in row.reason for codec in CANDIDATES)


@pytest.mark.parametrize(
    ("job", "cost", "allow", "reason"),
    [
        (SLOW, 1e-9, "", "grant --allow lossy"),
        (Job(bytes_per_s=5e9), 1e-7, "lossy", "the link is fast for what this host's cores need to encode: half 0."),
        (replace(Job(), rate_of=(0.4, 1.0, 2.5)), 1e-9, "lossy", "a matter of scheduling, not of its size"),
    ],
)
def test_what_decides_against_compression_is_said(tmp_path, job, cost, allow, reason):
    row = advice(tmp_path, job, cost, allow)

    assert isinstance(row, Refusal)
    assert reason in row.reason


@pytest.mark.parametrize(("rate", "cores"), [(6e6, 8), (1e8, 2), (4e8, 2), (2e9, 8)])
def test_the_table_of_codecs_by_parameter_is_never_worse_than_one_codec_for_all(rate: float, cores: int) -> None:
    job = Job(bytes_per_s=rate)
    deep = DdpReplay.from_windows([play(job).window], models=[DdpModel(**job.model())], cores=cores)
    deep = replace(deep, codecs=times(3e-9))
    table = best_table(deep, CANDIDATES)
    each = [deep.makespans_ns(scenario_of([f"compress={codec}"])).sum() for codec in CANDIDATES]
    plain = deep.makespans_ns(scenario_of([])).sum()

    assert set(table.codecs) <= set(job.model()["parameter_names"])
    assert table.speedup >= float(plain / min(each))
    # What it promises is what the replay gives for the codecs that it names.
    names = [job.model()["parameter_names"][at] for at in job.model()["order"]]
    assert float(plain / deep.compressed_ns([table.codecs.get(name, "") for name in names]).sum()) == table.speedup


def test_a_job_of_a_slow_and_a_hidden_part_gets_a_table(tmp_path: Path) -> None:
    # The link carries the first gradients raw behind backward: encoding them would only delay it.
    job = Job(
        size=(6_000_000, *[2_000_000] * 5), forward_ns=(2 * MS, *[25 * MS] * 5), bytes_per_s=6e7, limit=(2**20, 2**20)
    )
    row = advice(tmp_path, job, 4e-9, "lossy", cores=2)

    assert isinstance(row, Proposal), row
    assert isinstance(row.parameters["codec"], dict)
    assert 0 < len(row.parameters["codec"]) < len(job.size)
    assert "a codec for each of" in row.reason


def test_without_names_of_parameters_no_table_is_made() -> None:
    model = {key: value for key, value in SLOW.model().items() if key != "parameter_names"}
    deep = DdpReplay.from_windows([play(SLOW).window], models=[DdpModel(**model)], cores=8)

    with pytest.raises(InputError, match="did not note the names of its parameters"):
        best_table(replace(deep, codecs=times(1e-9)), CANDIDATES)


def test_the_replay_without_the_edit_is_what_it_was() -> None:
    deep = DdpReplay.from_windows([play(SLOW).window], models=[DdpModel(**SLOW.model())], cores=8)

    assert np.array_equal(
        replace(deep, codecs=times(1e-8)).makespans_ns(scenario_of([])), deep.makespans_ns(scenario_of([]))
    )
