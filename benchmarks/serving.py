"""A serving plan of mixed bits on two processes takes what was predicted, and generates the same tokens as one.

Claim: tokens per second of a GPT on two gloo ranks, keys and values kept, are within 15 % of the closed form on
layers measured in the same run (median of the rounds), and all tokens equal those of one process with the same
quantised weights. Beside it: the eight published clusters of LLM-PQ, planned on the roofline of public figures
(simulated), against the best uniform precision with its own best partition.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._serving_stage import drawn_stage, measure_layers, serve_on_ranks
from headway.cost.specs import DeviceSpec, LinkSpec, shipped
from headway.cost.transformer import Transformer
from headway.model import serve_plan
from headway.model.serving.costs import ServingLoad, ServingRow, measured
from headway.model.serving.plan import ServeStage, serving_row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.made.pool import RankPool

MODEL, LOAD = Transformer(8, 512, 8, sequence=128, vocabulary=2048), ServingLoad(64, 33, 8)
BITS, ROUNDS, BAR = (4, 8, 16), 5, 0.15
CLUSTERS = {
    "1": ((40, 5120, 40), {"V100-SXM2-32GB": 1}), "3": ((48, 7168, 56), {"T4": 3, "V100-SXM2-32GB": 1}),
    "5": ((64, 9216, 72), {"T4": 4, "V100-SXM2-32GB": 2}),
    "6": ((64, 9216, 72), {"V100-SXM2-32GB": 2, "A100-SXM4-40GB": 2}),
    "7": ((70, 14336, 112), {"V100-SXM2-32GB": 4, "A100-SXM4-40GB": 4}), "9": ((48, 7168, 56), {"T4": 4}),
    "10": ((64, 9216, 72), {"V100-SXM2-32GB": 4}), "11": ((70, 14336, 112), {"A100-SXM4-80GB": 4}),
}  # fmt: skip
"""Cluster of the paper -> layers, width, heads of its model; devices."""


def measure_link(repeats=30):
    """Return seconds of a message of one and of 64 tokens between the ranks, half a round trip each."""
    seconds = []
    for tokens in (1, 64):
        message = torch.zeros(tokens, MODEL.hidden)
        dist.barrier()
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            else:
                dist.recv(message, 0)
                dist.send(message, 0)
            times.append((time.perf_counter() - begin) / 2)
        seconds.append(statistics.median(times))
    return seconds


def rows_of(tables, links):
    """Return two devices that a mixture of bits fits, and their measured latencies."""
    latency = min(links[0], links[1])
    rate = 2 * MODEL.hidden * 63 / max(links[1] - links[0], 1e-6)  # the plan counts 2 bytes a number
    wire = LinkSpec("loopback", rate, latency, "measured")
    memory = (1930e6 + 27e6) / 0.95
    rows = [ServingRow(DeviceSpec(f"core{i}", memory, 1.0, 1.0, "loopback", {}, "made"), 1, wire, wire) for i in (0, 1)]
    return rows, measured([row for table in tables for row in table])


def prompts():
    """Return the prompts, [batch, prompt]."""
    return torch.randint(MODEL.vocabulary, (LOAD.batch, LOAD.prompt), generator=torch.Generator().manual_seed(1))


def play(rounds):
    """On each rank: measure layers and link, plan, run; return rows of predicted and measured tokens per second."""
    torch.set_num_threads(1)
    rank, results = dist.get_rank(), []
    text, stages = prompts(), None
    sizes = tokens = None
    for _ in range(rounds):
        gathered = [None, None]
        dist.barrier()
        dist.all_gather_object(gathered, measure_layers(MODEL, f"core{rank}", BITS, LOAD, repeats=5))
        cluster, seconds = rows_of(gathered, measure_link())
        plans = [serve_plan(MODEL, cluster, LOAD, bits=BITS, theta=1.0, seconds=seconds)]
        dist.broadcast_object_list(plans, 0)
        plan = plans[0]
        stages, costs = plan.stages, plan.choice.costs
        sizes = (costs.prefill_microbatch, costs.decode_microbatch)
        assert len(stages) == 2, "the plan uses one device"
        tokens, took_s = serve_on_ranks(drawn_stage(MODEL, stages[rank], 7), LOAD, sizes, text)
        results.append((plan.tokens_per_s, LOAD.batch * LOAD.new / took_s))
    joined = ServeStage("core0", 0, stages[1].last, (*stages[0].bits, *stages[1].bits))
    return results, tokens.tolist(), (joined, sizes)


def clusters():
    """Return cluster -> predicted figures of the plan and of the best uniform precision."""
    found = {}
    for name, ((layers, hidden, heads), devices) in CLUSTERS.items():
        model = Transformer(layers, hidden, heads, sequence=2048, vocabulary=250880 if layers == 70 else 50272)
        cluster = [serving_row(shipped(), device, count) for device, count in devices.items()]
        plan = serve_plan(model, cluster, ServingLoad(512, 100, 32))
        found[name] = {
            "tokens_per_s": round(plan.tokens_per_s, 2), "omega": round(plan.omega, 1),
            "solve_s": round(plan.solve_s, 2), "uniform_bits": plan.uniform.bits,
            "uniform_tokens_per_s": round(plan.uniform.tokens_per_s, 2), "uniform_omega": round(plan.uniform.omega, 1),
        }  # fmt: skip
    return found


def main() -> None:
    """Run, compare, print one JSON line; exit 3 where the bar is missed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds = 2 * ROUNDS if "--full" in sys.argv else ROUNDS
    (results, tokens, (joined, sizes)), _ = RankPool().run(play, 2, rounds, timeout_s=280.0)
    torch.set_num_threads(1)
    alone, _ = serve_on_ranks(drawn_stage(MODEL, joined, 7), LOAD, sizes, prompts())
    errors = sorted(took / predicted - 1 for predicted, took in results)
    median = statistics.median(errors)
    met = abs(median) <= BAR and tokens == alone.tolist()
    answer = {
        "bench": "serving", "bits": list(joined.bits), "predicted_tokens_per_s": round(results[0][0], 1),
        "measured_tokens_per_s": round(results[0][1], 1), "error": round(median, 3),
        "error_range": [round(errors[0], 3), round(errors[-1], 3)], "tokens_equal": tokens == alone.tolist(),
        "clusters_simulated": clusters(), "claim": f"|error| <= {BAR}", "met": met,
    }  # fmt: skip
    print(json.dumps(answer))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
