"""`headway comm plan`: from a recorded job to a plan file that `run --apply` takes, or the reason why not."""

import json
from types import SimpleNamespace

import pytest

from headway.catalog import RECORDS, REMEDIES
from headway.core.errors import InputError
from headway.core.files.planfile import read_plan
from headway.plan.optimiser import CHANGES
from headway.report.terminal import render_optimised
from headway.sim.ddp.ddp_replay import DdpReplay
from headway.trace.rings.rank_tables import DdpModel
from headway.verbs.models import comm
from tests.ddp_made import MS, Job, changed, play

WASTEFUL = Job(forward_ns=(3 * MS,) * 6, size=(300_000,) * 6, bytes_per_s=1e8, limit=(10**8, 10**8))
"""One bucket for everything: nothing overlaps backward."""


def sizes(plan) -> tuple[int, int]:
    """Return the limits of buckets that the plan's single size means."""
    size = int(plan.remedies[0].parameters["bucket_mb"] * 2**20)
    return size, size


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """A run folder whose windows are those of a played job."""

    def of(job: Job) -> SimpleNamespace:
        made = DdpReplay.from_windows([play(job).window], models=[DdpModel(**job.model())], cores=8)
        monkeypatch.setattr(DdpReplay, "from_run", lambda run: made)
        monkeypatch.setattr(comm, "run_at", lambda path: SimpleNamespace(path=tmp_path))
        return made

    return of


def test_a_wasteful_bucket_is_split_and_the_plan_holds_what_can_be_applied(recorded, tmp_path, capsys):
    recorded(WASTEFUL)

    assert comm.plan(json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    plan = read_plan(answer["path"])

    assert answer["schema"] == "headway.comm-plan/1"
    assert answer["predicted_speedup"] > 1.1
    assert {remedy.name for remedy in plan.remedies} <= set(REMEDIES)
    assert len(plan.remedies[0].parameters["bucket_mb_list"]) > 1
    assert plan.baseline == str(tmp_path)
    truth = play(WASTEFUL).step_s / play(changed(WASTEFUL, limit=sizes(plan))).step_s
    assert plan.predicted_speedup == answer["confirmed_speedup"] == pytest.approx(truth, rel=0.05)
    assert plan.interval[0] <= truth <= plan.interval[1]
    assert all(RECORDS[remedy.name].read(remedy.parameters) for remedy in plan.remedies)


def test_the_screen_says_what_by_apply_and_how_to_apply_it(recorded, tmp_path, capsys):
    recorded(WASTEFUL)

    comm.plan(out=tmp_path / "p.json")
    screen = capsys.readouterr().out

    assert "(predicted)" in screen
    assert " 1 -> " in screen
    assert f"headway run --apply {tmp_path / 'p.json'} -- train.py\n" in screen


def test_other_numbers_of_ranks_are_simulated_and_say_so(recorded, tmp_path, capsys):
    recorded(WASTEFUL)

    comm.plan(ranks=32, out=tmp_path / "p.json", json=True)
    answer = json.loads(capsys.readouterr().out)

    assert answer["ranks"] == 32
    assert "Simulated: 32 ranks" in answer["note"]


def test_nothing_is_written_where_nothing_is_won(recorded, tmp_path, capsys):
    # A link so fast that no bucket matters.
    recorded(Job(forward_ns=(9 * MS,) * 3, size=(70_000,) * 3, bytes_per_s=4e9, latency_ns=1000, views=True))

    comm.plan()

    assert "No change is worth a plan" in capsys.readouterr().out
    assert not (tmp_path / "comm-plan.json").exists()


def test_one_rank_sums_nothing(recorded):
    recorded(WASTEFUL)

    with pytest.raises(InputError, match=r"--ranks is 1; gradients are summed over at least 2"):
        comm.plan(ranks=1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"name": "parts", "remedy": None, "how": "set the size"}, ["by hand: set the size"]),
        (
            {"name": "buckets", "remedy": "comm.bucket", "how": CHANGES["buckets"].how},
            ["by --apply, or by hand: DDP: ", "FSDP2: what one fully_shard call holds is summed together"],
        ),
    ],
)
def test_changes_say_how_they_are_made_by_hand(row, said):
    moves = [{"what": "2 -> 9", "step_s": 0.1, **row}]
    found = {"base_step_s": 0.2, "step_s": 0.1, "predicted_speedup": 2.0, "moves": moves, "ranks": 4, "note": ""}

    screen = " ".join(render_optimised(found).split())

    assert all(words in screen for words in said)
