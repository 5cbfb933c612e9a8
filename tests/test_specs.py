"""Hardware tables."""

import dataclasses

import pytest

from headway.core.errors import FormatError, InputError, UnknownNameError
from headway.core.files.safe_files import read_toml
from headway.cost.specs import KINDS, Specs, shipped, with_entries


def read_specs(path) -> Specs:
    return with_entries(read_toml(path), path)


ENTRIES = [(kind, name) for kind in KINDS for name in getattr(shipped(), kind)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_states_positive_figures_and_a_source(kind: str, name: str) -> None:
    entry = getattr(shipped(), kind)[name]
    numbers = [value for value in dataclasses.asdict(entry).values() if isinstance(value, (int, float))]

    assert entry.name == name
    assert len(entry.source) > 10
    assert all(number > 0 for number in numbers)


@pytest.mark.parametrize("name", shipped().devices)
def test_a_narrower_dtype_is_never_slower(name: str) -> None:
    rates = shipped().devices[name].flops_per_s
    ladder = [rates[dtype] for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8") if dtype in rates]

    assert ladder == sorted(ladder)


@pytest.mark.parametrize("name", shipped().devices)
def test_a_device_is_found_by_every_name_a_driver_gives_it(name: str) -> None:
    device = shipped().devices[name]

    assert all(shipped().device(alias) is device for alias in (*device.aliases, name.lower()))


def test_aliases_are_told_apart() -> None:
    aliases = [alias.lower() for device in shipped().devices.values() for alias in (device.name, *device.aliases)]

    assert len(set(aliases)) == len(aliases)


def test_a_known_ridge_point_comes_out() -> None:
    h100 = shipped().device("H100-SXM5-80GB")

    # The roofline of an H100 bends at 295 FLOP per byte in bf16.
    assert h100.peak("bf16") / h100.memory_bytes_per_s == pytest.approx(295, abs=1)


def test_a_user_s_file_adds_and_replaces(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[links.lab]\nbytes_per_s = 1e9\nlatency_s = 2e-5\nsource = "measured"\n'
        "[disks.aws-gp3]\nread_bytes_per_s = 1e9\nwrite_bytes_per_s = 1e9\nlatency_s = 1e-3\nreads_per_s = 16000\n"
        'source = "provisioned"\n'
    )
    specs = read_specs(path)

    assert specs.link("lab").seconds(1e9) == pytest.approx(1.00002)
    assert specs.disk("aws-gp3").read_bytes_per_s == 1e9
    assert specs.devices == shipped().devices


GOOD = 'bytes_per_s = 1e9\nlatency_s = 2e-5\nsource = "x"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[link.lab]\n" + GOOD, r"unknown table 'link'. Did you mean 'links'"),
        ("[links]\nlab = 3\n", r"links must hold tables; write them as \[links.NAME\]"),
        (
            "[links.lab]\n" + GOOD.replace("latency_s", "latency"),
            r"links.lab has an unknown key 'latency'. Did you mean",
        ),
        ("[links.lab]\nbytes_per_s = 1e9\n", r"links.lab: Object missing required field"),
        ("[links.lab]\n" + GOOD.replace("1e9", "'fast'"), r"links.lab: Expected `float`, got `str`.*bytes_per_s"),
        ("[links.lab]\n" + GOOD.replace("1e9", "-1.0"), r"links.lab: bytes_per_s is -1.0; write a finite number > 0"),
        ("[links.lab]\n" + GOOD.replace("1e9", "nan"), r"bytes_per_s is nan"),
        ("[links.lab\n", r"is no TOML.*at line 1, column 11.*Correct the file"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(text: str, message: str, tmp_path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_specs(tmp_path / "mine.toml")


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*absent.toml: No such file"):
        read_specs(tmp_path / "absent.toml")


def test_an_entry_that_mentions_an_unknown_link_is_refused(tmp_path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[hosts.h]\ndevice = "T4"\nnum_devices = 1\nnum_cores = 4\nmemory_bytes = 1e9\nlink = "ethernet-11g"\n'
        'num_links = 1\nsource = "x"\n'
    )
    with pytest.raises(UnknownNameError, match=r"unknown link of host h 'ethernet-11g'. Did you mean 'ethernet-1"):
        read_specs(tmp_path / "mine.toml")


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'A100-SXM4-80GB'"):
        shipped().device("A100-SMX4-80GB")
    with pytest.raises(UnknownNameError, match=r"device 'a100' has several forms. Choose A100-PCIE-80GB or A100"):
        shipped().device("a100")
    with pytest.raises(UnknownNameError, match=r"unknown dtype of T4 'bf16'"):
        shipped().device("T4").peak("bf16")
    assert shipped().reported("cpu") is None
