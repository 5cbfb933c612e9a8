"""Search for gradient buckets on a 32-rank ring all-reduce, against the default fusions and exhaustive search.

Claim: where sending all gradients takes as long as backward, the plan's step is at least 10 % faster than with the
default fusion (median over models, for DDP: 1 MiB, then 25 MiB; and for Horovod: at most 64 MiB); it is at most 3 %
slower than the best of all 2^11 bucketings of 12 gradients, and found within 5 s of CPU. Every plan is checked on the
whole Dag: all hops of all 32 ranks. Simulated: profiles are rooflines of a V100, hops are modelled, 10 us each.

The plan is made of moves that keep results. `rows` has every model and two links, also one where sending takes half as
long as backward: the gain of buckets alone (`gain`), of buckets of one size, of all moves that keep results, and with
16 bits. Models named random-N are networks whose layers span three decades of size. `--full`: more of those.
"""

import functools
import itertools
import json
import statistics
import sys
from typing import Any

import numpy as np
from _one_f_one_b import cpu_seconds

from benchmarks._hops import Network
from benchmarks._layer_profiles import PROFILES
from benchmarks._step_blocks import Block, profile_of
from benchmarks._step_dag import expand_step
from benchmarks._step_model import BACKWARD, StepProfile, TrainingStep, default_buckets, with_buckets
from benchmarks._step_optimiser import MOVES, SAFE, optimise
from benchmarks._step_search import Scorer
from headway.cost.specs import LinkSpec, shipped
from headway.sim.graph.dag import replay

RANKS, LATENCY_S, DEVICE = 32, 10e-6, "V100-SXM2-16GB"
BATCH = {"mlp": 1024, "resnet18": 32, "resnet50": 32, "vgg16": 32, "bert_large": 8, "gpt_small": 4}
RATIOS = (0.5, 1.0)
GAIN, GAP, CPU_S = 0.10, 0.03, 5.0


def random_profile(seed: int, layers: int) -> StepProfile:
    """Return a network whose layers differ by three decades in size and, independently, by one in time."""
    rng = np.random.default_rng(seed)
    size = 10 ** rng.uniform(4, 7, layers)
    size *= 80e6 / size.sum()
    forward = 10 ** rng.uniform(-4, -3, layers) * 1e9
    rows = zip(size.astype(int).tolist(), forward.astype(int).tolist(), strict=True)
    return profile_of([Block((t,), (2 * t,), (max(4, n),)) for n, t in rows], update_ns=200_000)


def on_ring(profile: StepProfile, ratio: float) -> TrainingStep:
    """Return the step on links so fast that all bytes take `ratio` x backward."""
    backward_s = profile.duration_ns[profile.kind == BACKWARD].sum() / 1e9
    volume = 2 * (RANKS - 1) / RANKS * float(profile.tensor_bytes.sum())
    link = LinkSpec("modelled", bytes_per_s=volume / (ratio * backward_s), latency_s=LATENCY_S, source="assumed")
    return TrainingStep.of(profile, Network("ring", RANKS, link))


def whole_ns(step: TrainingStep) -> int:
    """Return the step time of all ranks, hop by hop."""
    dag = expand_step(step)
    return int(replay(dag.dag, dag.duration_ns).makespan_ns)


def compare(name: str, plain: TrainingStep, ratio: float) -> list[dict[str, Any]]:
    """Search from each default; return one row per default."""
    rows = []
    for framework in ("ddp", "horovod"):
        step = default_buckets(plain, framework)
        only = optimise(step, allow=("join_buckets",))
        cpu_s, safe = cpu_seconds(functools.partial(optimise, step, allow=SAFE))
        half = optimise(step, allow=MOVES)
        assert whole_ns(step) == only.base_ns, "the default differs on the whole Dag"
        assert whole_ns(only.after) == only.step_ns, "the plan differs on the whole Dag"
        assert whole_ns(safe.after) == safe.step_ns, "the plan differs on the whole Dag"
        rows.append({
            "model": name, "comm_to_backward": ratio, "default": framework, "base_s": only.base_ns / 1e9,
            "gain": only.speedup - 1, "gain_one_size": only.base_ns / only.uniform_ns - 1,
            "gain_all_moves": safe.speedup - 1, "gain_with_16_bits": half.speedup - 1,
            "cpu_s": cpu_s, "variants": safe.scored,
        })  # fmt: skip
    return rows


def exhaustive_gap(seed: int, ratio: float) -> float:
    """Return how much slower the plan is than the best of all bucketings of 12 gradients."""
    step = default_buckets(on_ring(random_profile(seed, 12), ratio))
    masks = np.array(list(itertools.product([False, True], repeat=11))).T
    joined = np.concatenate([masks, np.zeros((1, masks.shape[1]), bool)])
    took = Scorer(frozenset()).buckets(step, joined)
    best = with_buckets(step, joined[:, int(np.argmin(took))])
    assert whole_ns(best) == took.min(), "the best differs on the whole Dag"
    return optimise(step, allow=("join_buckets",)).step_ns / int(took.min()) - 1


def large(ranks: int = 1024) -> tuple[int, float, float]:
    """Expand one all-reduce of 25 MB over 1,024 ranks; return (operations, CPU seconds to compile, to replay)."""
    network = Network("ring", ranks, LinkSpec("modelled", 12.5e9, 5e-6, "assumed"))
    step = TrainingStep.of(profile_of([Block((1_000_000,), (2_000_000,), (25_000_000,))]), network)
    build_s, whole = cpu_seconds(lambda: expand_step(step))
    replay_s, makespan = cpu_seconds(lambda: replay(whole.dag, whole.duration_ns).makespan_ns)
    assert makespan == 3_000_000 + int(network.sync_ns(25_000_000)), "the ring differs from its closed form"
    return whole.dag.n, build_s, replay_s


def main() -> None:
    """Print one JSON line."""
    seeds = 20 if "--full" in sys.argv else 6
    device = shipped().device(DEVICE)
    profiles = {name: PROFILES[name](device, batch=batch) for name, batch in BATCH.items()}
    profiles |= {f"random-{seed}": random_profile(seed, 60) for seed in range(seeds)}
    optimise(on_ring(profiles["mlp"], 1.0))  # compiles the kernels, or loads them from the cache
    rows = [row for name, one in profiles.items() for r in RATIOS for row in compare(name, on_ring(one, r), r)]
    gaps = [exhaustive_gap(seed, ratio) for seed in range(2 * seeds) for ratio in RATIOS]
    gains = {
        f"gain_{kind}{framework}_{ratio}": statistics.median(
            row[key] for row in rows if (row["default"], row["comm_to_backward"]) == (framework, ratio)
        )
        for kind, key in (("", "gain_all_moves"), ("buckets_", "gain"))
        for framework in ("ddp", "horovod")
        for ratio in RATIOS
    }
    cpu_s = max(row["cpu_s"] for row in rows)
    wide, build_s, replay_s = large()
    least = min(gains["gain_ddp_1.0"], gains["gain_horovod_1.0"])
    result = {
        "bench": "fusion_search", "ranks": RANKS, "baseline": "default fusion of DDP and Horovod", **gains,
        "share_of_cases_over_10_percent": statistics.mean(row["gain_all_moves"] >= GAIN for row in rows),
        "exhaustive_gap_worst": max(gaps), "exhaustive_cases": len(gaps), "search_cpu_s_worst": cpu_s,
        "ranks_1024_ops": wide, "ranks_1024_compile_cpu_s": build_s, "ranks_1024_replay_cpu_s": replay_s,
        "claim": f"gain>={GAIN}, gap<={GAP}, cpu_s<={CPU_S}",
        "met": bool(least >= GAIN and max(gaps) <= GAP and cpu_s <= CPU_S),
        "rows": [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
