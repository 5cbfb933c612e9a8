"""Nothing outside of the folder that a verb was given is written or removed, whatever links lie in it."""

import os
from pathlib import Path

import pytest

from headway.core.errors import InputError
from headway.core.files.private import check_inside, check_links, remove_tree
from headway.core.files.safe_files import whole_file
from headway.storage.checks.repair import repair
from headway.storage.commit import CommittedCheckpoint, recover, remove
from headway.storage.draft import open_draft
from headway.storage.redundancy.parity import encode_rank
from headway.storage.redundancy.restripe import restripe
from headway.storage.regions.protected import ProtectedRegion
from headway.storage.stores import LocalStore
from tests import redundant
from tests.launching import refusal
from tests.redundant import content, lose

no_fsync, checkpoint, copy = redundant.no_fsync, redundant.checkpoint, redundant.copy
LINK = r"is a link to .* outside of .* Put what it leads to in the place of the link"


@pytest.fixture
def elsewhere(tmp_path):
    """Somebody's folder, full; it must be the same afterwards."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("parity.bin", "parity.json", "manifest.json", ".parity.bin.1.draft", ".parity-4+2.bin.draft", "NOTES"):
        (folder / name).write_text("precious")
        os.utime(folder / name, (1, 1))
    before = content(folder)
    yield folder
    assert content(folder) == before


def led_out(folder: Path, elsewhere: Path, where: str) -> None:
    """Put a link out of the checkpoint in one place of it."""
    if where == "rank-1":
        lose(folder, 1)
        (folder / "rank-1").symlink_to(elsewhere)
    elif where == "copies":
        for file in sorted((folder / "rank-1" / "copies").rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        (folder / "rank-1" / "copies").rmdir()
        (folder / "rank-1" / "copies").symlink_to(elsewhere)
    else:
        (folder / "rank-1" / where).unlink(missing_ok=True)
        (folder / "rank-1" / where).symlink_to(elsewhere / where)


WRITERS = {
    "repair": repair,
    "restripe": lambda path: restripe(path, "4+1"),
    "encode": lambda path: encode_rank(path, 1),
}


@pytest.mark.parametrize("where", ["rank-1", "copies", "parity.json", ".parity-4+2.bin.draft"])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_writes_into_a_checkpoint_follows_no_link_out_of_it(copy, elsewhere, writer, where):
    led_out(copy, elsewhere, where)
    (copy / "rank-0" / ".metadata").unlink(missing_ok=True)

    with pytest.raises(InputError, match=LINK):
        WRITERS[writer](copy)


def test_the_newest_checkpoint_of_a_folder_is_not_repaired_through_a_link(copy, tmp_path):
    lose(copy, 2)
    before = content(copy)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "step-9").symlink_to(copy)
    assert "is a link to" in refusal("ckpt", "repair", tmp_path / "given")
    assert content(copy) == before


def test_the_folder_that_was_named_may_be_a_link_itself_and_links_inside_it_are_fine(copy, tmp_path):
    good = content(copy)
    (tmp_path / "named").symlink_to(copy)
    (copy / "latest").symlink_to(copy / "rank-0")
    lose(copy, 3)

    assert repair(tmp_path / "named").status == "repaired"
    (copy / "latest").unlink()
    assert content(copy) == good


def test_a_save_and_a_store_stay_inside(tmp_path, elsewhere):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".step-3.a.draft").symlink_to(elsewhere)
    (tmp_path / "root" / "out").symlink_to(elsewhere)
    store = LocalStore(tmp_path / "root")
    for write in (
        lambda: open_draft(tmp_path / "root", 3, "a", rank=0),
        lambda: store.put("out/parity.bin", [b"x"]),
        lambda: store.put_if_absent("out/new", b"x"),
        lambda: store.remove("out/parity.bin"),
    ):
        with pytest.raises(InputError, match=LINK):
            write()
    store.remove("out")

    assert not (tmp_path / "root" / "out").is_symlink()


def test_removing_a_link_removes_the_link_alone(tmp_path, elsewhere):
    root = tmp_path / "root"
    root.mkdir()
    for name in ("step-5", ".step-6.a.trash"):
        (root / name).symlink_to(elsewhere)
    remove(CommittedCheckpoint(5, root / "step-5"))
    recover(root)
    (tmp_path / "kept").symlink_to(elsewhere)
    remove_tree(tmp_path / "kept")

    assert [*root.iterdir()] == []
    assert not os.path.lexists(tmp_path / "kept")


def test_a_draft_is_not_written_through_a_link_that_lay_in_its_place(tmp_path, elsewhere):
    (tmp_path / f".plan.json.{os.getpid()}.draft").symlink_to(elsewhere / "NOTES")
    with whole_file(tmp_path / "plan.json") as draft:
        draft.write_text("a plan")

    assert ((tmp_path / "plan.json").read_text(), (tmp_path / "plan.json").is_symlink()) == ("a plan", False)


def test_a_protected_region_is_not_written_through_a_link_to_a_sidecar(tmp_path):
    ProtectedRegion(tmp_path / "theirs", num_bytes=16 * 4096).close()
    sidecar = next(file for file in tmp_path.iterdir() if file.name != "theirs")
    (tmp_path / "mine").write_bytes((tmp_path / "theirs").read_bytes())
    (tmp_path / sidecar.name.replace("theirs", "mine")).symlink_to(sidecar)

    with pytest.raises(InputError, match="cannot be opened"):
        ProtectedRegion(tmp_path / "mine")


def test_a_link_is_named_wherever_it_lies(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "out").symlink_to("../../..")

    with pytest.raises(InputError, match=r"deep/out is a link"):
        check_links(tmp_path / "in")
    check_links(tmp_path / "in", ["other"])
    check_inside(tmp_path / "in", tmp_path / "in" / "new" / "file")
