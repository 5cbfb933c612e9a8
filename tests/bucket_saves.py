"""Saves in a bucket of a real S3 server.

A test file takes the fixtures by name: `environment, root = bucket_saves.environment, bucket_saves.root`.
"""

from collections.abc import Iterator

import pytest

from headway.storage.digests import digest_of
from headway.storage.draft import ObjectDraft, finish_rank
from headway.storage.manifest import RankManifest, entry_of, image_name
from headway.storage.stores import ObjectStore, open_store
from tests.object_server import object_server


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Yield what leads a process to a server, one per test file."""
    with object_server("bucket") as found:
        yield found


@pytest.fixture
def root(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return the URL of a folder of the test's own, which this process can reach."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name.replace('[', '-').strip(']')}"


def save(root: str, step: int, attempt: str, *, ranks: int = 2, world_size: int = 2) -> tuple[ObjectStore, ObjectDraft]:
    """Write the parts of the first `ranks` of a save."""
    store, draft = open_store(root), ObjectDraft(root, step, attempt)
    for rank in range(ranks):
        image, name = bytes([step, rank]) * 5000, image_name(rank)
        store.put(f"{draft.prefix}/{name}", [image])
        manifest = RankManifest(
            step, attempt, rank, world_size, entry_of(name, digest_of(image), rank=rank, kind="image")
        )
        finish_rank(draft, manifest, digest_of(image), store)
    return store, draft
