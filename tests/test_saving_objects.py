"""Checkpoints that a job saves to a bucket and restores from it, and what the commands say of them."""

import json
import os
import signal

import pytest

pytest.importorskip("obstore", reason="object stores need the extra `s3`")
pytest.importorskip("moto.server", reason="the S3 server of these tests is moto: pip install 'moto[s3]' flask")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import headway
from headway.core.errors import HeadwayError, InputError
from headway.storage.checks.verification import verify_store
from headway.storage.manifest import COMMIT, MANIFEST, image_name
from headway.storage.object_commit import commit, committed
from headway.storage.stores import open_store
from headway.verbs.stored.ckpt import ls, prune, show, verify_
from tests import bucket_saves
from tests.bucket_saves import save
from tests.spawn import on_ranks

environment, root = bucket_saves.environment, bucket_saves.root


def test_the_verbs_read_a_bucket(root, capsys):
    for step in (1, 2, 3):
        store, draft = save(root, step, "a")
        commit(store, draft, world_size=2)
    save(root, 4, "late", ranks=1)
    path = root.replace("://", ":/")  # as a path leaves it

    assert ls(path, json=True) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["checkpoints"]] == [1, 2, 3]
    assert verify_(path, json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["path"]) == ("good", f"{root}/step-3.a")
    assert prune(path, keep="last=2", yes=True, json=True) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [1]
    assert show(f"{path}/step-2", json=True) == 0
    capsys.readouterr()
    image = bytearray(store.read(f"step-3.a/{image_name(1)}"))
    image[5000] ^= 1
    store.put(f"step-3.a/{image_name(1)}", [image])
    assert verify_(f"{path}/step-3", json=True) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["damaged"][0]["file"]) == ("lost", image_name(1))
    store.remove(f"step-3.a/rank-0/{MANIFEST}")
    store.remove(f"step-2/{COMMIT}")
    assert ls(path) == 0
    assert verify_(f"{root}/nothing", json=True) == 2


def _on_rank(root, environment, steps):
    """Restore, train data-parallel, save every step; return the restored step, the weights before, those after."""
    os.environ.update(environment)
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 40)
    parallel = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    with headway.Checkpointer(root, model=model, opt=optimizer) as checkpointer:
        report = checkpointer.restore()
        before = model.weight.tolist()
        for step in range(report.step or 0, steps):
            optimizer.zero_grad()
            parallel(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
            checkpointer.save(step + 1, block="durable")
    return report.step, before, model.weight.tolist()


@pytest.mark.slow
def test_ranks_meet_in_the_bucket_and_another_number_of_them_goes_on(root, environment):
    saved = on_ranks(_on_rank, 2, root, environment, 2)
    parts = committed(open_store(root))[-1].record.files

    restored = on_ranks(_on_rank, 1, root, environment, 2)

    assert [step for step, _, _ in saved] == [None, None]
    assert saved[0][2] == saved[1][2]
    assert {entry.rank for entry in parts if entry.kind == "image"} == {0, 1}
    assert restored[0][:2] == (2, saved[0][2])


def test_a_checkpointer_saves_to_a_bucket_and_restores_from_it(root, tmp_path):
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    with headway.Checkpointer(root, model=model, opt=optimizer, keep=headway.checkpoint.Keep(last=2)) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, block="durable").result(60).path.startswith(f"{root}/step-{step}.")
    written = model.weight.detach().clone()
    for other in (3, "latest"):
        with torch.no_grad():
            model.weight.zero_()
        with headway.Checkpointer(root, model=model, opt=optimizer) as checkpointer:
            report = checkpointer.restore(other)
        assert (report.step, report.source) == (3, "remote")
        assert report.hashed_bytes >= report.read_bytes > 0
        assert torch.equal(model.weight, written)

    newest = committed(open_store(root))
    assert [one.step for one in newest] == [2, 3]
    inner = open_store(newest[-1].path)
    for name in inner.list():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(inner.read(name)))
    loaded = {"model": {"weight": torch.zeros(30, 40)}}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["model"]["weight"], written), "stock DCP reads what came from the bucket"


def test_a_checkpointer_says_what_is_wrong_with_its_bucket(root):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="redundancy"):
        headway.Checkpointer(root, model=model, redundancy="rs")
    checkpointer = headway.Checkpointer("s3://nowhere/run", model=model)
    ticket = checkpointer.save(1)
    with pytest.raises(HeadwayError, match="no such bucket"):
        ticket.result(60)
    checkpointer.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the checkpoint agent:RuntimeWarning")
def test_a_save_whose_agent_is_killed_during_the_upload_is_committed_by_another_agent(root, monkeypatch):
    monkeypatch.setenv("HEADWAY_CKPT_RATE_MB_S", "20")
    model = torch.nn.Linear(1500, 2000)  # 12 MB: two parts, so over half a second of upload
    with headway.Checkpointer(root, model=model) as checkpointer:
        checkpointer.save(1, block="durable")
        with torch.no_grad():
            model.weight.fill_(2.0)
        ticket = checkpointer.save(2)
        os.kill(checkpointer._saver.link.pid, signal.SIGKILL)
        assert [one.step for one in committed(open_store(root))] == [1], "the save was under way"
        ticket.result(60)
        model.weight.detach().zero_()
        assert checkpointer.restore(2).step == 2

    assert torch.equal(model.weight, torch.full_like(model.weight, 2.0))
    assert [verify_store(open_store(one.path)).status for one in committed(open_store(root))] == ["good", "good"]
