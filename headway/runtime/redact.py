"""Keeps secrets out of the run folder: arguments and environment as they may be stored.

Of the environment only names on a list are kept. A value is replaced when
its name says secret (`--api-key`, `token=`), when it is a URL with
credentials, or when it looks like a generated key: long, without separators,
of high entropy.

>>> arguments(["train.py", "--api-key", "abc", "--lr=1e-3", "s3://me:pw@host/x"])
['train.py', '--api-key', '<redacted>', '--lr=1e-3', 's3://<redacted>@host/x']
"""

from __future__ import annotations

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
    "HEADWAY", "HEADWAY_WINDOWS", "HEADWAY_ATTEMPT", "TOKENIZERS_PARALLELISM", "MALLOC_ARENA_MAX", "LD_PRELOAD",
})  # fmt: skip
"""Names of environment variables that may be stored (their values are still checked)."""

ALLOWED_PREFIXES = ("NCCL_", "UCX_", "FI_")
"""Prefixes of further allowed names: tuning knobs of communication libraries."""

_SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|pwd\b|credential|api[-_]?key|private[-_]?key|access[-_]?key|"
    r"(?:^|[-_.])(?:key|auth|authorization|cookie|dsn|sas|signature|bearer)(?:$|[-_.=])|key$",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(
    r"tokeni[sz]er|tokens|n[-_]?token|token[-_](?:dim|len|count|size|drop)|max[-_]token|key[-_]?(?:size|dim|len|frame|point|word)",
    re.IGNORECASE,
)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]+@")
_QUERY = re.compile(r"(?P<head>[?&;](?P<name>[^=&;\s]+)=)(?P<value>[^&;\s]+)")
_RUN = re.compile(r"[A-Za-z0-9_+/=\-]{16,}")
_KNOWN = re.compile(
    r"\b(?:sk|pk|rk|hf|ghp|gho|ghs|ghu|github_pat|glpat|xox[abprs]|AKIA|ASIA|AIza|npm|pypi|dop_v1|ya29)[-_]?[A-Za-z0-9_\-.]{8,}"
)


def arguments(argv: Sequence[str]) -> list[str]:
    """Return `argv` as it may be stored: secrets replaced, everything else as it was."""
    kept: list[str] = []
    hide_next = False
    for argument in argv:
        if hide_next and not argument.startswith("--"):
            kept.append(MARK)
            hide_next = False
            continue
        name, equals, value_text = argument.partition("=")
        hide_next = argument.startswith("-") and not equals and says_secret(argument)
        if equals and says_secret(name) and value_text:
            kept.append(f"{name}={MARK}")
        elif equals and "://" not in name and re.fullmatch(r"[-\w.+]+", name):
            kept.append(f"{name}={value(value_text)}")
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

    >>> [says_secret(name) for name in ("--hf-token", "--tokenizer", "AWS_SECRET_ACCESS_KEY", "--keys")]
    [True, False, True, False]
    """
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def value(text: str) -> str:
    """Return `text` with credentials in URLs, secret query values and generated keys replaced."""
    text = _URL.sub(rf"\g<scheme>{MARK}@", text)
    text = _QUERY.sub(lambda m: m["head"] + MARK if says_secret(m["name"]) else m[0], text)
    text = re.sub(r"(?i)\b(bearer\s+|basic\s+(?=\S{8}))\S+", rf"\1{MARK}", text)
    text = re.sub(
        r"(?P<name>[\w.-]+)(?P<sep>[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;&}]{3,})",
        lambda m: m["name"] + m["sep"] + MARK if says_secret(m["name"]) and not m["value"].startswith("//") else m[0],
        text,
    )
    text = _KNOWN.sub(MARK, text)
    return _RUN.sub(lambda m: MARK if looks_generated(m[0]) else m[0], text)


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
    if max(len(piece) for piece in pieces) < 16 and (len(pieces) > 5 or not _is_uuid(word)):
        return False
    counts = Counter(word)
    bits = -sum(n / len(word) * math.log2(n / len(word)) for n in counts.values())
    return bits >= 3.0


def _is_uuid(word: str) -> bool:
    return bool(re.fullmatch(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", word))
