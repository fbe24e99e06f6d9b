"""The ELF reader, on objects made here, on those of this machine, and on damaged ones."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent.doctor_elf import Elf, ElfError
from tests.doctor.elf_builder import shared_object

NEEDED = ["libcudart.so.13", "libc10.so"]
UNDEFINED, DEFINED = ["_ZN3c104cuda14ExchangeDeviceEa", "cudaMalloc"], ["_ZN2at4mainEv", "_ZN2at5otherEv"]
IMAGES = [(2, 90), (2, 120), (1, 100)]
WHOLE = shared_object(NEEDED, "$ORIGIN/../lib:/opt/lib", UNDEFINED, DEFINED, IMAGES)


def read(path: Path):
    with Elf(str(path)) as elf:
        return elf.dynamic(), elf.symbols(), elf.architectures()


def test_everything_is_read(tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(WHOLE)
    dynamic, (undefined, defined), architectures = read(path)
    assert dynamic == {"needed": NEEDED, "runpath": ["$ORIGIN/../lib", "/opt/lib"], "soname": None}
    assert undefined == {name.encode() for name in UNDEFINED}
    assert defined == {name.encode() for name in DEFINED}
    assert architectures == {"sm": [90, 120], "ptx": [100]}


def test_only_wanted_symbols(tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(WHOLE)
    with Elf(str(path)) as elf:
        assert elf.symbols({b"_ZN2at4mainEv", b"other"}) == (set(), {b"_ZN2at4mainEv"})


def test_a_real_library_as_readelf_shows_it():
    maps = Path("/proc/self/maps").read_text().split()
    path = next(word for word in maps if word.rpartition("/")[2].startswith(("libm.so", "libm-", "libc.so", "libc-")))
    try:
        shown = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True).stdout
    except FileNotFoundError:
        shown = None
    (dynamic, (_undefined, defined), architectures) = read(Path(path))
    assert len(defined) > 100
    assert architectures == {"sm": [], "ptx": []}
    if shown is not None:
        assert all(f"[{name}]" in shown for name in dynamic["needed"])
        assert shown.count("(NEEDED)") == len(dynamic["needed"])


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, WHOLE[:200], b"\x7fELF\x01\x01" + WHOLE[6:]])
def test_what_is_no_library(tmp_path, data):
    path = tmp_path / "x.so"
    path.write_bytes(data)
    with pytest.raises(ElfError):
        read(path)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=8),
    cut=st.integers(64, len(WHOLE)),
)
def test_damage_is_said_or_harmless(changes, cut, tmp_path_factory):
    """A damaged file raises ElfError or is read; it never ends otherwise, nor without end."""
    data = bytearray(WHOLE)
    for position, value in changes:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged.so"
    path.write_bytes(data[:cut])
    with contextlib.suppress(ElfError):
        read(path)
