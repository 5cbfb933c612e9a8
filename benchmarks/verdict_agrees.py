"""Small scripts with a known truth: do `run`, `why`, `plan` and the page say the same of each, and is it kept?

Claim: in every case the four agree on cause, fix, consent and command; a remedy that `why` promises is in the plan, or
is kept out of it by the consent alone that `why` names, and `plan --allow` with that consent holds it. Peer: none; the
four are each other's.
Usage: `python benchmarks/verdict_agrees.py [NUMBER ...] [--scripts DIR]`; DIR or $HEADWAY_CASES holds the scripts.
"""

import html
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _command import ROOT, headway
from cases import asked


def last_object(text: str) -> dict[str, Any]:
    """Return the JSON object that stands behind what a script printed."""
    at = text.rfind('{"schema"')
    found: dict[str, Any] = json.loads(text[at:] if at >= 0 else text.splitlines()[-1])
    return found


def recorded(script: Path, ranks: int, out: Path) -> dict[str, Any]:
    """Record a script and return its `headway.run/1` object."""
    command = [sys.executable, "-m", "headway.cli", "run", "--json", "--out", str(out)]
    command += ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*command, "--", str(script)], cwd=out.parent, env=env, capture_output=True, text=True,
                           timeout=240)  # fmt: skip
    return last_object(ended.stdout)


def disagreements(script: Path, ranks: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Record one script; return its verdict and what of it differs from place to place."""
    out, page = folder / "run", folder / "page.html"
    run, why = recorded(script, ranks, out), headway("why", out)
    said = why["verdict"]
    wrong = [] if run["verdict"] == said else [f"run says {run['verdict']}, why {said}"]
    headway("report", out, "-o", page)
    shown = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", page.read_text())))
    parts = [said["sentence"].replace(" x ", " × "), said["fix"].rstrip("."), said["command"]]
    wrong += [f"the page lacks {part!r}" for part in parts if part and part not in shown]
    plan = headway("plan", out, "-o", folder / "plan.json", expect=(0, 3))
    if plan["verdict"] != said:
        wrong.append(f"plan says {plan['verdict']}, why {said}")
    if said["remedy"] and not said["allow"] and said["remedy"] not in plan["chosen"]:
        wrong.append(f"why promises {said['remedy']}, the plan holds {plan['chosen']}")
    if said["allow"]:
        granted = headway("plan", out, "-o", folder / "granted.json", "--allow", said["allow"])
        if said["remedy"] not in granted["chosen"]:
            wrong.append(f"with --allow {said['allow']} the plan holds {granted['chosen']}")
    for cause in why["causes"]:  # what a cause beside the headline promises is kept too
        if cause["remedy"] and not cause["allow"] and cause["remedy"] not in plan["chosen"]:
            wrong.append(f"{cause['cause']} promises {cause['remedy']}, the plan holds {plan['chosen']}")
    return said, wrong


def main() -> int:
    """Run the cases; one that fails is recorded and never stops the rest. Print one JSON line."""
    options = asked(__doc__)
    from world.cases import table

    rows: dict[str, Any] = {}
    for number, case in table().items():
        script = options.scripts / case.file
        if (options.cases and number not in options.cases) or not script.exists() or script.suffix != ".py":
            continue
        with tempfile.TemporaryDirectory(prefix="headway-verdict-") as folder:
            try:
                said, wrong = disagreements(script, case.ranks, Path(folder))
            except Exception as error:
                said, wrong = {}, [str(error)[-600:]]
        rows[case.file] = {key: said.get(key) for key in ("cause", "remedy", "allow")} | {"wrong": wrong}
        print(case.file, json.dumps(rows[case.file]), file=sys.stderr, flush=True)
    good = sum(not row["wrong"] for row in rows.values())
    print(json.dumps({
        "bench": "verdict_agrees", "cases": len(rows), "agree": good, "rows": rows, "peer": None,
        "claim": "run, why, plan and the page agree in every case", "met": good == len(rows) > 0,
    }))  # fmt: skip
    return 0 if good == len(rows) > 0 else 3


if __name__ == "__main__":
    sys.exit(main())
