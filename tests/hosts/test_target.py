from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import Destination, Target, find_site, parse_destination, venv_python


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [
        ("rtx", None, "rtx", None),
        ("ops@rtx.host.example", "ops", "rtx.host.example", None),
        ("ops@192.0.2.7:2222", "ops", "192.0.2.7", 2222),
        ("rtx:22", None, "rtx", 22),
        ("[2001:db8::1]", None, "2001:db8::1", None),
        ("ops@[fe80::1%eth0]:22", "ops", "fe80::1%eth0", 22),
        ("ops@example.org@rtx", "ops@example.org", "rtx", None),
        ("DOMAIN\\ops@rtx", "DOMAIN\\ops", "rtx", None),
        ("ssh://ops@rtx:2222", "ops", "rtx", 2222),
        ("ssh://[2001:db8::1]:22/", None, "2001:db8::1", 22),
        ("bücher.example", None, "bücher.example", None),
        ("under_score", None, "under_score", None),
    ],
)
def test_destinations(text: str, user: str | None, host: str, port: int | None) -> None:
    assert parse_destination(text) == Destination(host, user, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-oProxyCommand=reboot",
        "ops@-oProxyCommand=reboot",
        "-l@rtx",
        "@rtx",
        "ops@",
        "ops\\@rtx",
        "a b",
        "ops @rtx",
        "rtx;reboot",
        "rtx$(reboot)",
        "rtx`reboot`",
        "o'ps@rtx",
        "rtx|x",
        "rtx&",
        "rtx\n",
        "rtx\x1b[31m",
        "rtx\u202egnp",
        "rtx\x00",
        "rtx/x",
        "*",
        "rtx?",
        "2001:db8::1",
        "ops@2001:db8::1",
        "[2001:db8::1",
        "[2001:db8::1]22",
        "[]",
        "[rtx]:22",
        "[::1;reboot]",
        "rtx:",
        "rtx:0",
        "rtx:65536",
        "rtx:22x",
        "rtx:-1",
        "rtx:٢٢",
        "rtx:1" + "0" * 30,
        "ssh://",
        "ssh://rtx/path",
    ],
)
def test_what_is_no_destination(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a|colon|printed"):
        parse_destination(text)


@given(st.text(max_size=30))
def test_no_text_becomes_an_option_or_a_shell_word(text: str) -> None:
    try:
        destination = parse_destination(text)
    except ValueError:
        return
    for part in (destination.host, destination.user or "u"):
        assert not part.startswith("-")
        assert part.isprintable()
        assert not set(part) & set(" '\"`$;&<>|(){}")
    assert destination.port is None or 0 < destination.port < 65536


_words = st.text("abcXYZ019._-", min_size=1, max_size=12).filter(lambda word: not word.startswith("-"))


@given(host=_words | st.just("2001:db8::7"), user=st.none() | _words, port=st.none() | st.integers(1, 65535))
def test_destinations_read_back(host: str, user: str | None, port: int | None) -> None:
    destination = Destination(host, user, port)
    assert parse_destination(str(destination)) == destination


def _install(site: Path) -> Path:
    (site / "sglang" / "srt").mkdir(parents=True)
    return site


@pytest.mark.parametrize("tail", ["", "sglang", "sglang/srt", "sglang/srt/"])
def test_a_site_is_found_from_its_package_too(tmp_path: Path, tail: str) -> None:
    site = _install(tmp_path / "site-packages")
    assert find_site(str(site / tail)) == site


def test_a_checkout_named_sglang_is_not_the_package(tmp_path: Path) -> None:
    _install(tmp_path / "sglang" / "python")
    with pytest.raises(DeployError) as caught:
        find_site(tmp_path / "sglang")
    assert caught.value.code == "DD007"
    assert caught.value.hint == f"did you mean local:{tmp_path / 'sglang' / 'python'}?"


def test_a_site_inside_a_folder_named_sglang(tmp_path: Path) -> None:
    site = _install(tmp_path / "sglang")
    assert find_site(site) == site


def test_no_install_at_all(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "holds no sglang/srt"), (tmp_path / "absent", "is not a folder")):
        with pytest.raises(DeployError, match=words) as caught:
            find_site(path)
        assert (caught.value.code, caught.value.exit_status) == ("DD007", 2)


def test_a_folder_that_only_looks_like_srt(tmp_path: Path) -> None:
    (tmp_path / "other" / "srt").mkdir(parents=True)
    with pytest.raises(DeployError):
        find_site(tmp_path / "other" / "srt")


def test_links_stay_as_they_are_named(tmp_path: Path) -> None:
    _install(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert find_site(tmp_path / "link") == tmp_path / "link"


def test_the_interpreter_of_a_virtual_environment(tmp_path: Path) -> None:
    site = _install(tmp_path / "venv" / "lib" / "python3.12" / "site-packages")
    assert venv_python(site) is None
    (tmp_path / "venv" / "bin").mkdir()
    (tmp_path / "venv" / "bin" / "python3.12").touch()
    assert venv_python(site) == str(tmp_path / "venv" / "bin" / "python3.12")
    assert venv_python(tmp_path) is None


def test_options_are_what_the_agent_reads() -> None:
    target = Target("rtx", "ssh", root="/srv/python", state_dir="/var/lib/x", sudo=True)
    assert target.options() == {"root": "/srv/python", "state_dir": "/var/lib/x", "any_python": False}
    assert hash(target) == hash(Target("rtx", "ssh", root="/srv/python", state_dir="/var/lib/x", sudo=True))
