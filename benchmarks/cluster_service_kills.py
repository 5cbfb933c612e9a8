"""Twelve seeded SIGKILLs of a service's server: do its jobs end, none twice at once, and nothing lost?

Claim: six scripts that save when they are asked share three slots by rounds of 4 s, under `headway cluster serve`,
which is killed at twelve drawn moments and started again each time. All end, no lock file of a job is ever taken twice,
and each step of each job is done once: what was saved is where it went on. Three kills by default; `--full` all twelve.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.core.rng import stream
from tests.made.service_jobs import through_kills

JOBS, SLOTS, STEP_S, ROUND_S = 6, 3, 0.1, 4.0


def main() -> int:
    """Print one JSON line; 3 where the claim is missed."""
    num_kills = 12 if "--full" in sys.argv else 3
    kills_s = stream(59, "cluster_service_kills").uniform(0.2, 6.0, num_kills).tolist()
    with tempfile.TemporaryDirectory() as folder:
        survived = through_kills(
            Path(folder), num_jobs=JOBS, slots=SLOTS, steps=50 + 12 * num_kills, step_s=STEP_S, kills_s=kills_s,
            round_s=ROUND_S,
        )  # fmt: skip
    facts = asdict(survived)
    held = survived.states == ["finished"] * JOBS and not (survived.twice or survived.repeated or survived.missing)
    result = {
        "bench": "cluster_service_kills", "kills": num_kills, "jobs": JOBS, "slots": SLOTS,
        "finished": facts.pop("states").count("finished"), **facts, "seconds": round(survived.seconds, 1),
        "claim": "all finished, none twice at once, 0 steps repeated, 0 missing",
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if held else 3


if __name__ == "__main__":
    sys.exit(main())
