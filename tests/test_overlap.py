"""Matmuls with their collective (`headway.comm.overlap`): rings give what plain forms do."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headway.comm.overlap.advise import LEAST_GAIN, fastest, overlapped_s
from headway.comm.overlap.apply import overlap
from headway.comm.overlap.torch_ring import ag_matmul, chunk_rows, matmul_rs
from headway.comm.remedies import OverlapParameters
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.cost.collectives import OVERLAPS, MatmulShape
from headway.trace.rings.rank_tables import rank_tables
from tests.launching import headway, json_of, refusal
from tests.paths import ROOT
from tests.remedy_context import TestContext
from tests.spawn import on_ranks

FORMS = ("plain", "ring:W", "ring:2W")


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_shapes(world_size: int, count: int) -> list[tuple[list[int], int, int]]:
    """Return rows of each rank (uneven, some without any), k and n."""
    generator = torch.Generator().manual_seed(world_size)
    sizes = torch.randint(0, 40, (count, world_size + 2), generator=generator).tolist()
    return [(rows, k + 1, n + 1) for *rows, k, n in sizes]


def compared(shapes: Sequence[tuple[list[int], int, int]]) -> None:
    """Hold both matmuls, forward and backward, against one process that has everything."""
    group, rank, world_size = dist.distributed_c10d._get_default_group(), dist.get_rank(), dist.get_world_size()
    for seed, (rows, k, n) in enumerate(shapes):
        m = sum(rows)
        x_all, weights = drawn(seed, m, k), [drawn(seed + 100 + r, k, n) for r in range(world_size)]
        upstream = [drawn(seed + 200 + r, m, n) for r in range(world_size)]
        lefts = [drawn(seed + 300 + r, m, k) for r in range(world_size)]
        for form in FORMS:
            x = x_all.split(rows)[rank].clone().requires_grad_()
            w = weights[rank].clone().requires_grad_()
            y = ag_matmul(x, w, group, form=form)
            y.backward(upstream[rank])
            plain = x_all @ weights[rank]
            assert torch.equal(y, plain), (form, rows, k, n, (y - plain).abs().max())
            assert torch.equal(w.grad, x_all.t() @ upstream[rank])
            of_x = sum(g @ v.t() for g, v in zip(upstream, weights, strict=True))
            torch.testing.assert_close(x.grad, of_x.split(rows)[rank], rtol=1e-6, atol=1e-6)

            a, b = lefts[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
            own = matmul_rs(a, b, group, form=form)
            chunks = chunk_rows(m, world_size)
            summed = sum(left @ v for left, v in zip(lefts, weights, strict=True))
            torch.testing.assert_close(own, summed.split(chunks)[rank], rtol=1e-6, atol=1e-6)
            own.backward(upstream[0].split(chunks)[rank])
            assert torch.equal(a.grad, upstream[0] @ weights[rank].t())
            assert torch.equal(b.grad, lefts[rank].t() @ upstream[0])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rings_give_the_plain_products_and_gradients_bit_for_bit_where_rows_are_gathered(world_size: int) -> None:
    on_ranks(compared, world_size, drawn_shapes(world_size, 10))


def refusals() -> dict[str, str]:
    """Return what each misuse on rank 1 (or on all ranks) tells this rank."""
    odd, told = dist.get_rank() == 1, {}
    x, w = drawn(1, 4, 6), drawn(2, 6, 8)
    group = dist.distributed_c10d._get_default_group()
    other = dist.new_group([0])
    cases: dict[str, Callable[[], object]] = {
        "unlike columns": lambda: ag_matmul(drawn(1, 4, 5), drawn(2, 5, 8)) if odd else ag_matmul(x, w),
        "unlike types": lambda: ag_matmul(x.float(), w.float()) if odd else ag_matmul(x, w),
        "unlike rows": lambda: matmul_rs(drawn(1, 3, 6), w) if odd else matmul_rs(x, w),
        "a vector": lambda: ag_matmul(x[0], w) if odd else ag_matmul(x, w),
        "do not multiply": lambda: matmul_rs(x, w[:5]),
        "mixed types": lambda: ag_matmul(x, w.float()),
        "rows": lambda: ag_matmul(x, w, rows=[4, 5, 4]),
        "sum of rows": lambda: matmul_rs(x, w, rows=[3, 3]),
        "form": lambda: ag_matmul(x, w, form="ring"),
        "device": lambda: matmul_rs(x, w, form="symm_mem"),
        "not in the group": lambda: ag_matmul(x, w, other) if odd else ag_matmul(x, w, group, rows=[1]),
    }
    for name, call in cases.items():
        try:
            call()
        except InputError as cause:
            told[name] = str(cause)
    torch.testing.assert_close(ag_matmul(x, w), torch.cat([x, x]) @ w)  # nothing is left half sent
    return told


def test_matrices_that_do_not_fit_are_an_error_on_every_rank_and_leave_the_group_in_order() -> None:
    first, second = on_ranks(refusals, 2)
    assert first.keys() == second.keys()
    assert len(first) == 11
    assert "rank 1 has 5 columns of x" in first["unlike columns"]
    assert "rank 0 has 6 columns of x" in second["unlike columns"]
    assert "torch.float32" in first["unlike types"]
    assert "rank 1 has 3 rows of a, this one 4" in first["unlike rows"]
    assert "Flatten leading dimensions" in second["a vector"]
    assert "rank 1 do not fit" in first["a vector"]
    assert "Did you mean 'ring:W'?" in first["form"]
    assert "pass a process group that rank 1 is in" in second["not in the group"]


def alone() -> None:
    x, w = drawn(1, 3, 4).requires_grad_(), drawn(2, 4, 5).requires_grad_()
    for call in (ag_matmul, matmul_rs):
        assert torch.equal(call(x, w), x @ w)


def test_a_group_of_one_multiplies_and_a_process_without_a_group_is_told_to_make_one() -> None:
    on_ranks(alone, 1)
    with pytest.raises(InputError, match="init_process_group"):
        ag_matmul(drawn(1, 2, 2), drawn(2, 2, 2))


def test_on_30_recorded_shapes_the_choice_is_never_slower_in_rounds_that_it_was_not_made_from() -> None:
    recorded = json.loads((ROOT / "tests" / "golden" / "overlap_timings.json").read_text())
    shares, taken = [], set()
    for forms in (forms for link in recorded.values() for forms in link.values()):
        chosen = fastest({form: seconds[::2] for form, seconds in forms.items()})
        unseen = zip(forms[chosen][1::2], forms["plain"][1::2], strict=True)
        shares.append(statistics.median(after / before for after, before in unseen))
        taken.add(chosen)
    assert len(shares) == 30
    assert statistics.median(shares) <= 1.0
    assert max(shares) <= 1.03
    assert taken == set(FORMS)


@given(
    plain=st.lists(st.floats(0.001, 10), min_size=1, max_size=31),
    shares=st.dictionaries(st.sampled_from(list(OVERLAPS)[1:]), st.floats(0.2, 2)),
)
def test_a_form_that_always_takes_the_same_share_is_chosen_from_five_percent_on(plain, shares) -> None:
    times = {"plain": plain, **{form: [share * one for one in plain] for form, share in shares.items()}}
    chosen = fastest(times)
    if chosen != "plain":
        assert shares[chosen] == min(shares.values())
        assert shares[chosen] <= 1 / LEAST_GAIN * 1.0001
    elif len(plain) >= 7:
        assert min(shares.values(), default=1.0) >= 1 / LEAST_GAIN * 0.9999


def test_the_command_measures_each_shape_once_and_prints_the_contracted_rows(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["comm", "overlap", "--shapes", "24x16x8,rs:24x16x8", "--json"]
    first = json_of(*command)
    assert first["schema"] == "headway.comm-overlap/1"
    assert [row["shape"] for row in first["rows"]] == ["24x16x8", "rs:24x16x8"]
    for row in first["rows"]:
        assert set(row) == {"shape", "chosen", "plain_s", "chosen_s", "ideal_s"}
        assert row["ideal_s"] > 0
        assert 0 < row["chosen_s"] <= row["plain_s"]
    assert json_of(*command) == first  # from the table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "24x16"], "512x1024x4096"),
        (["--shapes", "0x1x1"], "whole numbers from 1"),
        (["--shapes", "2x2x2", "--ranks", "1"], "Pass 2 or more"),
        (["--shapes", "2x2x2", "-o", "broken.json"], "Measure anew"),
    ],
)
def test_what_cannot_be_measured_is_one_message_and_exit_code_2(arguments, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert message in refusal("comm", "overlap", *arguments)


@given(
    way=st.sampled_from(["ag", "rs"]), ranks=st.integers(2, 8), form=st.sampled_from(["ring:W", "ring:2W"]),
    matmul_s=st.floats(1e-3, 1), collective_s=st.floats(1e-3, 1),
)  # fmt: skip
def test_the_replay_of_a_ring_is_the_closed_form_of_equal_chunks(way, ranks, form, matmul_s, collective_s) -> None:
    replayed = overlapped_s(MatmulShape(way, 64, 64, 64), form, ranks, matmul_s, collective_s)
    # Matmuls one after the other, or all transfers beside all but one chunk's matmul.
    longest_s = max(matmul_s, collective_s + matmul_s / (OVERLAPS[form] * ranks))
    assert replayed == pytest.approx(longest_s, rel=1e-4)


class Block(torch.nn.Module):
    """The MLP of a transformer, sequence-parallel around it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12).double(), torch.nn.Linear(12, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def trained(shapes: dict[str, str] | None, dim: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train a tensor-parallel block three steps; return losses and whole parameters, and what the remedy says."""
    facts: dict[str, Any] = {}
    context = TestContext(None)
    if shapes is not None:
        outcome = overlap(OverlapParameters(shapes), context)
        facts = dict(outcome.facts)
    try:
        torch.manual_seed(0)
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        styles = {"up": ColwiseParallel(input_layouts=Shard(dim)), "down": RowwiseParallel(output_layouts=Shard(dim))}
        block = parallelize_module(Block(), mesh, styles)
        optimizer, found = torch.optim.SGD(block.parameters(), lr=0.1), []
        for step in range(3):
            x = drawn(step, 6, 12, 8).chunk(size, dim)[dist.get_rank()].requires_grad_()
            loss = block(x).square().mean()
            loss.backward()
            found += [loss.detach(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
        found += [parameter.full_tensor().detach() for parameter in block.parameters()]
        return found, outcome.facts if shapes is not None else facts
    finally:
        for undo in reversed(context.undos):
            undo()


def both(dim: int) -> dict[str, Any]:
    size = dist.get_world_size()
    forms = {f"72x8x{12 // size}": "ring:W", f"72x{12 // size}x8": "ring:2W"}
    forms |= {f"rs:72x{12 // size}x8": "ring:2W", f"rs:72x8x{12 // size}": "ring:W"}
    before, _ = trained(None, dim)
    after, facts = trained(forms, dim)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    again, _ = trained(None, dim)  # everything is put back
    assert all(torch.equal(one, other) for one, other in zip(before, again, strict=True))
    return facts


@pytest.mark.parametrize(("size", "dim"), [(2, 0), (2, 1), (3, 1)])
def test_an_unmodified_tensor_parallel_block_trains_the_same_with_overlapped_matmuls(size: int, dim: int) -> None:
    for facts in on_ranks(both, size, dim):
        assert facts["modules"] == 2
        assert facts["in_use"] == [f"72x8x{12 // size}", f"rs:72x{12 // size}x8"]


def gives(calls: list[str], seconds: float) -> dict[str, Any]:
    """Return a table in which every shape is measured: plain takes 10 ms, and a ring `seconds`."""
    forms = {"plain": [0.010] * 7, "ring:2W": [seconds] * 7}
    rows = [{"shape": shape, "forms": forms, "matmul_s": 0.005, "collective_s": 0.005} for shape in calls]
    return {"ranks": 2, "device": "cpu", "dtype": "float32", "rows": rows}


@pytest.mark.slow
def test_a_tensor_parallel_script_is_explained_planned_overlapped_and_compared(tmp_path: Path) -> None:
    job = [ROOT / "benchmarks" / "jobs" / "tensor_parallel.py", 24, 2, 64]
    before, after, plan = tmp_path / "before", tmp_path / "after", tmp_path / "plan.json"
    recorded = headway("run", "--quiet", "--nproc-per-node", 2, "--out", before, "--", *job)
    assert recorded.returncode == 0, recorded.stderr
    seen = rank_tables(before)[0].matmuls
    assert (seen.ranks, seen.shapes) == (2, {"512x64x64": 2, "rs:512x64x64": 2})

    (refused,) = proposals(before, plan)
    assert "grant --allow result-equivalent" in refused["reason"]
    (before / "overlap.json").write_text(json.dumps(gives(["512x64x64", "rs:512x64x64"], 0.0098)))
    (refused,) = proposals(before, plan, "--allow", "result-equivalent")
    assert "plain is the fastest form of all 2 shapes" in refused["reason"]
    (before / "overlap.json").write_text(json.dumps(gives(["512x64x64", "rs:512x64x64"], 0.006)))
    (row,) = proposals(before, plan, "--allow", "result-equivalent")
    assert row["parameters"] == {"shapes": {"512x64x64": "ring:2W", "rs:512x64x64": "ring:2W"}}
    assert row["predicted_speedup"] > 1.02

    write_plan(PlanFile((Remedy("comm.overlap", row["parameters"], allow="result-equivalent"),)), plan)
    applied = headway("run", "--quiet", "--nproc-per-node", 2, "--apply", plan, "--out", after, "--", *job)
    assert applied.returncode == 0, applied.stderr
    (outcome,) = json.loads((after / "applied" / "r1.json").read_text())["remedies"]
    assert outcome["applied"]
    assert outcome["facts"]["in_use"] == ["512x64x64", "rs:512x64x64"]
    losses = [[float(line.split()[1]) for line in done.stdout.splitlines()[:24]] for done in (recorded, applied)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert headway("compare", before, after, "--json").returncode in (0, 3)  # faster or not: this link is no slow one


def proposals(recorded: Path, plan: Path, *options: object) -> list[dict[str, Any]]:
    """Return what `headway plan` says of the remedy: proposed, or refused."""
    answer = json.loads(headway("plan", recorded, "-o", plan, *options, "--json").stdout)
    return [row for key in ("proposals", "refused") for row in answer[key] if row["name"] == "comm.overlap"]
