"""Size and cost of the HTML report of 8 ranks x 20,000 steps, in a headless Chromium.

Claim: at most 1 MB, no request beyond the file itself, no console message, and
at most 1 s of CPU (renderer and GPU process together) from opening the file
until everything is drawn. Baseline: the same arrays as plain JSON text in an
otherwise empty page, parsed by the same browser; the report must keep the same
largest step time. Rounds alternate, so that both meet the same noise.

Run: python -m benchmarks.report_size    (needs playwright and a Chromium on PATH)
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from headway.core.errors import BarMissedError, InputError
from headway.report.page.html import ReportData, page, write_report
from tests.report_data import decode, demo_report

RANKS, STEPS, ROUNDS = 8, 20_000, 5
MOST_BYTES, MOST_CPU_S = 1_000_000, 1.0


def plain_page(data: ReportData) -> str:
    """Return the baseline: every value as JSON text, parsed and scanned for its largest step time."""
    assert data.step_s is not None
    arrays = {"steps": data.step_s.tolist(), "buckets": {name: v.tolist() for name, v in data.bucket_s.items()}}
    script = (
        "const d = JSON.parse(document.getElementById('d').textContent);"
        "const most = d.steps.map((row) => row.reduce((a, b) => Math.max(a, b)));"
        "document.documentElement.dataset.most = Math.max(...most);"
        "document.documentElement.dataset.drawn = 'yes';"
    )
    return (
        f'<!doctype html><script type="application/json" id="d">{json.dumps(arrays)}</script><script>{script}</script>'
    )


def cpu_s(devtools: Any) -> dict[int, float]:
    """Return process id -> CPU seconds of the browser's renderer and GPU processes so far."""
    found = devtools.send("SystemInfo.getProcessInfo")["processInfo"]
    return {process["id"]: process["cpuTime"] for process in found if process["type"] in ("renderer", "GPU")}


def opened(browser: Any, devtools: Any, path: Path) -> tuple[float, list[str], list[str], str]:
    """Open a file in a fresh page; return CPU seconds until drawn, requests, console messages, the largest value."""
    sheet = browser.new_page(viewport={"width": 1280, "height": 900})
    requests: list[str] = []
    messages: list[str] = []
    sheet.on("request", lambda request: requests.append(request.url))
    sheet.on("console", lambda message: messages.append(message.text))
    sheet.on("pageerror", lambda error: messages.append(str(error)))
    sheet.goto("about:blank")
    before = cpu_s(devtools)
    requests.clear()
    sheet.goto(path.as_uri())
    sheet.wait_for_selector("html[data-drawn=yes]", state="attached")
    after = cpu_s(devtools)
    spent = sum(value - before.get(process, 0.0) for process, value in after.items())
    largest = sheet.evaluate("document.documentElement.dataset.most ?? ''")
    sheet.close()
    return spent, requests, messages, largest


def main() -> None:
    """Print the result as one JSON line; raise `BarMissedError` when the claim does not hold."""
    chromium = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if chromium is None:
        raise InputError(
            "no Chromium on PATH; this benchmark opens the report in one. Debian: apt-get install chromium."
        )
    from playwright.sync_api import sync_playwright

    data = demo_report(RANKS, STEPS)
    payload = json.loads(page(data).split('id="data">', 1)[1].split("</script>", 1)[0])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as engine:
        ours, plain = Path(folder, "report.html"), Path(folder, "plain.html")
        size = write_report(data, ours)
        plain.write_text(plain_page(data))
        browser = engine.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        devtools = browser.new_browser_cdp_session()
        opened(browser, devtools, plain)  # the first page also pays for the browser's own start
        rounds = [(opened(browser, devtools, ours), opened(browser, devtools, plain)) for _ in range(ROUNDS)]
        version = browser.version
        browser.close()
    mine = [ours_run[0] for ours_run, _ in rounds]
    theirs = [plain_run[0] for _, plain_run in rounds]
    assert data.step_s is not None
    kept = bool(abs(decode(payload["steps"]["high"]).max() - float(rounds[0][1][3])) <= 1e-4)
    result = {
        "bench": "report_size", "ranks": RANKS, "steps": STEPS, "browser": f"chromium {version}",
        "bytes": size, "plain_json_bytes": len(plain_page(data)), "largest_step_kept": kept,
        "requests": max(len(ours_run[1]) - 1 for ours_run, _ in rounds),
        "console_messages": sum(len(ours_run[2]) for ours_run, _ in rounds),
        "cpu_s": round(statistics.median(mine), 3), "cpu_s_range": [round(min(mine), 3), round(max(mine), 3)],
        "plain_cpu_s": round(statistics.median(theirs), 3),
        "claim": "<= 1 MB, 0 requests, 0 console messages, <= 1 s of CPU to drawn",
    }  # fmt: skip
    print(json.dumps(result))
    bars = size <= MOST_BYTES and not result["requests"] and not result["console_messages"] and kept
    if not bars or statistics.median(mine) > MOST_CPU_S:
        raise BarMissedError(f"the report missed its bar: {result['claim']}. Compare the printed figures.")


if __name__ == "__main__":
    main()
