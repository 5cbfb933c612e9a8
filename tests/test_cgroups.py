"""Which cores a job can have: quotas of nested groups, both versions of cgroups, inside and outside containers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.machine.host import affinity_cores, available_cores, cpu_quota, group_folders, sharing, throttled_s

V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def host(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """Return a made-up root folder with /proc/self and the files of a cgroup hierarchy."""
    content = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    for name, text in {**content, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@given(quotas=st.lists(st.one_of(st.none(), st.integers(10_000, 400_000)), min_size=1, max_size=5), new=st.booleans())
def test_of_nested_groups_the_tightest_quota_holds(quotas, new, tmp_path_factory):
    root, path, files = tmp_path_factory.mktemp("host"), "", {}
    for level, quota in enumerate(quotas):
        path = f"{path}/g{level}"
        if new:
            files[f"{path[1:]}/cpu.max"] = f"{'max' if quota is None else quota} 100000\n"
        else:
            files[f"cpu,cpuacct{path}/cpu.cfs_quota_us"] = f"{-1 if quota is None else quota}\n"
            files[f"cpu,cpuacct{path}/cpu.cfs_period_us"] = "100000\n"
    groups = f"0::{path}\n" if new else f"7:memory:/\n4:cpu,cpuacct:{path}\n"
    host(root, groups, (V2 if new else V1).format(root="/"), files)
    tightest = min((quota / 100_000 for quota in quotas if quota is not None), default=None)

    found = cpu_quota(root)
    assert (found.cores if found else None) == tightest
    assert available_cores(root) == min(affinity_cores(), tightest or affinity_cores())


@pytest.mark.parametrize(
    ("groups", "mounted"),
    [
        ("0::/\n", "/"),  # a cgroup namespace of its own
        ("0::/docker/4f2a\n", "/docker/4f2a"),  # none: the container's group is the mount's root
        ("0::/../../user.slice\n", "/"),  # seen from a namespace below
        ("0::/elsewhere\n", "/docker/4f2a"),  # a group that the mount does not show
    ],
)
def test_in_a_container_the_mount_point_is_its_group(groups, mounted, tmp_path):
    root = host(tmp_path, groups, V2.format(root=mounted), {"cpu.max": "150000 100000\n"})

    assert group_folders("cpu", root) == [root / "sys/fs/cgroup"]
    assert cpu_quota(root).cores == 1.5


def test_on_a_hybrid_host_both_versions_are_read(tmp_path):
    mounts = V1.format(root="/") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    files = {
        "cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "50000\n",
        "cpu,cpuacct/a/cpu.stat": "nr_periods 9\nnr_throttled 2\nthrottled_time 1500000000\n",
        "cpu,cpuacct/cpu.shares": "1024\n", "cpu,cpuacct/a/cpu.shares": "1024\n",
    }  # fmt: skip
    root = host(tmp_path, "1:cpu,cpuacct:/a\n0::/b\n", mounts, files)

    quota = cpu_quota(root)
    assert (quota.cores, quota.period_s) == (4.0, 0.05)
    assert throttled_s(root) == 1.5
    assert sharing(root) == "cgroups"


@pytest.mark.parametrize("text", ["", "max 100000", "0 100000", "100000", "x y", "100000 0"])
def test_what_states_no_quota_is_none(text, tmp_path):
    root = host(tmp_path, "0::/a b\n", V2.format(root="/"), {"a b/cpu.max": text})

    assert cpu_quota(root) is None
    assert throttled_s(root) is None
    assert sharing(root) == "threads"


@pytest.mark.parametrize(("flag", "expected"), [("1\n", "sessions"), ("0\n", "threads")])
def test_without_a_weight_of_its_own_a_session_may_be_the_group(flag, expected, tmp_path):
    host(tmp_path, "0::/\n", V2.format(root="/"), {})
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/sched_autogroup_enabled").write_text(flag)

    assert sharing(tmp_path) == expected
