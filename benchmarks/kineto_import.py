"""Import of a 109 k-event profiler trace against HolisticTraceAnalysis.

Claim: `Trace.open` turns the Kineto file into all columns (correlation, steps, depth, collectives) with at least 5x
less CPU time than HolisticTraceAnalysis 0.5.0 with its fastest parser needs for its dataframe, at no more than 0.8x
its peak memory. Each side runs in a fresh process, importing its modules outside the measurement, rounds interleaved;
in every round the peer's faster parser counts, and its leaner one. All must find the same kernels, the same summed
kernel time to 1 us and the same matched launches, or the run fails.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers.env import python_of

ROUNDS = 5
TRACE = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "kineto" / "trace_diff_control.json.gz"
PARSERS = ("json", "ijson_batch_and_compress")
"""The peer's two fastest parsers of four."""

OURS = """
import json, resource, sys, time
import headway.trace.profiler.kineto
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
began = time.process_time()
trace = Trace.open(sys.argv[1])
cpu_s = time.process_time() - began
peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import numpy as np
on_stream = np.isin(trace.events["lane"], [i for i, lane in enumerate(trace.lanes) if lane.startswith("stream ")])
named = np.array([not name.startswith(("Memcpy", "Memset")) for name in trace.names])
kernel = on_stream & named[trace.events["name"]]
launched = np.isin(trace.events["corr"][on_stream], trace.events["corr"][~on_stream])
print(json.dumps({"cpu_s": cpu_s, "peak_mb": peak_kb / 1024, "events": len(trace), "kernels": int(kernel.sum()),
    "kernel_us": int(trace.events["duration_ns"][kernel].sum()) // 1000, "launched": int(launched.sum())}))
"""

THEIRS = """
import json, logging, resource, sys, time
logging.disable(logging.CRITICAL)
from hta.common.trace import parse_trace_file
from hta.common.trace_parser import set_default_trace_parsing_backend
from hta.configs.parser_config import ParserBackend
set_default_trace_parsing_backend(ParserBackend(sys.argv[2]))
began = time.process_time()
meta, frame, symbols = parse_trace_file(sys.argv[1])
cpu_s = time.process_time() - began
peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codes = symbols.get_sym_id_map()
kernel = frame["cat"] == codes["kernel"]
device = frame["stream"] >= 0
print(json.dumps({"cpu_s": cpu_s, "peak_mb": peak_kb / 1024, "events": len(frame), "kernels": int(kernel.sum()),
    "kernel_us": int(frame["dur"][kernel].sum()), "launched": int((frame["index_correlation"][device] > 0).sum())}))
"""


def measure(python: str | Path, code: str, *arguments: str) -> dict[str, Any]:
    """Run one side in a fresh process and return what it printed."""
    answer = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    if answer.returncode:
        raise RuntimeError(f"the process failed:\n{answer.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Run the rounds and print the result."""
    if not TRACE.exists():
        print(json.dumps({"bench": "kineto_import", "skipped": f"{TRACE} is not beside this checkout"}))
        return
    peer = python_of("hta")
    rounds = [
        (measure(sys.executable, OURS, str(TRACE)), [measure(peer, THEIRS, str(TRACE), parser) for parser in PARSERS])
        for _ in range(ROUNDS)
    ]
    sides = [side for ours, theirs in rounds for side in (ours, *theirs)]
    answers = {tuple(side[key] for key in ("kernels", "kernel_us", "launched")) for side in sides}
    assert len(answers) == 1, f"the answers differ: {answers}"
    best = {key: [min(side[key] for side in theirs) for _, theirs in rounds] for key in ("cpu_s", "peak_mb")}
    ratios = [their / ours["cpu_s"] for (ours, _), their in zip(rounds, best["cpu_s"], strict=True)]
    memory = [ours["peak_mb"] / their for (ours, _), their in zip(rounds, best["peak_mb"], strict=True)]
    result = {
        "bench": "kineto_import",
        "events": rounds[0][0]["events"],
        "baseline": "HolisticTraceAnalysis 0.5.0, the better of " + " and ".join(PARSERS),
        "ours_s": statistics.median(ours["cpu_s"] for ours, _ in rounds),
        "baseline_s": statistics.median(best["cpu_s"]),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "ours_mb": statistics.median(ours["peak_mb"] for ours, _ in rounds),
        "baseline_mb": statistics.median(best["peak_mb"]),
        "memory_ratio": statistics.median(memory),
        "memory_ratio_range": [min(memory), max(memory)],
        "claim": "CPU ratio >= 5, memory ratio <= 0.8",
    }
    print(json.dumps(result))
    sys.exit(0 if result["ratio"] >= 5 and result["memory_ratio"] <= 0.8 else 3)


if __name__ == "__main__":
    main()
