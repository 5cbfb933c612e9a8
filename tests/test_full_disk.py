"""A disk that fills up, or a run folder that is removed, costs the recording and never the job."""

import subprocess

import pytest

from benchmarks.full_disk import SCRIPT, can_mount, command, faults_of


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")
@pytest.mark.parametrize(("way", "after_s"), [("fill", 1.5), ("remove", 3.0)])
def test_the_job_goes_on_to_its_own_end(way, after_s, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = subprocess.run(command(script), capture_output=True, text=True, check=False).stdout

    assert plain.count("\n") == 96
    assert faults_of(way, after_s, script, plain)[0] == []
