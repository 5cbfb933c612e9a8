"""Parity of a committed checkpoint: what it says of itself, and what it says of damage."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest

from headway.core.errors import DamageError, FormatError
from headway.storage.checks.verification import verify
from headway.storage.manifest import Damage, read_record
from headway.storage.redundancy.parity import assess, check, encode_rank, judge, state, warnings
from headway.storage.redundancy.parity_files import ParityFacts
from tests import redundant
from tests.redundant import content, flip, lose, protected

no_fsync, checkpoint, copy = redundant.no_fsync, redundant.checkpoint, redundant.copy


def image(path, rank):
    return path / f"rank-{rank}" / f"__{rank}_0.distcp"


def test_parity_is_the_xor_of_what_the_stripes_say(checkpoint):
    """The oracle, for the first parity: XOR of the four segments, zeros behind the images' ends."""
    facts = read_record(checkpoint / "rank-2" / "parity.json", ParityFacts)
    stripes, size = facts.stripes, facts.segment_bytes
    want = np.zeros(size, np.uint8)
    for rank, segment in stripes.data(stripes.stripe_of_parity(2, 0)):
        data = image(checkpoint, rank).read_bytes()[segment * size : (segment + 1) * size]
        want[: len(data)] ^= np.frombuffer(data, np.uint8)

    assert (checkpoint / "rank-2" / "parity.bin").read_bytes()[:size] == want.tobytes()


def test_a_checkpoint_is_durable_then_redundant(tmp_path):
    path = protected(tmp_path)
    shutil.rmtree(path / "rank-3" / "copies")
    for name in ("parity.json", "parity.bin"):
        (path / "rank-3" / name).unlink()

    assert (state(path).status, state(path).ranks_done, state(path).scheme) == ("durable", 5, "4+2")
    assert verify(path).status == "good"
    encode_rank(path, 3)
    assert (state(path).status, state(path).ranks_done) == ("redundant", 6)


def test_making_parity_again_makes_the_same_and_touches_no_other_file(copy):
    before = content(copy)
    times = {name: (copy / name).stat().st_mtime_ns for name in before if "parity" not in name and "copies" not in name}

    encode_rank(copy, 4)

    assert content(copy) == before
    assert {name: (copy / name).stat().st_mtime_ns for name in times} == times


def test_what_a_killed_agent_left_is_swept(copy):
    before = content(copy)
    dead, living = (copy / "rank-2" / f".parity.bin.{number}.draft" for number in (98, 99))
    dead.write_bytes(b"half")
    living.write_bytes(b"half")
    os.utime(dead, (0, 0))

    encode_rank(copy, 2)

    assert content(copy) == {**before, "rank-2/.parity.bin.99.draft": b"half"}


def test_all_agents_make_their_parity_at_once(copy):
    before = content(copy)
    for name in before:
        if "parity" in name or "copies" in name:
            (copy / name).unlink()

    with ThreadPoolExecutor(6) as agents:
        made = list(agents.map(lambda rank: encode_rank(copy, rank), range(6)))

    assert [facts.rank for facts in made] == list(range(6))
    assert content(copy) == before


def test_without_redundancy_no_parity_is_made(tmp_path):
    path = protected(tmp_path, "none", world_size=2)

    assert encode_rank(path, 0) is None
    assert state(path).status == "none"
    assert assess(path, [Damage("rank-0/__0_0.distcp", None, 0, "block", 4096)]) == "lost"


def test_any_two_directories_may_be_lost_and_no_three(copy):
    good = content(copy)

    def damage(ranks):
        ends = (".distcp", "manifest.json", "digests.bin")
        files = [
            f"rank-{rank}/{name.split('/')[1]}" for rank in ranks for name in good if name.startswith(f"rank-{rank}/")
        ]
        return [Damage(name, None, 0, "missing") for name in files if name.endswith(ends)]

    for ranks in combinations(range(6), 2):
        lose_two = shutil.copytree(copy, copy.parent / "lost")
        lose(lose_two, *ranks)
        assert assess(lose_two, damage(ranks)) == "repairable"
        shutil.rmtree(lose_two)
    lose(copy, 1, 2, 4)
    assert assess(copy, damage((1, 2, 4))) == "lost"


def test_what_is_lost_is_named_to_the_row(copy):
    """Three images damaged in one row of one stripe: its tensors and rows, and nothing else, are lost."""
    facts = read_record(copy / "rank-0" / "parity.json", ParityFacts)
    places = facts.stripes.data(0)[:3]
    damage = []
    for rank, segment in places:
        offset = segment * facts.segment_bytes
        flip(copy, str(image(copy, rank).relative_to(copy)), offset)
        damage.append(Damage(str(image(copy, rank).relative_to(copy)), None, offset, "block", 4096))

    judgement = judge(copy, damage)

    assert judgement.status == "lost"
    assert {lost.rank for lost in judgement.missing} == {rank for rank, _ in places}
    assert {lost.num_bytes for lost in judgement.missing} == {4096}
    weights = [lost for lost in judgement.missing if lost.tensor == "model.weight"]
    assert weights
    for lost in weights:
        assert 500 * lost.rank <= lost.rows[0] <= lost.rows[1] < 500 * (lost.rank + 1)
        assert lost.rows[1] - lost.rows[0] <= 4096 // 132 + 1
    assert f"rows {weights[0].rows[0]}.." in str(weights[0])


def test_flips_in_other_rows_do_not_add_up(copy):
    facts = read_record(copy / "rank-0" / "parity.json", ParityFacts)
    damage = [
        Damage(f"rank-{rank}/__{rank}_0.distcp", None, segment * facts.segment_bytes + 4096 * row, "block", 4096)
        for row, (rank, segment) in enumerate(facts.stripes.data(0)[:3])
    ]

    assert assess(copy, damage) == "repairable"


@pytest.mark.parametrize("name", ["parity.bin", "parity.json", "copies/commit.json", "copies/parity.json"])
def test_a_flip_in_what_was_written_after_the_commit_is_found(copy, name):
    for rank in (0, 5):
        flip(copy, f"rank-{rank}/{name}", 40)

    assert {hurt.file for hurt in check(copy)} == {f"rank-0/{name}", f"rank-5/{name}"}
    assert verify(copy).status == "repairable"


def test_a_lost_parity_counts_as_a_loss_of_its_rows(copy):
    facts = read_record(copy / "rank-0" / "parity.json", ParityFacts)
    (one, _), (two, _) = facts.stripes.parity(3)
    rank, segment = facts.stripes.data(3)[1]
    hurt = [Damage(f"rank-{rank}/__{rank}_0.distcp", None, segment * facts.segment_bytes, "block", 4096)]
    (copy / f"rank-{one}" / "parity.bin").unlink()

    assert assess(copy, hurt) == "repairable"
    flip(copy, f"rank-{two}/parity.bin", facts.stripes.parity(3)[1][1] * facts.segment_bytes)
    assert assess(copy, hurt) == "lost"


def test_no_parity_is_made_of_damaged_data(copy):
    flip(copy, "rank-1/__1_0.distcp", 5000)

    with pytest.raises(DamageError, match=r"block 1 of rank-1/__1_0.distcp is damaged; no parity.*ckpt repair"):
        [encode_rank(copy, rank) for rank in range(6)]


def test_too_few_ranks_or_hosts_are_told(tmp_path):
    narrow = protected(tmp_path / "a", "8+2", world_size=2)
    packed = protected(tmp_path / "b", "2+2", world_size=4, hosts=["a", "a", "b", "b"])
    apart = protected(tmp_path / "c", "2+2", world_size=4, hosts=["r0/a", "r1/b", "r0/c", "r1/d"])

    assert "8+2 over 2 rank directories: 0 of them may be lost, not 2. Spread" in warnings(narrow)[0]
    assert warnings(packed) == [
        "2+2 over 2 hosts: 1 of them may be lost, not 2. Spread the ranks over at least 4 hosts, or choose a smaller k."
    ]
    assert [text.split(":")[0] for text in warnings(apart)] == ["2+2 over 2 racks"]
    assert warnings(protected(tmp_path / "d")) == []


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(FormatError, match=r"no commit record is in it\. Name a step's folder"):
        encode_rank(tmp_path, 0)
