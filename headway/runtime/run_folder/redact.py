"""Keeps secrets out of the run folder: arguments and environment as they may be stored.

Of the environment only names on a list are kept. A value is replaced when
its name says secret (`--api-key`, `token=`), when it is a URL with
credentials, or when it looks like a generated key: 16 hexadecimal digits or
more, a JSON web token, or long, without separators, of high entropy.

>>> arguments(["train.py", "--api-key", "abc", "--lr=1e-3", "s3://me:pw@host/x"])
['train.py', '--api-key', '<redacted>', '--lr=1e-3', 's3://<redacted>@host/x']
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

MARK = "<redacted>"
"""What stands in place of a secret."""

ALLOWED = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OMP_PROC_BIND",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES",
    "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE",
    "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "GLOO_SOCKET_IFNAME", "PYTHONHASHSEED", "PYTHONUNBUFFERED",
    "HEADWAY", "HEADWAY_WINDOWS", "HEADWAY_WINDOW_AT", "HEADWAY_ATTEMPT",
    "TOKENIZERS_PARALLELISM", "MALLOC_ARENA_MAX", "LD_PRELOAD",
})  # fmt: skip
"""Names of environment variables that may be stored (their values are still checked)."""

ALLOWED_PREFIXES = ("NCCL_", "UCX_", "FI_")
"""Prefixes of further allowed names: tuning knobs of communication libraries."""

_STRONG = re.compile(r"secret|passw|passphrase|passcode|pwd|credential|apikey|privatekey|accesskey|signature")
"""Parts of a word that announce a secret, whatever stands beside it."""
_STRONG_WORDS = frozenset({"auth", "authorization", "cookie", "dsn", "sas", "bearer", "jwt"})
_LAST_WORDS = frozenset({"pass", "pw", "pin", "pat", "sig", "otp"})
"""Words that announce one where they end a name: `--db-pass`, but not `--pin-memory`."""
_KEYS_OF = frozenset({"api", "private", "access"})
_COUNTED = frozenset({"n", "num", "max", "min"})
"""Words before `token` that make it a token of text: `--max-token`, but not `--session-token`."""
_MEASURED = frozenset({"dim", "len", "length", "count", "size", "drop", "frame", "point", "word"})
"""Words behind `token` or `key` that make it one of a model."""

_LOGIN = re.compile(r"--?(?:u|user|login|smtp|auth|proxy-user)")
"""Options whose value may be `name:password`, as curl's."""
_NAME_AND_SECRET = re.compile(r"[^:/\s]+:[^/\s]\S*")

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?:[^/\s@\"'<>]+|[^/\s@:\"'<>]*:[^\s\"'<>]*)@")
"""Credentials end at the first @, or, where a password has a / or an @ in it, at the last."""
_QUERY = re.compile(r"(?P<head>[?&;#](?P<name>[^=&;\s]+)=)(?P<value>[^&;\s]+)")
_HEADER = re.compile(r"(?i)(?P<head>\b(?:authorization|cookie)[\"']?\s*[:=]\s*[\"']?)(?P<value>[^\s\"'][^\"'\n]*)")
"""A header's value has several words: `Authorization: Token abc`."""
_NAME = re.compile(r"(?P<name>[\w.-]{1,80})(?P<sep>[\"']?\s*[=:]\s*)")
_VALUE = re.compile(r"\"(?:\\.|[^\"\\])+\"|'(?:\\.|[^'\\])+'|[\"']?[^\s\"',;&}]+")
_JWT = re.compile(r"\beyJ[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)*")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HEX = re.compile(r"(?<![A-Za-z0-9])[0-9a-f]{16,}(?![A-Za-z0-9])|(?<![A-Za-z0-9])[0-9A-F]{16,}(?![A-Za-z0-9])")
_RUN = re.compile(r"[A-Za-z0-9_+/=\-]{16,}")
_KNOWN = re.compile(
    r"\b(?:sk|pk|rk|hf|ghp|gho|ghs|ghu|github_pat|glpat|xox[abprs]|AKIA|ASIA|AIza|npm|pypi|dop_v1|ya29)[-_]?[A-Za-z0-9_\-.]{8,}"
)


def arguments(argv: Sequence[str]) -> list[str]:
    """Return `argv` as it may be stored: secrets replaced, everything else as it was.

    What follows a name that says secret is hidden, also where it begins like
    an option: `--token --X` hides a secret, or at worst the name of an option.
    """
    kept: list[str] = []
    hide_next = False
    for argument in argv:
        name, equals, value_text = argument.partition("=")
        # Only what looks like a name is stored as one: before an = may stand a URL, or half a header.
        is_pair = bool(equals) and re.fullmatch(r"[-\w.+]+", name) is not None
        is_hidden, hide_next = hide_next, argument.startswith("-") and not equals and says_secret(argument)
        follows_login = bool(kept) and _LOGIN.fullmatch(argv[len(kept) - 1]) is not None
        if is_hidden or (follows_login and _NAME_AND_SECRET.fullmatch(argument)):
            kept.append(MARK)
        elif is_pair and _LOGIN.fullmatch(name) and _NAME_AND_SECRET.fullmatch(value_text):
            kept.append(f"{name}={MARK}")
        elif is_pair:
            kept.append(f"{name}={MARK if says_secret(name) and value_text else value(value_text)}")
        else:
            kept.append(value(argument))
    return kept


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the allow-listed part of `env`, its values checked like arguments."""
    return {
        name: MARK if says_secret(name) else value(text)
        for name, text in sorted(env.items())
        if name in ALLOWED or name.startswith(ALLOWED_PREFIXES)
    }


def says_secret(name: str) -> bool:
    """Say whether a name announces a secret.

    `token` and `key` are words of models as well: they count where no word
    beside them says so, and any other word that announces a secret counts.

    >>> [says_secret(name) for name in ("--hf-token", "--max-token", "AWS_SECRET_ACCESS_KEY", "--max-token-api-key")]
    [True, False, True, True]
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    if any(_STRONG.search(word) or word in _STRONG_WORDS for word in words):
        return True
    if words and words[-1] in _LAST_WORDS:
        return True
    if any(first in _KEYS_OF and second == "key" for first, second in itertools.pairwise(words)):
        return True
    around = zip(["", *words], words, [*words[1:], ""], strict=False)
    return any(_is_weak(word, before, after) for before, word, after in around)


def _is_weak(word: str, before: str, after: str) -> bool:
    """Say whether a word is a token or a key that is no model's."""
    if after in _MEASURED:
        return False
    is_token = "token" in word and not re.match(r"\w*token(?:s|i[sz])", word)
    return word.endswith("key") or (is_token and before not in _COUNTED)


def value(text: str) -> str:
    """Return `text` with credentials in URLs, secret query values and generated keys replaced."""
    text = _hidden_options(text)
    text = _URL.sub(rf"\g<scheme>{MARK}@", text)
    text = _QUERY.sub(lambda m: m["head"] + MARK if says_secret(m["name"]) else m[0], text)
    text = _HEADER.sub(rf"\g<head>{MARK}", text)
    text = re.sub(r"(?i)\b(bearer\s+|basic\s+(?=\S{8}))\S+", rf"\1{MARK}", text)
    text = _hidden_pairs(text)
    text = _JWT.sub(MARK, _KNOWN.sub(MARK, text))
    text = _UUID.sub(MARK, text)
    text = _HEX.sub(lambda m: MARK if _is_mixed(m[0]) else m[0], text)
    return _RUN.sub(lambda m: MARK if looks_generated(m[0]) else m[0], text)


def _hidden_options(text: str) -> str:
    """Return text with the word behind an option's name hidden where that says so: errors quote command lines."""
    pieces = re.split(r"([\s\"',\[\]]+)", text)
    is_hidden = False
    for place in range(0, len(pieces), 2):
        word = pieces[place]
        if is_hidden and word:
            pieces[place] = MARK
        is_hidden = word.startswith("-") and "=" not in word and says_secret(word)
    return "".join(pieces)


def _hidden_pairs(text: str) -> str:
    """Return text with the value of each `name=value` hidden whose name says so; quotes stay."""
    kept, at = [], 0
    while (pair := _NAME.search(text, at)) is not None:
        kept.append(text[at : pair.end()])
        at = pair.end()  # the value of a pair that stays may be a pair: `failed: --token=abc`
        found = _VALUE.match(text, at)
        is_scheme = pair["sep"].strip() == ":" and text.startswith("//", at)
        if found is not None and says_secret(pair["name"]) and not is_scheme:
            opening = found[0][0] if found[0][0] in "\"'" else ""
            kept.append(opening + MARK + (opening if len(found[0]) > 1 and found[0].endswith(opening) else ""))
            at = found.end()
    return "".join([*kept, text[at:]])


def text(lines: str) -> str:
    """Return free text (a traceback) with what looks like a secret replaced, line by line."""
    return "\n".join(value(line) for line in lines.split("\n"))


def looks_generated(word: str) -> bool:
    """Say whether a long word is more likely a generated key than a name, a path or a number.

    Rule: at least 20 characters, letters and digits mixed, no path or word
    structure, Shannon entropy of 3 bits a character or more.

    >>> looks_generated("wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"), looks_generated("/data/imagenet/train/batch-00012")
    (True, False)
    """
    if len(word) < 20 or not any(c.isdigit() for c in word) or not any(c.isalpha() for c in word):
        return False
    pieces = [piece for piece in re.split(r"[-_/]", word) if piece]
    if max(len(piece) for piece in pieces) < 16:
        return False
    counts = Counter(word)
    bits = -sum(n / len(word) * math.log2(n / len(word)) for n in counts.values())
    return bits >= 3.0


def _is_mixed(word: str) -> bool:
    """Say whether hexadecimal digits are drawn rather than counted: of both kinds, and at least six of them."""
    return len(set(word)) >= 6 and any(c.isdigit() for c in word) and any(c.isalpha() for c in word)
