"""Two writers of one step in a bucket, killed at random points between and inside uploads: what is visible meanwhile.

Claim: in each of 20 races exactly one commit is visible once a writer has come through, none before it is whole, it
never changes, and all that was ever listed is bit for bit what its attempt wrote. An S3 server (moto) in this process,
S3 semantics through its API only. Peer: the order of torch.distributed.checkpoint over a bucket (shards under the final
names, `.metadata` last), restated, in the same races: what is visible is often a mixture of both writers'.
`--full`: 100 races.
"""

import json
import multiprocessing
import os
import random
import sys

from _command import ROOT

sys.path.insert(0, str(ROOT))

from tests.object_race import points, race, race_stock
from tests.object_server import object_server

RACES, FULL_RACES, SEED = 20, 100, 0


def main() -> None:
    races = FULL_RACES if "--full" in sys.argv else RACES
    rng = random.Random(SEED)
    multiprocessing.set_forkserver_preload(["tests.object_race"])
    with object_server("bucket") as environment:
        os.environ.update(environment)
        found, stock = [], []
        for number in range(races):
            dies_before = points(rng)
            found.append(race(f"s3://bucket/ours-{number}", environment, dies_before, start="forkserver"))
            stock.append(race_stock(f"s3://bucket/stock-{number}", environment, dies_before, start="forkserver"))
    right = sum(outcome.is_right for outcome in found)
    met = right == races
    answer = {
        "bench": "commit_race",
        "seed": SEED,
        "races": races,
        "ratio": right / races,
        "ratio_range": [right / races] * 2,
        "baseline": "shards under final names, .metadata last (torch.distributed.checkpoint over a bucket), restated",
        "baseline_ratio": sum(stock) / races,
        "killed": sum(point < 1 << 30 for outcome in found for point in outcome.dies_before),
        "committed": sum(len(outcome.listed) for outcome in found),
        "looks": sum(len(outcome.seen) for outcome in found),
        "wrong": [outcome.dies_before for outcome in found if not outcome.is_right],
        "claim": "20 of 20 races: exactly one commit visible, never a partial one",
        "met": met,
    }
    print(json.dumps(answer))
    sys.exit(0 if met else 3)


if __name__ == "__main__":
    main()
