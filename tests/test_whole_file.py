"""Files that appear whole or not at all."""

import pytest

from headway.core.errors import InputError
from headway.core.files.safe_files import whole_file


def test_the_file_appears_when_the_block_ends_and_nothing_else_stays(tmp_path) -> None:
    target = tmp_path / "a.txt"
    with whole_file(target) as draft:
        draft.write_text("new")

        assert not target.exists()
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_block_that_raises_leaves_the_old_file_and_no_draft(tmp_path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write() -> None:
        with whole_file(target) as draft:
            draft.write_text("half")
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        write()

    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_two_writers_at_once_do_not_mix(tmp_path) -> None:
    with whole_file(tmp_path / "a") as one, whole_file(tmp_path / "b") as other:
        one.write_text("1")
        other.write_text("2")

    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("1", "2")


def test_a_missing_folder_is_named_with_what_to_do(tmp_path) -> None:
    with (
        pytest.raises(InputError, match=r"absent does not exist. Create it first"),
        whole_file(tmp_path / "absent" / "a.txt"),
    ):
        pass
