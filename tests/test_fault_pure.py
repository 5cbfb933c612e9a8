"""The pure part of the fault room against binomial tails, brute force, published numbers and the closed form."""

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.core.mesh import Mesh
from headway.fault import Scenario, backup_peers, dual_phase, simulate, standby_size, suspects
from headway.fault.advise import AttemptTimes, propose
from headway.fault.backup import prepare
from headway.fault.fleet import PARTS, FleetTimes
from headway.ledger.answers.metrics import ettr
from headway.ledger.hang import HangVerdict, WaitOrigin
from headway.trace.recording.run_facts import RunFacts
from headway.verbs.jobs.fault import plan, sim


@given(hosts=st.integers(1, 300), p=st.fractions(0, 1), quantile=st.fractions(0, 1))
def test_hosts_in_reserve_are_the_quantile_of_the_binomial(hosts, p, quantile):
    if not (0 < float(p) < 1 and 0 < float(quantile) < 1):
        return
    found = standby_size(hosts, float(p), float(quantile))
    exact_p = Fraction(float(p))

    def tail(count):
        terms = (math.comb(hosts, k) * exact_p**k * (1 - exact_p) ** (hosts - k) for k in range(count + 1))
        return sum(terms, Fraction(0))

    slack = Fraction(1, 10**9)
    assert tail(found) >= Fraction(float(quantile)) - slack
    assert found == 0 or tail(found - 1) < Fraction(float(quantile)) + slack


def test_two_phases_leave_one_suspect_where_groups_are_not_larger_than_they_are_many():
    for hosts in range(1, 65):
        for size in (size for size in range(1, hosts + 1) if hosts % size == 0):
            phases = dual_phase(hosts, size)
            most = 1 if size <= phases.num_groups else math.ceil(size / phases.num_groups)
            for host in range(hosts):
                found = phases.suspects(host // size, host % phases.num_groups)

                assert host in found
                assert len(found) <= most


@pytest.mark.slow
def test_a_copy_is_in_no_group_and_on_no_host_of_its_owner_and_all_hold_one():
    """Every mesh of tp, pp <= 8 and dp <= 16 on hosts of 1, 2, 4 or 8 ranks, more than one: each has a solution."""
    for tp, pp, dp in itertools.product(range(1, 9), range(1, 9), range(1, 17)):
        world = tp * pp * dp
        places = np.stack(np.unravel_index(np.arange(world), (dp, pp, tp)))
        for ranks_per_host in (size for size in (1, 2, 4, 8) if world % size == 0 and world > size):
            peers = np.array(backup_peers(Mesh({"tp": tp, "pp": pp, "dp": dp}), ranks_per_host))

            assert sorted(peers.tolist()) == list(range(world))
            assert (peers // ranks_per_host != np.arange(world) // ranks_per_host).all()
            alone = sum(size > 1 for size in (tp, pp, dp)) == 1  # one group holds all ranks
            assert alone or ((places[:, peers] != places).sum(axis=0) >= 2).all(), (tp, pp, dp)


HEALTHY = ["wait (/opt/torch/distributed.py:{line})", "backward (/opt/torch/autograd.py:{line})", "main (train.py:40)"]


@pytest.mark.slow
def test_a_planted_fault_is_among_the_suspects_of_any_grid_and_any_order_of_ranks():
    draws = np.random.default_rng(5)
    for case in range(200):
        sizes = [int(draws.choice(choices)) for choices in ((1, 2, 4, 8), (1, 2, 4, 8), (4, 8, 16, 32, 160))]
        mesh = Mesh(dict(zip(("tp", "pp", "dp"), sizes, strict=True)))
        fault = int(draws.integers(mesh.world_size))
        axis = str(draws.choice(["tp", "pp"]))
        stacks = {
            rank: [frame.format(line=int(draws.integers(1, 9))) for frame in HEALTHY] for rank in range(mesh.world_size)
        }
        for rank in mesh.group_of(fault, axis):
            stacks[rank] = ["recv (/opt/torch/p2p.py:7)", f"{axis} of {'stage' if axis == 'pp' else 'layer'}"]
        stacks[fault] = ["read (loader.py:3)"]
        order = draws.permutation(mesh.world_size).tolist()
        found = suspects({rank: stacks[rank] for rank in order}, mesh)

        assert fault in found.ranks, (case, mesh)
        assert len(found.ranks) <= mesh.size(axis)
        assert found == suspects(stacks, mesh)
        assert 0 < found.confidence <= 1


def test_nobody_is_blamed_without_a_consensus_and_a_verdict_narrows_a_group():
    mesh = Mesh({"tp": 4, "dp": 4})
    alone = {rank: [f"kind {'abcdefghijklmnop'[rank]}"] for rank in range(16)}
    most = {rank: ["main"] if rank < 7 else [f"{'abcdefghi'[rank - 7]} of its own"] for rank in range(16)}
    odd = {rank: ["wait"] if rank in (4, 5, 6) else ["read"] if rank == 7 else ["main"] for rank in range(16)}
    verdict = HangVerdict(mesh, (WaitOrigin((7,), "absent", 15),), (), {}, {})

    assert suspects(alone, mesh).ranks == suspects({rank: ["main"] for rank in range(16)}, mesh).ranks == []
    assert suspects(most, mesh).reason == "9 of 16 ranks are outliers: no consensus"
    assert (suspects(odd, mesh).ranks, suspects(odd, mesh).group) == ([4, 5, 6, 7], "tp of ranks 4, 5, 6, 7")
    assert suspects(odd, mesh, verdict).ranks == [7]
    assert suspects({rank: ["main"] for rank in range(16) if rank != 9}, mesh).ranks == [9]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mtbf_s", "times"),
    [
        (11_124.0, FleetTimes(restart_s=600.0, save_s=10.0, save_every_s=300.0)),
        (5_000.0, FleetTimes(detect_s=30.0, locate_s=70.0, restart_s=200.0, save_s=40.0, save_every_s=900.0)),
        (500.0, FleetTimes(restart_s=60.0, save_s=5.0, save_every_s=60.0)),
    ],
)
def test_a_fleet_with_one_cause_has_the_ettr_of_the_closed_form(mtbf_s, times):
    found = simulate(Scenario(1, 8, mtbf_s * 40_000 / 86_400, mtbf_s=mtbf_s, times=times), seed=3)
    down_s = times.detect_s + times.locate_s + times.restart_s
    expected = ettr(mtbf_s, restart_s=down_s, interval_s=times.save_every_s, save_s=times.save_s)

    assert found.ettr == pytest.approx(expected, abs=0.003)
    assert set(found.unproductive_s) == set(PARTS)


QUICK = FleetTimes(detect_s=30, locate_s=60, restart_s=90, save_s=0.02, save_every_s=30, standby_hosts=5, replace_s=768)
SLOW = FleetTimes(detect_s=600, locate_s=300, restart_s=768, save_s=13, save_every_s=1800, replace_s=768)


def test_the_published_fleet_keeps_its_ettr_and_loses_it_with_requeues_and_rare_saves():
    fleet = {"hosts": 1200, "devices_per_host": 8, "days": 90.0, "per_1000_host_days": 3.79}
    quick = simulate(Scenario(**fleet, mix="published", times=QUICK), seed=1)
    slow = simulate(Scenario(**fleet, times=SLOW), seed=1)
    month = FleetTimes(detect_s=600, restart_s=900, save_s=1, save_every_s=600)
    megascale = simulate(Scenario(1200, 8, 28.0, mtbf_s=28 * 86_400 / 100, times=month), seed=1)

    assert quick.ettr >= 0.96
    assert quick.ettr - slow.ettr >= 0.10
    assert megascale.ettr > 0.90


def test_verbs_print_one_object_and_name_what_is_wrong(tmp_path, capsys):
    scenario = tmp_path / "fleet.toml"
    scenario.write_text(
        "hosts = 8\ndevices_per_host = 8\ndays = 1\nmtbf_s = 3600\n[mix]\na = 1\n[times]\nrestart_s = 60\n"
    )
    sim(scenario, seed=1, json=True)
    simulated = json.loads(capsys.readouterr().out)
    plan(mtbf_s=11_124.0, restart_s=600.0, save_s=10.0, mesh="tp=2,pp=2,dp=2", ranks_per_host=2, json=True)
    prepared = json.loads(capsys.readouterr().out)

    assert {"ettr", "unproductive_s", "num_incidents", "longest_unproductive_s"} <= simulated.keys()
    assert prepared["backup_peer"] == [6, 7, 4, 5, 2, 3, 0, 1]
    assert 0.9 < prepared["ettr"] < 0.91
    scenario.write_text("hosts = 8\nhostss = 9\n")
    with pytest.raises(FormatError, match="no scenario"):
        sim(scenario)
    for call, words in {
        lambda: standby_size(10, 1.5): "p_daily is 1.5; it is a probability",
        lambda: dual_phase(10, 4): "groups of 4 do not divide 10 hosts.*5, 2",
        lambda: backup_peers(Mesh({"tp": 3}), 2): "do not fill hosts of 2",
        lambda: prepare(mtbf_s=1.0, restart_s=0.0, save_s=0.1, hosts=3): "belong together",
        lambda: suspects({9: ["x"]}, Mesh({"tp": 2})): "rank 9 is not in",
        lambda: Scenario(8, 8, 1.0): "mtbf_s, or per_1000_host_days",
    }.items():
        with pytest.raises(InputError, match=words):
            call()


def advice(**meta):
    """Return what this room proposes to a run with these facts, by name."""
    program = SimpleNamespace(facts=RunFacts.of(meta), measured_s=0.1, run=None)
    ledger = SimpleNamespace(wall_ns=100 * 10**9, ledger_ns={"checkpoint": 10**9}, devices=2)
    return {row.name: row for row in propose(ledger, program, None)}


@pytest.mark.parametrize(
    ("meta", "found"),
    [
        (
            {"bad_losses": {"1": [{"step": 9, "what": "nan"}], "0": [{"step": 17, "what": "inf"}]}},
            "1 was nan at step 9",
        ),
        ({"incidents": [{"evidence": "rank 0: exit code 1, ValueError: loss is NaN"}]}, "ValueError: loss is NaN"),
        ({"incidents": [{"evidence": "rank 0: exit code 1, NameError: finance"}]}, None),
        ({}, None),
    ],
)
def test_a_guard_is_proposed_where_a_loss_broke_and_only_with_a_grant(meta, found):
    guard = advice(**meta).get("fault.guard")

    assert (guard is None) == (found is None)
    assert guard is None or (found in guard.reason and guard.allow == "lossy" and guard.protects and guard.applies)


TIMES = AttemptTimes(100.0, 40.0, lost_s=(10.0, 10.0), down_s=(15.0, 15.0), cold=2, import_s=5.0, script_s=4.0)


def test_the_predicted_ettr_is_the_measured_one_where_nothing_changes_and_never_above_that_of_no_loss():
    assert TIMES.ettr == TIMES.ettr_with() == 0.4
    assert replace(TIMES, cold=0).ettr_with(warm=True) == 0.4
    assert TIMES.ettr_with(warm=True, script_share=0.0) == 40 / (100 - 2 * 5)
    assert TIMES.ettr_with(warm=True, script_share=1.0) == 40 / (100 - 2 * (5 + 4))
    assert replace(TIMES, save_s=0.0).ettr_with(interval_s=1e-9) == pytest.approx(40 / (100 - 20))
    # Saves that come every second cost 60 x 1 s, and save two failures 9.5 s each.
    assert replace(TIMES, save_s=1.0).ettr_with(interval_s=1.0) == pytest.approx(40 / (100 - 19 + 60))


def test_the_interval_between_saves_is_what_the_run_had_and_the_best_one_falls_with_the_cost_of_a_save():
    assert TIMES.interval_s is None
    assert replace(TIMES, saves=6).interval_s == 10.0
    assert replace(TIMES, save_s=0.01).best_interval_s < TIMES.best_interval_s < TIMES.mtbf_s
