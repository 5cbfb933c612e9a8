"""Object stores: the same bytes as from files, against a real S3 server; what goes wrong names the object."""

import http.client
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from headway.core.errors import FormatError, InputError
from headway.data.bytes import object_source
from headway.data.bytes.source import FolderSource, TarSource
from tests.spawn import run_threads

obstore = pytest.importorskip("obstore", reason="object stores need the extra `s3`")
moto_server = pytest.importorskip(
    "moto.server", reason="the S3 server of these tests is moto: pip install 'moto[s3]' flask"
)
ObjectSource, ObjectTarSource = object_source.ObjectSource, object_source.ObjectTarSource


@pytest.fixture(scope="module")
def options():
    """A real S3 server in this process: the options with which it is reached."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "endpoint": f"http://{host}:{port}", "access_key_id": "one", "secret_access_key": "other",
        "region": "us-east-1", "client_options": {"allow_http": True}, "retry_config": {"max_retries": 1},
    }  # fmt: skip
    server.stop()


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Each test begins as a process that has used no object store; obstore itself has been used by then."""
    monkeypatch.setattr(object_source, "_user", [os.getpid()])


def request(options, path, body=b"", method="PUT"):
    """Speak to the server without obstore."""
    connection = http.client.HTTPConnection(options["endpoint"].removeprefix("http://"), timeout=20)
    headers = {"Content-Type": "application/octet-stream", "Authorization": "AWS one:signature"}
    connection.request(method, f"/{path}", body=body, headers=headers)
    assert connection.getresponse().status < 300
    connection.close()


@pytest.fixture
def bucket(options, tmp_path):
    """A bucket and a folder with the same files; returns (name of the bucket, folder)."""
    name = "images-" + tmp_path.name.replace("_", "-").lower()[:40]
    request(options, name)
    rng = np.random.default_rng(0)
    for k in range(9):
        key = f"train/class{k % 3}/{k}.{'txt' if k == 8 else 'JPG'}"
        payload = rng.bytes(int(rng.integers(0, 5000)))
        path = tmp_path / "files" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload)
        request(options, f"{name}/{key}", payload)
    return name, tmp_path / "files"


def test_objects_are_what_the_same_files_are(options, bucket):
    name, folder = bucket
    images, files = ObjectSource(f"s3://{name}/train/", **options), FolderSource(folder / "train")

    assert len(images) == len(files) == 8
    assert [images.read(k) for k in range(8)] == [files.read(k) for k in range(8)]
    assert [images.meta(k) for k in range(8)] == [files.meta(k) for k in range(8)]


def test_another_content_of_the_same_size_is_another_dataset(options, bucket):
    name, _ = bucket
    images = ObjectSource(f"s3://{name}", **options)
    assert ObjectSource(f"s3://{name}", **options).fingerprint() == images.fingerprint()
    request(options, f"{name}/train/class0/0.JPG", bytes(len(images.read(0))))

    assert ObjectSource(f"s3://{name}", **options).fingerprint() != images.fingerprint()


@pytest.mark.slow
def test_many_objects_come_over_several_pages_and_in_order(options):
    request(options, "many-objects")
    store = obstore.store.from_url("s3://many-objects", **options)
    run_threads(
        lambda first: [obstore.put(store, f"{k:05}.jpg", str(k).encode()) for k in range(first, 1004, 4)],
        [(first,) for first in range(4)],
    )
    images = ObjectSource("s3://many-objects", **options)

    assert len(images) == 1004
    assert [images.read(k) for k in (0, 999, 1000, 1003)] == [b"0", b"999", b"1000", b"1003"]


def shards(options, name, folder):
    """Write two tar shards, to files and to the bucket."""
    request(options, name)
    rng = np.random.default_rng(1)
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for k in range(5):
                for suffix in ("jpg", "cls"):
                    member = tarfile.TarInfo(f"{shard}{k}.{suffix}")
                    payload = rng.bytes(int(rng.integers(0, 90_000)))
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
        request(options, f"{name}/{shard}.tar", (folder / f"{shard}.tar").read_bytes())


def test_members_of_tar_shards_are_read_in_place_also_by_threads(options, tmp_path):
    shards(options, "shards", tmp_path)
    objects = ObjectTarSource("s3://shards", suffixes=(".jpg",), **options)
    files = TarSource(sorted(tmp_path.glob("*.tar")), suffixes=(".jpg",))
    found = {}

    def read(first):
        for k in range(first, 10, 3):
            found[k] = objects.read(k)

    run_threads(read, [(first,) for first in range(3)])

    assert len(objects) == len(files) == 10
    assert [found[k] for k in range(10)] == [files.read(k) for k in range(10)]
    assert objects.meta(0) == {}
    request(options, "shards/1.tar", b"short")
    with pytest.raises(FormatError, match=r"s3://shards/1.tar (is shorter than it was|ends \d+ bytes early)"):
        objects.read(9)
    with pytest.raises(FormatError, match=r"s3://shards/1.tar cannot be read as a tar file"):
        ObjectTarSource("s3://shards", **options)


WORKER = """
import json, os, sys
from headway.data.bytes.object_source import ObjectSource
options = json.loads(sys.argv[2])
images = ObjectSource(sys.argv[1], **options)
read = lambda: sum(len(images.read(k)) for k in range(len(images)))

def child():
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        read()
    except Exception as error:
        print(error, flush=True)
        os._exit(3)
    os._exit(0)

first = child()
total = read()
again = child()
print(json.dumps([first, total, os.waitstatus_to_exitcode(again)]))
"""


def test_workers_may_be_forked_until_the_process_itself_has_read_and_are_told_so_after(options, bucket):
    """Obstore's threads do not survive a fork: without the guard the second child would wait for ever."""
    name, folder = bucket
    where = [f"s3://{name}/train", json.dumps(options)]
    answer = subprocess.run(
        [sys.executable, "-c", WORKER, *where], capture_output=True, text=True, timeout=60, check=True
    )
    lines = answer.stdout.splitlines()

    total = sum(len(FolderSource(folder).read(k)) for k in range(8))
    assert json.loads(lines[-1]) == [0, total, 3]
    assert "multiprocessing_context='forkserver'" in lines[0]


def test_a_process_that_gets_it_by_pickle_has_a_client_of_its_own(options, bucket):
    images = ObjectSource(f"s3://{bucket[0]}", **options)
    images.read(0)
    code = "import pickle, sys; images = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(images.read(3))"
    answer = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(images), capture_output=True, timeout=60, check=True
    )

    assert answer.stdout == images.read(3)


def test_an_object_that_was_changed_or_is_gone_is_one_error_that_names_it(options, bucket):
    name, _ = bucket
    images = ObjectSource(f"s3://{name}", **options)
    request(options, f"{name}/train/class0/0.JPG", b"cut")
    request(options, f"{name}/train/class0/3.JPG", method="DELETE")

    with pytest.raises(
        FormatError, match=rf"s3://{name}/train/class0/0.JPG had \d+ bytes when it was listed, and has 3"
    ):
        images.read(0)
    with pytest.raises(FormatError, match=rf"s3://{name}/train/class0/3.JPG is gone"):
        images.read(1)
    assert images.read(2)


def test_a_missing_bucket_a_missing_server_and_an_empty_folder_are_told_apart(options, bucket):
    with pytest.raises(InputError, match="s3://no-such-images: there is no such bucket"):
        ObjectSource("s3://no-such-images", **options)
    with pytest.raises(InputError, match=r"holds no object that ends in .jpg, .jpeg, .png"):
        ObjectSource(f"s3://{bucket[0]}/validation", **options)
    request(options, f"{bucket[0]}/empty.tar", bytes(10_240))
    with pytest.raises(InputError, match="hold no member"):
        ObjectTarSource(f"s3://{bucket[0]}", **options)
    nowhere = {**options, "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}
    with pytest.raises(InputError, match=r"cannot be read.*Check the URL, the options and the network"):
        ObjectSource(f"s3://{bucket[0]}", **nowhere)
    with pytest.raises(InputError, match="nothing://here cannot be read"):
        ObjectSource("nothing://here")


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(InputError, match=r"extra `s3`.*pip install 'headway\[s3\]'"):
        ObjectSource("s3://bucket")


def test_denied_access_says_so(options, bucket):
    images = ObjectSource(f"s3://{bucket[0]}", **options)
    request(options, "moto-api/reset-auth", b"0", method="POST")
    try:
        with pytest.raises(InputError, match=rf"access to s3://{bucket[0]} is denied. Pass credentials"):
            ObjectSource(f"s3://{bucket[0]}", **options)
        with pytest.raises(InputError, match=r"access to .*class0/0.JPG is denied"):
            images.read(0)
    finally:
        request(options, "moto-api/reset-auth", b"1000000", method="POST")


def test_listing_in_a_child_brings_errors_and_results_over(options, bucket, monkeypatch):
    """What a process does that has used no object store yet."""
    monkeypatch.setattr(object_source, "_user", [0])
    found = object_source.apart(lambda: [object_source.Listed("a", 3, "t")], list[object_source.Listed])

    assert found == [object_source.Listed("a", 3, "t")]
    assert object_source._user == [0]
    for error in (FormatError("a file. Fix it."), InputError("an argument. Fix it.")):
        with pytest.raises(type(error), match=str(error)):
            object_source.apart(lambda error=error: (_ for _ in ()).throw(error), list[object_source.Listed])
    with pytest.raises(Exception, match="ZeroDivisionError"):
        object_source.apart(lambda: 1 / 0, list[object_source.Listed])
    with pytest.raises(Exception, match="died"):
        object_source.apart(lambda: os._exit(1), list[object_source.Listed])
