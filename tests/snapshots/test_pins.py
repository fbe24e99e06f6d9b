"""Pins: what ships is complete, what a user adds is kept, and neither can be talked out of a hash."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots import pins as module
from ddtree_deploy.snapshots.pins import Pin, add_pins, pins, read_pins, render_pins, shipped_pins, user_file

BAD = tomllib.loads((Path(__file__).parents[1] / "cases/pins/bad.toml").read_text())
VERSIONS = ["0.5.9", "0.5.10rc0", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13"]
VERSIONS += ["0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", *(f"0.5.{minor}" for minor in range(16, 24))]
TAGS = "cp312-cp312-manylinux_2_34_x86_64"
NEW = Pin("9.9.9", TAGS, "1" * 64, 5)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "config_folder", lambda: tmp_path / "config")


def test_every_release_since_the_one_before_dflash_is_pinned():
    found: dict[str, set[str]] = {}
    for pin in shipped_pins():
        found.setdefault(pin.version, set()).add(pin.tags)
    assert list(found) == VERSIONS
    for version, tags in found.items():
        if version.startswith(("0.5.9", "0.5.10")):
            assert tags == {"py3-none-any"}
            continue
        pythons = (311, 312, 313) if version in ("0.5.22", "0.5.23") else (310, 311, 312, 313)
        machines = ("x86_64", "aarch64")
        assert tags == {f"cp{tag}-cp{tag}-manylinux_2_34_{machine}" for tag in pythons for machine in machines}
    assert len({pin.sha256 for pin in shipped_pins()}) == len(shipped_pins())


def test_the_shipped_file_is_as_it_is_written():
    file = Path(module.__file__).parent / "pins.toml"
    assert file == module.checkout_file()
    assert file.read_text() == render_pins(shipped_pins())


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_bad_file(case):
    if "repeat" in case:
        head, text, times = case["repeat"]
        data = (head + text * times).encode()
    else:
        data = bytes.fromhex(case["bytes"]) if "bytes" in case else case["text"].encode()
    with pytest.raises(DeployError) as caught:
        read_pins(data, "pins.toml")
    assert caught.value.code == "DD007"
    assert caught.value.message.startswith("pins.toml: ")
    assert case["part"] in caught.value.message
    assert "\n" not in caught.value.message


VERSION = st.from_regex(r"[0-9]\.[0-9]{1,2}(\.post[0-9]|rc[0-9])?", fullmatch=True)
PIN = st.builds(
    Pin,
    VERSION,
    st.from_regex(r"(cp|py)3[0-9]{0,2}-(none|cp3[0-9])-(any|manylinux_2_34_x86_64|a\.b)", fullmatch=True),
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    st.integers(1, module.MAX_SIZE - 1),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PIN, unique_by=lambda pin: (pin.version, pin.tags), max_size=8))
def test_what_is_written_is_read(found):
    text = render_pins(found)
    again = read_pins(text.encode(), "x")
    assert set(again) == set(found)
    assert render_pins(again) == text


def test_a_pin_of_ones_own_is_kept(tmp_path: Path):
    other = Pin("9.9.9", "py3-none-any", "2" * 64, 6)
    assert add_pins(user_file(), [NEW]) == (NEW,)
    assert add_pins(user_file(), [other, NEW]) == (other,)
    assert pins() == (*shipped_pins(), NEW, other)
    assert {path.name for path in (tmp_path / "config").iterdir()} == {"pins.toml"}


def test_a_pinned_hash_is_never_replaced():
    shipped = shipped_pins()[-1]
    add_pins(user_file(), [NEW])
    before = pins()
    for taken in (shipped, NEW):
        forged = Pin(taken.version, taken.tags, "0" * 64, 1)
        with pytest.raises(DeployError) as caught:
            add_pins(user_file(), [Pin("9.9.8", TAGS, "4" * 64, 5), forged])
        assert caught.value.code == "DD405"
        assert pins() == before


def test_a_forged_users_file_cannot_override_a_shipped_pin():
    shipped = shipped_pins()[-1]
    user_file().parent.mkdir(parents=True)
    user_file().write_text(render_pins([Pin(shipped.version, shipped.tags, "0" * 64, 1), NEW]))
    assert pins() == (*shipped_pins(), NEW)


def test_a_damaged_users_file_is_said(tmp_path: Path):
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[wheels")
    with pytest.raises(DeployError) as caught:
        pins()
    assert caught.value.code == "DD007"
    assert str(user_file()) in caught.value.message
