"""Root causes of straggling on made-up jobs with known losses.

Claim: over 40 seeds of made-up Megatron-like jobs (1F1B, interleaved, DP overlap, lognormal noise; no fault, one, or
two in a third of them; slowdown 1.1 to 2) the causes found match the injected ones with F1 >= 0.9, and the seconds
lost to each found cause are within 10 % of the truth. The baseline, on the same reports, are the published rules:
M_W > 0.5 a worker, M_S > 0.5 the last stage, forward-backward correlation >= 0.9 the sequence lengths, and
communication when it costs more than half of the slowdown; they know no collections and no seconds.
"""

import json
import sys
import time

from benchmarks._synthetic import generate, scenario
from headway.ledger.operations.straggler import StragglerReport, analyse, root_causes
from headway.ledger.operations.whatif_groups import COMMUNICATION, merged

SEEDS, CLAIM_F1, CLAIM_ERROR = 40, 0.9, 0.1
TALKS = {merged(name) for name in COMMUNICATION}


def published_rules(report: StragglerReport) -> set[str]:
    """Return the causes that the rules of the study name."""
    loss = report.slowdown - 1
    verdicts = {
        "straggler.worker": report.M_W > 0.5,
        "straggler.last_stage": report.M_S > 0.5,
        "straggler.sequence": report.sequence.r >= 0.9,
        "comm.exposed": max(v for name, v in report.by["optype"].items() if name in TALKS) - 1 > loss / 2,
    }
    return {name for name, holds in verdicts.items() if holds and report.slowdown >= 1.03}


def f1(hits: int, found: int, wanted: int) -> float:
    """Return the harmonic mean of precision and recall."""
    return 2 * hits / (found + wanted) if found + wanted else 1.0


def main() -> None:
    """Run all seeds and print one JSON line; exit 3 when the claim is missed."""
    wanted, errors = 0, []
    counts = {"ours": [0, 0], "baseline": [0, 0]}  # [hits, found]
    slowdowns, cpu_s = [], 0.0
    for seed in range(SEEDS):
        job, faults = scenario(seed)
        made = generate(job, seed=seed, faults=faults)
        began = time.process_time()
        report = analyse(made.trace)
        causes = {cause.cause: cause.lost_device_s for cause in root_causes(report)}
        cpu_s += time.process_time() - began
        truth = made.lost_device_s
        wanted += len(truth)
        slowdowns.append(made.slowdown)
        for side, names in (("ours", set(causes)), ("baseline", published_rules(report))):
            counts[side][0] += len(names & set(truth))
            counts[side][1] += len(names)
        errors += [abs(causes[name] / lost - 1) for name, lost in truth.items() if name in causes]
    ours, baseline = (f1(*counts[side], wanted) for side in ("ours", "baseline"))
    met = ours >= CLAIM_F1 and max(errors) <= CLAIM_ERROR
    result = {
        "bench": "straggler_f1", "seeds": SEEDS, "causes": wanted,
        "slowdown_range": [round(min(slowdowns), 3), round(max(slowdowns), 3)],
        "baseline": "published rules", "ours_f1": ours, "baseline_f1": baseline,
        "worst_error_of_lost_seconds": max(errors), "cpu_s_per_trace": cpu_s / SEEDS,
        "claim": f"F1 >= {CLAIM_F1}, error <= {CLAIM_ERROR}", "met": met,
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
