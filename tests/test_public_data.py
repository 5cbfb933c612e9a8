"""Public data beside the checkout is what its description says; without it a check is skipped."""

import numpy as np
import pytest

from benchmarks.data import public as public_data
from benchmarks.data.public import cluster_table, latencies
from headway.core.errors import InputError
from tests.paths import shared


def test_throughputs_and_jobs_of_clusters_have_their_published_counts():
    shared("cluster")
    rates, jobs = cluster_table("gavel/throughputs.parquet"), cluster_table("gavel/jobs_seed0_multi.parquet")
    alone = [other is None for other in rates["other_model"]]

    assert len(alone) == 10_830
    assert len(set(zip(rates["model"], rates["scale"].tolist(), strict=True))) == 83
    assert (len(jobs["model"]), jobs["arrival_unit"][0]) == (7000, 0.0)
    assert (np.diff(jobs["arrival_unit"]) > 0).all()


def test_prices_that_were_not_offered_are_absent():
    shared("cluster")
    prices, spot = cluster_table("market/azure_spot.csv"), cluster_table("market/aws_spot.parquet")

    assert len(spot["usd_per_h"]) == 11_527
    assert np.isnan(prices["usd_per_h"]).any()
    assert (prices["usd_per_h"][~np.isnan(prices["usd_per_h"])] > 0).all()


def test_latencies_are_of_every_architecture_on_every_setting():
    shared("latency")
    found = latencies()

    assert found.latency_ms.shape == (len(found.settings), len(found.ops)) == (22, 5000)
    assert found.ops.max() < len(found.op_names)
    assert (found.latency_ms > 0).all()


def test_what_is_not_there_or_no_table_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(public_data, "FOLDER", tmp_path)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "README.md").touch()

    with pytest.raises(InputError, match=r"public data latency/fbnet.npz is not in .*leave this check out"):
        latencies()
    with pytest.raises(InputError, match=r"README.md is no table; name one of .parquet or .csv"):
        cluster_table("README.md")
