"""`headway tune` on scripts as people write them: they end as they would have, or with 3 and their own digits."""

import pytest

from benchmarks.tune_jobs import trial


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [("group", 3), ("remade", 3), ("remade_late", 0), ("workers", 0), ("own_error", 0), ("fails_inside", 3)],
)
def test_a_script_is_tuned_or_ends_with_three_and_its_own_digits(tmp_path, name, code):
    assert trial(name, tmp_path) == (code, "")
