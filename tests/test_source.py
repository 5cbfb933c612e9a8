"""Sources: the same bytes whichever way they are read, and slow storage that is slow by the second."""

import io
import pickle
import tarfile
import tempfile

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from headway.core.errors import FormatError, InputError
from headway.data.bytes.source import FolderSource, ParquetSource, SyntheticJpeg, TarSource, Throttled, tar_members
from headway.data.pipeline.pipeline import Pipeline
from tests.spawn import run_threads


@pytest.fixture
def payloads():
    rng = np.random.default_rng(0)
    return [rng.bytes(int(size)) for size in rng.integers(1, 900, 7)]


def test_a_folder_is_read_by_path_and_labelled_by_folder(tmp_path, payloads):
    for k, payload in enumerate(payloads):
        (tmp_path / f"class{k % 2}").mkdir(exist_ok=True)
        (tmp_path / f"class{k % 2}" / f"{k}.JPG").write_bytes(payload)
    source = FolderSource(tmp_path)

    read = [(source.read(k), source.meta(k)["label"]) for k in range(len(source))]

    assert read == [(payloads[k], k % 2) for k in (0, 2, 4, 6, 1, 3, 5)]
    before = source.fingerprint()
    (tmp_path / "class1" / "new.jpg").write_bytes(b"x")
    assert FolderSource(tmp_path).fingerprint() != before


def test_files_come_in_the_order_of_their_paths_and_links_to_folders_are_left_out(tmp_path):
    """Folders and files whose names are prefixes of each other: the order is that of the parts of the path."""
    names = [
        "a/b.jpg", "a.jpg", "a-b/1.png", "a/b/1.jpg", "a.b/2.JPEG", "a/no.txt", "Z/.jpg", "b/c/d/e.jpg", "b/.x/1.jpg",
    ]  # fmt: skip
    for name in names:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_bytes(name.encode())
    (tmp_path / "root" / "link").symlink_to(tmp_path / "root" / "a", target_is_directory=True)
    (tmp_path / "root" / "0.jpg").symlink_to(tmp_path / "root" / "a.jpg")
    (tmp_path / "root" / "folder.jpg").mkdir()
    wanted = {".jpg", ".jpeg", ".png"}
    expected = sorted(
        path for path in (tmp_path / "root").rglob("*")
        if (path.suffix.lower() in wanted or path.name == ".jpg") and path.is_file() and "link" not in path.parts
    )  # fmt: skip
    source = FolderSource(str(tmp_path / "root"))

    assert [source.read(k) for k in range(len(source))] == [path.read_bytes() for path in expected]
    assert [source.meta(k)["label"] for k in range(len(source))] == [
        sorted({path.parent.as_posix() for path in expected}).index(path.parent.as_posix()) for path in expected
    ]
    assert pickle.loads(pickle.dumps(source)).read(2) == source.read(2)


def test_tar_members_are_read_in_place_also_by_threads_and_copies(tmp_path, payloads):
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for k in range(shard, 7, 2):
                member = tarfile.TarInfo(f"{k}.jpg")
                member.size = len(payloads[k])
                tar.addfile(member, io.BytesIO(payloads[k]))
    source = TarSource(sorted(tmp_path.glob("*.tar")), suffixes=(".jpg",))
    expected = [payloads[k] for k in (0, 2, 4, 6, 1, 3, 5)]
    found = {}

    def read(k):
        found[k] = source.read(k)

    run_threads(read, [(k,) for k in range(7)])

    assert [found[k] for k in range(7)] == expected
    assert pickle.loads(pickle.dumps(source)).read(3) == expected[3]
    (tmp_path / "1.tar").write_bytes(b"")
    with pytest.raises(FormatError, match="Fetch the shard again"):
        source.read(6)


def listed_or_damaged(*where):
    try:
        return tar_members(*where)
    except FormatError:
        return "damaged"


tar_names = st.text("aé/.", min_size=1, max_size=3).map(lambda text: text.strip("/") or "x")


@settings(max_examples=60)
@given(
    members=st.lists(
        st.tuples(tar_names, st.sampled_from([0, 1, 60, 99, 130]), st.integers(0, 1200), st.sampled_from("0005123")),
        max_size=8,
    ),
    layout=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    mtime=st.sampled_from([0, 1.5]),
    cut=st.sampled_from([0, 0, 0, 1, 512, 1024, 10_000]),
)
def test_members_are_those_that_tarfile_finds_and_so_are_errors(members, layout, mtime, cut):
    """Short and long names, folders, links, extended headers, files that end too early."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=layout) as tar:
        for number, (name, longer, size, kind) in enumerate(members):
            member = tarfile.TarInfo(f"{number}/{'d' * (longer // 2)}/{'n' * (longer // 2)}{name}")
            member.type, member.mtime, member.linkname = kind.encode(), mtime, "elsewhere"
            member.size = size if kind == "0" else 0
            try:
                tar.addfile(member, io.BytesIO(bytes(size)))
            except ValueError:  # a name too long for this layout
                continue
    whole = written.getvalue()[: len(written.getvalue()) - cut]

    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        file.write(whole)
        file.flush()
        ours = listed_or_damaged(file.name)
        with open(file.name, "rb") as opened:
            theirs = listed_or_damaged(file.name, opened)  # by tarfile alone

    assert ours == theirs


def test_parquet_rows_come_back_across_row_groups(tmp_path, payloads):
    table = pa.table({"image": payloads, "label": list(range(7))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    source = ParquetSource(tmp_path / "a.parquet", "image", ["label"], groups=1)

    rows = [(source.read(k), source.meta(k)["label"]) for k in (6, 0, 3, 2, 5)]

    assert rows == [(payloads[k], k) for k in (6, 0, 3, 2, 5)]
    assert len(source) == 7
    assert pickle.loads(pickle.dumps(source)).read(4) == payloads[4]
    with pytest.raises(InputError, match="Use 0 to 6"):
        source.read(7)


def test_generated_images_depend_on_the_seed_alone():
    one, other = SyntheticJpeg(3, 40, 30, seed=1), SyntheticJpeg(9, 40, 30, seed=1)

    assert [one.read(k) for k in range(3)] == [other.read(k) for k in range(3)]
    assert SyntheticJpeg(3, 40, 30, seed=2).read(0) != one.read(0)


def test_throttled_storage_delivers_its_rate_and_latency():
    now = [0.0]

    class Blob:
        def __len__(self):
            return 4

        def read(self, index):
            return b"x" * 1000

        def meta(self, index):
            return {}

        def fingerprint(self):
            return "blob"

    def sleep(seconds):
        now[0] += seconds

    source = Throttled(Blob(), bytes_per_s=10_000, latency_s=0.05, clock=lambda: now[0], sleep=sleep)

    for _ in range(10):
        source.read(0)

    assert now[0] == pytest.approx(10 * (0.1 + 0.05))
    assert source.bytes_read == 10_000
    assert pickle.loads(pickle.dumps(Throttled(SyntheticJpeg(2, 8, 8), 1e12))).read(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: FolderSource(folder), "Pass another folder"),
        (lambda folder: FolderSource(folder / "nowhere"), "Pass another folder"),
        (lambda folder: TarSource([folder / "none.tar"]), "Unpack it"),
        (lambda folder: ParquetSource(folder / "none.parquet", "x"), "cannot be read as Parquet"),
        (lambda folder: SyntheticJpeg(0), "each must be 1 or more"),
        (lambda folder: Throttled(SyntheticJpeg(1), 0), "use a rate above 0"),
    ],
)
def test_sources_that_cannot_be_are_refused(tmp_path, make, message):
    with pytest.raises(InputError, match=message):
        make(tmp_path)


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    parquet.write_table(pa.table({"image": [b"1"]}), tmp_path / "a.parquet")

    with pytest.raises(InputError, match="no column 'picture'; it has: image"):
        ParquetSource(tmp_path / "a.parquet", "picture")


class Cut(SyntheticJpeg):
    """Images of which three are damaged: cut in the middle, cut in the header, empty."""

    def read(self, index):
        whole = super().read(index)
        return {1: whole[: len(whole) // 2], 3: whole[:10], 4: b""}.get(index, whole)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2, "workers": "threads"}, {"num_workers": 1, "workers": "processes"}], ids=str
)
def test_truncated_images_are_named_or_skipped_and_counted(options):
    pipeline = Pipeline(Cut(6, 64, 48)).decode().crop(32, 32).batch(3)

    with pytest.raises(FormatError, match=r"cannot be decoded.*on_error='skip'") as raised:
        list(pipeline.loader(**options))
    loader = pipeline.loader(on_error="skip", **options)
    assert [batch["label"].tolist() for batch in loader] == [[0, 2], [5]]
    assert loader.skipped == 3
    assert "example 1" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
