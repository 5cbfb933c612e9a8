"""A job that runs the same part twice, cold and warm: what comes before it waits until a warm process may be there."""

JOB = """
{before}
import os, pathlib, signal, sys, time
import torch
{after}

def siblings():
    parent = os.getppid()
    children = pathlib.Path(f"/proc/{{parent}}/task/{{parent}}/children").read_text().split()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return children if len(children) > ranks else []

def cpu(pids):
    return [pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]

def train():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()

def wait_for_warm(most_s):
    until, quiet = time.monotonic() + most_s, 0
    while time.monotonic() < until and quiet < 4:  # its imports are over once it uses no processor time any more
        before = cpu(siblings())
        time.sleep(0.25)
        quiet = quiet + 1 if before and cpu(siblings()) == before else 0

if __name__ == "__main__":
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
{main}
    train()
    if attempt < {last}:
        wait_for_warm({wait_s} if attempt == 0 else 0)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def job(main: str, *, before: str = "", after: str = "", wait_s: float = 30.0, last: int = 1) -> str:
    """Return a script that runs `main` in each attempt, and is killed at the end of all before attempt `last`."""
    indented = "\n".join("    " + line for line in main.strip().splitlines())
    return JOB.format(before=before, after=after, main=indented, wait_s=wait_s, last=last)
