"""`sbatch`, `squeue`, `scancel` and `kubectl` as a program: jobs that run until they are told to end, and save at once.

Its first argument is the folder of its state; the others are what the service typed. Answers have the shape that Slurm
23.11 and Kubernetes 1.30 print, with the fields that a real one has around those that are read.
"""

import json
import re
import sys
from pathlib import Path

STATE = "jobs.json"

SQUEUE_JOB = {
    "account": "users", "array_job_id": {"set": True, "infinite": False, "number": 0}, "cluster": "site",
    "comment": "", "cpus": {"set": True, "infinite": False, "number": 1}, "current_working_directory": "/home/u",
    "exit_code": {"status": ["SUCCESS"], "return_code": {"set": True, "infinite": False, "number": 0}},
    "partition": "gpu", "priority": {"set": True, "infinite": False, "number": 4294901757},
    "tres_req_str": "gres/gpu=1",
}  # fmt: skip
SQUEUE = {
    "meta": {"plugin": {"type": "openapi/slurmctld"}, "slurm": {"release": "23.11.4"}},
    "errors": [],
    "warnings": [],
}


def read(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / STATE
    return json.loads(path.read_text()) if path.exists() else {}


def end(folder: Path, name: str, code: int) -> None:
    """Let a job end; its script would have written the exit code."""
    jobs = read(folder)
    job = jobs.pop(name)
    (Path(job["script"]).parent / "exit").write_text(f"{code}\n")
    (folder / STATE).write_text(json.dumps(jobs))


def begin(folder: Path, name: str, script: str) -> str:
    jobs = read(folder)
    assert name not in jobs, f"{name} is started twice"
    number = 4000 + len(list(folder.glob("*.log")))
    (folder / f"{number}.log").write_text(Path(script).read_text())
    jobs[name] = {"script": script, "number": str(number)}
    (Path(script).parent / "saves" / "rank-0").touch()
    (folder / STATE).write_text(json.dumps(jobs))
    return str(number)


def main(folder: Path, program: str, arguments: list[str], text: str) -> None:
    jobs = read(folder)
    if program == "sbatch":
        name = re.search("--job-name=(.*)", Path(arguments[-1]).read_text())
        print(f"{begin(folder, name[1], arguments[-1])};site")
    elif program == "squeue" and "--json" in arguments:
        rows = [
            {**SQUEUE_JOB, "job_id": int(job["number"]), "name": name, "job_state": ["RUNNING"]}
            for name, job in jobs.items()
            if name in arguments[-1].split(",")
        ]
        print(json.dumps({**SQUEUE, "jobs": rows}))
    elif program == "scancel":
        name = next(name for name, job in jobs.items() if job["number"] == arguments[-1])
        end(folder, name, 143 if "--signal=TERM" in arguments else 137)
    elif program == "kubectl" and arguments[0] == "apply":
        manifest = json.loads(text)
        with (folder / "applied").open("a") as applied:
            applied.write(json.dumps(manifest) + "\n")
        if manifest["kind"] == "Job":
            container = manifest["spec"]["template"]["spec"]["containers"][0]
            begin(folder, manifest["metadata"]["name"], container["command"][1])
    elif program == "kubectl" and arguments[0] == "get":
        rows = [
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "uid": "u"},
             "spec": {"suspend": False}, "status": {"active": 1, "ready": 1, "startTime": "2026-11-27T12:00:00Z"}}
            for name in jobs
        ]  # fmt: skip
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": rows, "metadata": {"resourceVersion": ""}}))
    elif program == "kubectl":
        end(folder, arguments[2], 137 if "--force" in arguments else 143)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        sys.argv[3:],
        "" if sys.stdin is None or sys.argv[3:4] != ["apply"] else sys.stdin.read(),
    )
