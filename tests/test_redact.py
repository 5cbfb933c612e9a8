"""Redaction: no byte of a planted secret is anywhere in a run folder but in the user's own output."""

import os
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.run_folder.redact import MARK, arguments, environment, looks_generated, says_secret, text, value
from tests.paths import ROOT

SECRETS = {
    "hf": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
    "aws": "wJalrXUtnFEMI7K7MDENGbPxRfiCYEXAMPLEKEY",
    "github": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "hex": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822c",
    "short": "hunter2",
    "uuid": "1b4e28ba-2fa1-41d2-883f-0016d3cca427",
}


SPELLINGS = [
    ["--pass", "{}"], ["--db-pass={}"], ["--pw", "{}"], ["--pwd={}"], ["--pin={}"], ["--password", "{}"],
    ["--passphrase={}"], ["--passcode", "{}"], ["--token", "{}"], ["--token", "--{}"], ["--token", "--password", "{}"],
    ["--session-token={}"], ["--hf_token={}"], ["--hfToken={}"], ["--num-tokens-secret", "{}"],
    ["--max-token-api-key={}"], ["--key", "{}"], ["--access-key={}"], ["--accessKey", "{}"], ["--private_key={}"],
    ["--signing-key={}"], ["wandb.api_key={}"], ["+login.secret={}"], ["--jwt", "{}"], ["--cookie={}"], ["--otp", "{}"],
    ["--url=postgres://me:{}@host/data"], ["redis://:{}@host:6379/0"], ["--remote", "git+https://me:{}@host/x.git"],
    ["--init=tcp://me:{}@host?token={}"], ["https://account.host/c?sv=1&sig={}&se=2"],
    ["https://b.host/k?X-Amz-Credential={}&X-Amz-Signature={}"], ["https://host/cb#access_token={}&x=1"],
    ["-H", "Authorization: Token {}"], ["--header=Authorization: Basic {}"], ["-H", "X-Auth-Token: {}"],
    ["-H", "Cookie: a={}; session={}"], ["--conf", '{"db": {"password": "{}"}, "lr": 1}'],
    ["--env", "PGPASSWORD={} PGHOST=x"], ["--say", "connect(token='{}')"],
]  # fmt: skip
"""Forty ways to hand a script a secret that nothing but its name gives away."""

SIGNED = "Zq7/x+pw-4.Tk~9!R"
SIGNS = string.ascii_letters + string.digits + "/+_-.~!$*"
secrets_of_any_kind = st.lists(st.sampled_from(SIGNS), min_size=8, max_size=60).map("".join)
generated_keys = st.one_of(
    st.lists(st.sampled_from("0123456789abcdef"), min_size=16, max_size=64).map("".join),
    st.uuids().map(str),
    st.lists(st.sampled_from(string.ascii_letters + string.digits + "-_"), min_size=8, max_size=80).map(
        lambda signs: f"eyJhbGciOiJIUzI1NiJ9.eyJ{''.join(signs)}.{''.join(signs[::-1])}"
    ),
).filter(lambda key: len(set(key)) > 7 and re.search("[0-9]", key) and re.search("[a-f]", key))


def shows(secret, kept):
    """Return the pieces of a secret that can be read in what is stored, six characters each."""
    stored = "\n".join(kept)
    return [secret[k : k + 6] for k in range(len(secret) - 5) if secret[k : k + 6] in stored]


@pytest.mark.parametrize("argv", SPELLINGS, ids=" ".join)
@settings(max_examples=20)
@given(secret=secrets_of_any_kind)
def test_no_piece_of_a_named_secret_is_stored_however_it_is_spelled(argv, secret):
    spelled = [argument.replace("{}", secret) for argument in argv]

    assert not shows(secret, arguments(["train.py", *spelled, "--lr", "1e-3"]))
    assert not shows(secret, [text(f"Traceback\n  Command {spelled} failed: {' '.join(spelled)}\n")])


@given(key=generated_keys)
def test_a_generated_key_is_known_by_its_shape_alone(key):
    for argv in ([key], ["--run", key], [f"--run={key}"], [f"s3://bucket/{key}/x"], [f"a,{key},b"]):
        assert not shows(key, arguments(argv))


@pytest.mark.parametrize("name", ["hf", "aws", "github", "hex", "uuid"])
def test_a_generated_key_is_replaced_wherever_it_stands(name):
    for argument in (SECRETS[name], f"--run={SECRETS[name]}", f"a,{SECRETS[name]},b"):
        assert SECRETS[name] not in arguments([argument])[0]


@pytest.mark.parametrize(
    "argument",
    [
        "train.py", "--lr=1e-3", "--tokenizer", "gpt2", "--max-tokens=4096", "/data/imagenet/train/batch-00012.tar",
        "meta-llama/Llama-3.1-8B-Instruct", "s3://bucket/some/long/prefix/2024-11-20/run-17", "--dims=1024,1024,4096",
        "2024-11-20T10:12:22", "http://host:8080/x?step=12", "--keys", "configs/model_large_batch256.yaml", "", "-m",
        "checkpoint_epoch_0003_step_00120000.pt", "--pin-memory=True", "--pass-through=1", "--num-token=3",
        "http://h:8080/a", "https://github.com/me/code@v2", "--token-dim=64", "--key-size=12", "0000000000000042",
        "--max-token=9", "--n-tokens", "grüße", "torch.optim.AdamW", "0.00000000000000001",
    ],
)  # fmt: skip
def test_ordinary_arguments_stay_as_they_are(argument):
    assert arguments([argument]) == [argument]


@given(st.lists(st.text(max_size=30), max_size=6))
def test_redaction_keeps_the_number_of_arguments_and_changes_nothing_the_second_time(argv):
    once = arguments(argv)

    assert len(once) == len(argv)
    assert arguments(once) == once


def test_only_listed_names_of_the_environment_are_kept():
    env = {"RANK": "0", "NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "MY_SETTING": "y", "LD_PRELOAD": "/a/b.so"}

    assert environment(env) == {"LD_PRELOAD": "/a/b.so", "NCCL_DEBUG": "INFO", "RANK": "0"}
    assert environment({"NCCL_AUTH_TOKEN": "abc"}) == {"NCCL_AUTH_TOKEN": MARK}


def test_names_and_keys():
    assert [says_secret(n) for n in ("--key", "key_size", "monkey", "token", "tokens")] == [
        True, False, True, True, False,
    ]  # fmt: skip  # 'monkey' ends in key: a word too many is hidden rather than a secret shown
    assert looks_generated(SECRETS["aws"])
    assert not looks_generated("a" * 40)
    assert text("Traceback\n  token=abcdef\n") == f"Traceback\n  token={MARK}\n"
    assert value("") == ""


def test_no_byte_of_a_secret_is_in_the_run_folder_but_in_the_users_own_output(tmp_path):
    job = tmp_path / "job.py"
    job.write_text("import sys; print(sys.argv); raise ValueError(f'token={sys.argv[2]}, of {sys.argv}')")
    argv = ["--api-key", SECRETS["aws"], f"--url=https://u:{SECRETS['short']}@h/x", SECRETS["github"]]
    argv += [argument.replace("{}", SIGNED) for spelling in SPELLINGS for argument in spelling]
    code = (
        "import sys; from pathlib import Path; from headway.runtime.launching.launch import LaunchOptions, launch;"
        "launch(LaunchOptions(out=Path(sys.argv[1]), quiet=True), sys.argv[2:])"
    )
    env = {**os.environ, "HF_TOKEN": SECRETS["hf"], "NCCL_KEY": SECRETS["hex"], "CUSTOM": SECRETS["uuid"]}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), str(job), *argv],
        env=env, cwd=ROOT, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and p.parent.name != "logs"]

    assert Path(tmp_path / "run" / "run.json") in files
    for path in files:
        content = path.read_bytes()
        assert not [secret for secret in (*SECRETS.values(), SIGNED) if secret.encode() in content], path


@pytest.mark.parametrize(
    ("argv", "stored"),
    [
        (["--login", "me:pw"], ["--login", "<redacted>"]), (["-u", "a:b"], ["-u", "<redacted>"]),
        (["--smtp=user:secret"], ["--smtp=<redacted>"]), (["-u", "3"], ["-u", "3"]),
        (["--user", "bob"], ["--user", "bob"]),
        (["--hours", "9:17"], ["--hours", "9:17"]),
    ],
)  # fmt: skip
def test_the_value_of_a_login_is_replaced_where_it_holds_a_password(argv, stored):
    assert arguments(argv) == stored
