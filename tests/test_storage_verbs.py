"""The verbs of redundancy: one JSON object each, readable screens, clear refusals."""

import json
from pathlib import Path

import pytest

from headway.core.errors import InputError, UnknownNameError
from headway.verbs.stored.ckpt_convert import restripe
from headway.verbs.stored.storage import fit, fleet, table

HEAD = "model,size,n_unique,drive_days,failed\n"


@pytest.fixture
def logs(tmp_path):
    """Three dates of two models."""
    rows = [("1000000,60", "9000,0"), ("1900000,85", "18000,1"), ("2800000,110", "27000,1")]
    for number, (large, small) in enumerate(rows):
        (tmp_path / f"{number}.csv").write_text(f"{HEAD}big,12 TB,10000,{large}\nsmall,4 TB,100,{small}\n")
    return [tmp_path / f"{number}.csv" for number in range(3)]


def told(capsys):
    return json.loads(capsys.readouterr().out)


def test_the_table_lists_every_scheme_with_its_figures(capsys):
    assert table(json=True) == 0
    answer = told(capsys)
    rows = {row["scheme"]: row for row in answer["schemes"]}

    assert answer["schema"] == "headway.storage.table/1"
    assert rows["30-of-33"]["tolerated_afr"] == pytest.approx(0.032)
    assert rows["6-of-9"]["mttdl_years"] / rows["7-of-10"]["mttdl_years"] == pytest.approx(5 / 3)


def test_a_fit_names_a_scheme_for_each_model(capsys, logs):
    assert fit(*logs, json=True) == 0
    answer = told(capsys)

    assert answer["schema"] == "headway.storage.fit/1"
    assert [(row["model"], row["scheme"]) for row in answer["models"]] == [("big", "30-of-33"), ("small", "6-of-9")]
    assert answer["windows_days"] == [90.0, 90.0]
    assert answer["saving"] > 0.2


def test_a_log_of_single_drives_is_lived_through(capsys, tmp_path):
    path = tmp_path / "drives.csv"
    drives = "a,4e12,2020-01-01,2020-03-01,\n" * 50
    path.write_text(f"model,capacity_bytes,min_date,max_date,first_fail\n{drives}")
    assert fit(path, json=True) == 0
    answer = told(capsys)

    assert answer["days"] == 61
    assert answer["lived"][0]["disk_days"] == 50 * 61


def test_a_fleet_is_simulated_beside_other_policies(capsys, tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text('[[dgroup]]\nname = "a"\narrivals = [[0, 9000]]\nafr = [[0, 0.06], [40, 0.01]]\n')
    assert fleet(clusters=path, days=200, json=True) == 0
    answer = told(capsys)

    assert answer["schema"] == "headway.storage.disks.fleet/1"
    assert set(answer["policies"]) == {"pacemaker", "instant", "reactive"}
    assert len(answer["io_frac"]) == 200
    assert max(answer["io_frac"]) == pytest.approx(0.05)
    assert answer["policies"]["pacemaker"]["under_protected_disk_days"] == 0
    assert answer["transitions"][0]["target"] == "30-of-33"


def test_screens_show_the_verdict(capsys, logs):
    table()
    fit(*logs)
    fleet(synthetic="step", days=40, policy=("static",))
    text = capsys.readouterr().out

    assert "tolerated AFR" in text
    assert "of the space is saved" in text
    assert "Simulated: 160,000 disks" in " ".join(text.split())


def test_what_cannot_be_meant_is_refused(tmp_path):
    with pytest.raises(InputError, match="no log was given"):
        fit()
    with pytest.raises(InputError, match="either --clusters"):
        fleet()
    with pytest.raises(UnknownNameError, match="made-up fleet 'mixd'"):
        fleet(synthetic="mixd")
    with pytest.raises(UnknownNameError, match="unknown policy"):
        fit(tmp_path / "x.csv", policy="none")
    for afr in (-1, 0, 2, float("nan")):  # 2: per cent, perhaps
        with pytest.raises(InputError, match=r"--afr is .*; it must be a fraction above 0, at most 1"):
            table(afr=afr)
    with pytest.raises(InputError, match=r"--mttr-hours is 0; a repair takes more than 0 hours"):
        table(mttr_hours=0)
    for cap in (-1, float("nan")):
        with pytest.raises(InputError, match=r"--cap-mb-s is .*; use a rate above 0"):
            restripe(tmp_path, to="+1", cap_mb_s=cap)
    with pytest.raises(InputError, match="s3://bucket/run1 is a bucket; parity is for folders"):
        restripe(Path("s3://bucket/run1"), to="+1")
