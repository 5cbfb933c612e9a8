"""`headway ckpt`: what it prints, and what it exits with."""

import json
import os
import shutil

import msgspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from headway.checkpoint.policy import Keep
from headway.cli import main
from headway.core.errors import InputError
from headway.storage.checks.verification import scrub
from headway.storage.commit import committed
from headway.storage.manifest import COMMIT, TWIN, CommitRecord, encode, read_record
from headway.storage.redundancy.parity import encode_rank
from headway.storage.redundancy.restripe import restripe
from headway.verbs.stored.ckpt import parse_keep
from tests.checkpoints import Caller, flip, some_state, unsynced, write_checkpoint


@pytest.fixture
def root(tmp_path):
    for step, seed in ((10, 0), (20, 0), (30, 1)):
        write_checkpoint(tmp_path, step, some_state(seed), objects={"lr": 0.1})
    return tmp_path


@pytest.fixture
def run(capsys):
    """Run a verb; return its exit code and its JSON, or its text."""

    def of(*words: object, as_json: bool = True):
        with pytest.raises(SystemExit) as left:
            main(["ckpt", *map(str, words), *(["--json"] if as_json else [])])
        out = capsys.readouterr()
        text = out.out if left.value.code in (0, 3) or out.out else out.err
        return left.value.code, json.loads(text) if as_json and text.startswith("{") else text

    return of


@pytest.fixture(autouse=True)
def quick():
    with unsynced():
        yield


def damage(path) -> None:
    flip(path, min(2000, path.stat().st_size // 2))  # of an image: the first tensor's elements


def test_verify_answers_in_the_form_that_is_promised(root, run):
    code, answer = run("verify", root / "step-20")

    assert (code, answer["schema"], answer["status"], answer["damaged"]) == (0, "headway.ckpt.verify/1", "good", [])
    assert answer["checked_bytes"] > 10_000
    damage(root / "step-20" / "rank-0" / "__0_0.distcp")
    code, answer = run("verify", root / "step-20")
    assert (code, answer["status"]) == (3, "lost")
    assert {"file", "tensor", "offset_bytes"} <= set(answer["damaged"][0])
    assert (answer["damaged"][0]["file"], answer["damaged"][0]["tensor"]) == ("rank-0/__0_0.distcp", "model.weight")


def test_verify_of_all_steps_exits_for_the_worst(root, run):
    damage(root / "step-10" / "rank-1" / "digests.bin")

    code, answer = run("verify", root, "--all")
    newest_code, newest = run("verify", root)

    assert (code, answer["status"], len(answer["checkpoints"])) == (3, "repairable", 3)
    assert answer["damaged"][0]["path"] == str(root / "step-10")
    assert (newest_code, newest["path"]) == (0, str(root / "step-30"))


def test_verify_says_in_words_what_it_says_in_json(root, run):
    damage(root / "step-30" / "rank-0" / "__0_0.distcp")

    code, text = run("verify", root, as_json=False)

    assert code == 3
    assert "lost" in text
    assert "model.weight" in text
    assert "rank-0/__0_0.distcp" in text


@pytest.mark.parametrize(("content", "code"), [("hello", 2), ("", 2)])
def test_what_is_no_checkpoint_exits_with_2_and_still_answers(tmp_path, run, content, code):
    (tmp_path / "notes.txt").write_text(content)

    for path in (tmp_path, tmp_path / "notes.txt"):
        assert run("verify", path)[0] == code
        assert run("verify", path)[1]["status"] == "not_a_checkpoint"


def test_ls_tells_steps_sizes_roots_and_the_last_look(root, run):
    scrub(root)
    write_checkpoint(root, 40, some_state(), world_size=1)

    code, answer = run("ls", root)

    rows = {row["step"]: row for row in answer["checkpoints"]}
    assert (code, answer["schema"], list(rows)) == (0, "headway.ckpt.ls/1", [10, 20, 30, 40])
    assert [rows[step]["verified"] for step in (10, 40)] == ["good", None]
    assert rows[10]["world_size"] == 2
    assert rows[10]["num_bytes"] == sum(p.stat().st_size for p in (root / "step-10").rglob("*") if p.is_file())
    assert len({row["root"] for row in rows.values()}) == 4
    assert "none" in run("ls", root, as_json=False)[1]


def test_ls_tells_whether_the_parity_that_was_asked_for_is_there(tmp_path, run):
    path = write_checkpoint(tmp_path, 1, some_state(), world_size=3, redundancy="+1")

    assert run("ls", tmp_path)[1]["checkpoints"][0]["redundancy_status"] == "durable"
    assert "+1, not yet" in run("ls", tmp_path, as_json=False)[1]
    for rank in range(3):
        encode_rank(path, rank)
    assert run("ls", tmp_path)[1]["checkpoints"][0]["redundancy_status"] == "redundant"
    assert "2+1" in run("ls", tmp_path, as_json=False)[1]
    restripe(path, "1+2")
    row = run("ls", tmp_path)[1]["checkpoints"][0]
    assert (row["redundancy"], row["parity"]) == ("+1", "1+2")
    assert run("verify", tmp_path)[1]["status"] == "good"
    damage(path / "rank-0" / "__0_0.distcp")
    assert run("verify", tmp_path)[1]["status"] == "repairable"


def test_a_checkpoint_of_a_newer_headway_is_listed_all_the_same(root, run):
    record = read_record(root / "step-20" / COMMIT, CommitRecord)
    for name in (COMMIT, COMMIT + TWIN):
        (root / "step-20" / name).write_bytes(encode(msgspec.structs.replace(record, schema="headway.ckpt.commit/9")))

    assert [row["format"] for row in run("ls", root)[1]["checkpoints"]] == ["headway", "headway, newer", "headway"]


def test_verifying_leaves_no_trace(root, run):
    before = sorted(path for path in root.rglob("*"))
    run("verify", root, "--all")

    assert sorted(path for path in root.rglob("*")) == before


def test_a_scrub_of_another_checkpoint_of_the_same_step_does_not_count(root, run):
    scrub(root)
    write_checkpoint(root, 20, some_state(5), attempt="later", replace=True)

    rows = {row["step"]: row for row in run("ls", root)[1]["checkpoints"]}

    assert rows[20]["verified"] is None


def test_show_tells_dtypes_shapes_and_boxes_and_takes_a_pattern(root, run):
    code, answer = run("show", root, "--only", "model.*")

    tensors = {row["fqn"]: row for row in answer["tensors"]}
    assert (code, answer["schema"], answer["step"]) == (0, "headway.ckpt.show/1", 30)
    assert sorted(tensors) == ["model.bias", "model.empty", "model.mask", "model.weight"]
    assert (tensors["model.weight"]["dtype"], tensors["model.weight"]["shape"]) == ("float32", [40, 33])
    assert [box["offsets"] for box in tensors["model.weight"]["boxes"]] == [[0, 0], [20, 0]]
    code, text = run("show", root, "--only", "nothing*", as_json=False)
    assert code == 2
    assert "is called 'nothing*'; it holds model.weight" in text


def test_show_tells_the_other_values_of_every_format(root, run, tmp_path):
    state = {"w": torch.zeros(2), "epoch": 7, "config": {"lr": 0.1}, "text": "a\x1b[31m"}
    torch.save(state, tmp_path / "x.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp")

    for path in (tmp_path / "x.pt", tmp_path / "dcp"):
        code, answer = run("show", path)
        assert (code, answer["notes"]) == (0, [])
        assert {row["name"]: (row["type"], row["value"]) for row in answer["values"]} == {
            "epoch": ("int", 7), "config.lr": ("float", 0.1), "text": ("str", "a\x1b[31m"),
        }  # fmt: skip
        assert sorted(answer["objects"]) == ["config.lr", "epoch", "text"]
        text = run("show", path, as_json=False)[1]
        assert "config.lr    float  0.1" in text
        assert "1 tensor, 8 B, 3 other values" in text
        assert "\x1b" not in text
    assert run("show", root, "--only", "lr")[1]["values"] == [{"name": "lr", "type": "float", "value": 0.1}]
    assert run("show", root, "--only", "l?", as_json=False)[0] == 0


def test_show_and_verify_say_what_loading_would_run_and_still_call_it_good(run, tmp_path):
    torch.save({"w": torch.zeros(2), "e": Caller()}, tmp_path / "x.pt")
    told = f"loading x.pt with weights_only=False runs {os.name}.system"

    code, answer = run("verify", tmp_path / "x.pt")
    assert (code, answer["status"], answer["damaged"], answer["notes"]) == (0, "good", [], [told])
    assert told in run("verify", tmp_path / "x.pt", as_json=False)[1]
    code, answer = run("show", tmp_path / "x.pt")
    assert (code, answer["notes"]) == (0, [told])
    assert f"e            {os.name}.system  'exit 1'" in run("show", tmp_path / "x.pt", as_json=False)[1]


def test_an_object_that_cannot_be_read_is_listed_and_said(root, run):
    (root / "step-30" / "rank-0" / "__0_0.distcp").unlink()

    code, answer = run("show", root)

    assert (code, answer["objects"]) == (0, ["lr"])
    assert answer["values"] == [{"name": "lr", "type": "", "value": None}]
    assert "'lr' cannot be read" in answer["notes"][0]
    assert "not told" in run("show", root, as_json=False)[1]


def test_names_are_whole_however_narrow_the_screen_and_steer_no_terminal(run, tmp_path):
    name = "model.layers.0." + "x" * 120
    torch.save({name: torch.zeros(2), "a\x1b[31m\nb": torch.zeros(1)}, tmp_path / "x\x1b[2J.pt")

    text = run("show", tmp_path / "x\x1b[2J.pt", as_json=False)[1]

    assert f"  {name}  float32  2 " in text
    assert "a [31m b" in text
    assert "\x1b" not in text + run("verify", tmp_path / "x\x1b[2J.pt", as_json=False)[1]


def test_diff_exits_with_3_where_there_is_a_difference(root, run, tmp_path):
    torch.save(some_state(0), tmp_path / "whole.pt")

    assert run("diff", root / "step-10", root / "step-20")[0] == 0
    code, answer = run("diff", root / "step-20", root / "step-30")
    assert (code, answer["schema"], answer["equal"]) == (3, "headway.ckpt.diff/1", False)
    assert {row["name"] for row in answer["changed"]} == {"model.weight", "model.bias", "model.mask"}
    text = run("diff", root / "step-10", root / "step-20", as_json=False)[1]
    assert "equal by their checksums, and were not read" in " ".join(text.split())
    code, answer = run("diff", root / "step-10", tmp_path / "whole.pt")
    assert (code, answer["removed"], answer["changed"]) == (3, ["lr"], [])
    assert "elements differ" in run("diff", root / "step-20", root / "step-30", as_json=False)[1]


def test_prune_touches_nothing_until_it_is_told_to(root, run):
    code, answer = run("prune", root, "--keep", "last=1,every=20")

    assert (code, answer["steps"], answer["kept"], answer["removed"]) == (0, [10], [20, 30], False)
    assert [one.step for one in committed(root)] == [10, 20, 30]
    assert answer["spared"] == []
    assert "Nothing was touched" in run("prune", root, "--keep", "last=1", as_json=False)[1]

    assert run("prune", root, "--keep", "last=1,every=20", "--yes")[1]["removed"]
    assert [one.step for one in committed(root)] == [20, 30]


def test_prune_keeps_the_newest_good_one_where_all_that_stay_are_damaged(root, run):
    damage(root / "step-30" / "rank-0" / "__0_0.distcp")

    text = run("prune", root, "--keep", "last=1", as_json=False)[1]
    answer = run("prune", root, "--keep", "last=1", "--yes")[1]

    assert (answer["steps"], answer["kept"], answer["spared"]) == ([10], [20, 30], [20])
    assert "Would remove step 10" in text
    assert "Of these 20 against the rule: what it would keep is damaged." in text


def test_prune_removes_nothing_where_nothing_is_good(root, run):
    for step in (10, 20, 30):
        damage(root / f"step-{step}" / "rank-0" / "__0_0.distcp")

    assert run("prune", root, "--keep", "last=1", "--yes")[1]["steps"] == []
    assert "There is no step to remove." in run("prune", root, "--keep", "last=1", as_json=False)[1]


def test_scrub_exits_with_3_when_it_finds_damage(root, run):
    assert run("scrub", root, "--rate-mb-s", "0")[0] == 0
    damage(root / "step-10" / "rank-0" / "__0_0.distcp")
    code, answer = run("scrub", root, "--rate-mb-s", "0")

    assert (code, answer["damaged"], len(answer["checkpoints"])) == (3, 1, 3)
    assert run("scrub", root, "--rate-mb-s", "-1")[0] == 2


def test_stock_checkpoints_are_listed_shown_verified_and_pruned_too(tmp_path, run):
    for step in (1, 2):
        dcp.save({"w": torch.full((3,), float(step))}, checkpoint_id=tmp_path / f"step-{step}")

    assert [row["format"] for row in run("ls", tmp_path)[1]["checkpoints"]] == ["dcp", "dcp"]
    assert run("verify", tmp_path, "--all")[0] == 0
    assert run("show", tmp_path)[1]["tensors"][0]["fqn"] == "w"
    assert run("diff", tmp_path / "step-1", tmp_path / "step-2")[1]["changed"][0]["num_elements"] == 3
    assert run("prune", tmp_path, "--keep", "last=1", "--yes")[1]["steps"] == [1]


def test_a_folder_of_safetensors_files_is_shown_and_compared_as_one_checkpoint(tmp_path, run):
    (tmp_path / "split").mkdir()
    state = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)}
    safetensors.torch.save_file(state, tmp_path / "whole.safetensors")
    for number, (fqn, tensor) in enumerate(state.items(), 1):
        file = tmp_path / "split" / f"model-0000{number}-of-00002.safetensors"
        safetensors.torch.save_file({fqn: tensor}, file)

    assert [row["fqn"] for row in run("show", tmp_path / "split")[1]["tensors"]] == ["a.weight", "b.bias"]
    assert run("diff", tmp_path / "split", tmp_path / "whole.safetensors")[0] == 0
    index = tmp_path / "split" / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {fqn: f"model-0000{n}-of-00002.safetensors" for n, fqn in enumerate(state, 1)}})
    )
    assert run("diff", index, tmp_path / "whole.safetensors")[0] == 0
    assert run("verify", index)[1]["status"] == "good"
    shutil.copy(file, tmp_path / "split" / "again.safetensors")
    code, text = run("show", tmp_path / "split")
    assert (code, "two files of" in text, "'b.bias'" in text) == (2, True, True)


def test_show_of_a_trainers_folder_says_what_else_is_in_it(tmp_path, run):
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    torch.save({"lr": 0.1}, tmp_path / "optimizer.pt")

    answer = run("show", tmp_path)[1]

    assert [row["fqn"] for row in answer["tensors"]] == ["w"]
    assert answer["notes"] == ["not shown: optimizer.pt; name one to see what is in it"]
    assert run("show", tmp_path / "optimizer.pt")[1]["path"] == str(tmp_path / "optimizer.pt")


def test_a_difference_from_what_has_lost_a_file_says_which(root, run):
    (root / "step-10" / "rank-0" / "__0_0.distcp").unlink()

    code, text = run("diff", root / "step-10", root / "step-30")

    assert (code, "has lost rank-0/__0_0.distcp" in text) == (2, True)


def test_a_scrub_of_an_empty_folder_says_that_there_was_nothing(tmp_path, run):
    code, text = run("scrub", tmp_path, as_json=False)

    assert (code, "holds no committed checkpoint." in " ".join(text.split())) == (0, True)


@pytest.mark.parametrize("verb", ["verify", "show"])
def test_a_pipe_a_circle_of_links_and_a_part_are_no_checkpoint(tmp_path, run, verb):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "x.distcp").touch()
    (tmp_path / "empty.pt").touch()

    told = {name: run(verb, tmp_path / name, as_json=False) for name in ("pipe", "loop", "x.distcp", "empty.pt")}

    assert [code for code, _ in told.values()] == [2, 2, 2, 3 if verb == "verify" else 2]
    for name, words in zip(
        told, ("neither a folder nor a file", "nothing at", "is a part of", "is empty"), strict=True
    ):
        assert words in told[name][1]


def test_a_file_of_another_kind_is_not_called_a_broken_one(tmp_path, run):
    (tmp_path / "notes.txt").write_text("hello")

    assert "is neither a torch.save nor a safetensors file" in run("show", tmp_path / "notes.txt")[1]


@pytest.mark.parametrize(
    "words", [["scrub"], ["repair"], ["export", "-o", "x.pt"], ["reshard", "--world", "2", "-o", "x"]]
)
def test_what_works_on_folders_only_says_so_of_a_bucket(run, words):
    code, text = run(words[0], "s3://bucket/run1", *words[1:], as_json=False)

    assert (code, "s3://bucket/run1 is a bucket" in text) == (2, True)


def test_rules_are_read_and_nonsense_is_refused():
    assert parse_keep("last=3,every=1000") == Keep(last=3, every=1000)
    assert parse_keep("every=5") == Keep(last=1, every=5)
    for text in ("", "first=1", "last=x", "last=1,last=2", "last=-1"):
        with pytest.raises(InputError, match=r"is not a rule. Write last=N"):
            parse_keep(text)
    with pytest.raises(InputError, match="last is 0"):
        parse_keep("last=0")


@pytest.mark.parametrize("verb", ["ls", "prune", "scrub"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "is no folder. Name the folder that holds the step-<n>"),
        ("step-10", "is a checkpoint itself. Name the folder above it"),
    ],
)
def test_a_folder_that_is_not_there_or_a_checkpoint_itself_is_the_callers_mistake(root, run, verb, name, said):
    code, text = run(verb, root / name)

    assert (code, said in text) == (2, True)
