"""Doctor: every finding has a value, a limit and a fix; a made-up bad host is found out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.machine.host import available_cores
from headway.runtime.host import doctor
from headway.runtime.host.doctor import CHECKS, Finding, check


@pytest.mark.parametrize("name", CHECKS)
def test_a_finding_names_what_it_found_and_what_to_do(name):
    finding = CHECKS[name](Path("/"), {})

    assert finding.name
    assert finding.ok or finding.fix
    assert finding.name in str(finding)
    assert (finding.fix in str(finding)) is (not finding.ok) or not finding.fix


@given(quota=st.integers(1_000, 10_000_000), period=st.sampled_from([50_000, 100_000]))
def test_a_quota_never_gives_more_cores_than_the_affinity(quota, period, tmp_path_factory):
    root = made(tmp_path_factory.mktemp("host"), {"sys/fs/cgroup/cpu.max": f"{quota} {period}\n"})

    assert available_cores(root) == min(available_cores(Path("/nonexistent")), quota / period)


def made(root: Path, files: dict[str, str]) -> Path:
    """Return a made-up root folder."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_a_host_without_memory_shared_memory_and_ptrace_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    root = made(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 100000 kB\n",
            "sys/fs/cgroup/memory.max": "1000000000\n",
            "sys/fs/cgroup/memory.current": "990000000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "proc/sys/kernel/yama/ptrace_scope": "3\n",
        },
    )
    bad = {finding.name for finding in check(root, {"OMP_NUM_THREADS": "64"}) if not finding.ok}

    assert {
        "available memory", "memory left in the cgroup", "ptrace scope", "shared memory (/dev/shm)",
        "OMP_NUM_THREADS x ranks", "run delay (/proc/self/schedstat)",
    } <= bad  # fmt: skip


def test_a_cgroup_of_the_first_kind_is_read_too(tmp_path):
    root = made(
        tmp_path,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert doctor.cgroup_memory(root) == (5_000_000_000, 1)
    assert available_cores(root) == 0.5


def test_a_finding_is_one_line():
    assert str(Finding("x", 1, None, True)) == "ok   x: 1"
