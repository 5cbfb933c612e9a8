"""A slow link for benchmarks: commands run in a network namespace of their own, whose loopback is a token bucket.

`throttled(command, rate_mbit)` gives the command line; `python benchmarks/_link.py --rate-mbit 400 -- COMMAND` is what
runs inside `unshare`. Everything that the command sends to 127.0.0.1 shares that rate: two ranks that exchange n bytes
each way need 2 n bytes of it. `allowed()` says whether this host lets a user do that.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

IFF_UP, SIOCGIFFLAGS = 1, 0x8913
"""Bit of an interface's flags: it is up; the call that reads them (linux/sockios.h)."""

BURST_S, LEAST_BURST_BYTES = 0.65e-3, 16_384
"""What the bucket may send at once, in seconds at its rate: after a pause that much goes for nothing, so it has to be
little beside what a collective takes. No less than a segment."""

MTU_BYTES = 9_000
"""Largest segment; loopback's own ones (64 KiB) would not pass a small bucket."""


def throttled(command: Sequence[object], rate_mbit: float) -> list[str]:
    """Return the command line that runs `command` behind a link of `rate_mbit` (10**6 bit/s)."""
    inside = [sys.executable, str(Path(__file__).resolve()), "--rate-mbit", f"{rate_mbit:g}", "--"]
    return ["unshare", "-rn", *inside, *(str(part) for part in command)]


def allowed() -> bool:
    """Say whether a namespace with a token bucket can be made here."""
    if not all(shutil.which(tool) for tool in ("unshare", "tc", "ip")):
        return False
    return subprocess.run(throttled(["true"], 1000), capture_output=True).returncode == 0


def is_up(interface: str) -> bool:
    """Say whether an interface of this network namespace is up (/sys may still be that of another one)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH22x", interface.encode(), 0))
    return bool(struct.unpack("16sH22x", answer)[1] & IFF_UP)


def main() -> None:
    """Bring loopback up behind its token bucket and become the command; only where loopback is down, as in a new one.

    Anywhere else this would slow down the host's own loopback, for everybody and until somebody takes it away.
    """
    rate, cut = sys.argv[sys.argv.index("--rate-mbit") + 1], sys.argv.index("--")
    if is_up("lo"):
        raise SystemExit("this is not a new network namespace: start it as throttled() does, with unshare -rn")
    subprocess.run(["ip", "link", "set", "lo", "up", "mtu", str(MTU_BYTES)], check=True)
    burst = max(LEAST_BURST_BYTES, round(float(rate) * 1e6 / 8 * BURST_S))
    shape = ["tbf", "rate", f"{rate}mbit", "burst", str(burst), "latency", "4s"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *shape], check=True)
    os.execvp(sys.argv[cut + 1], sys.argv[cut + 1 :])


if __name__ == "__main__":
    main()
