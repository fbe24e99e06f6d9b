"""Hostile values for launch files: everything that systemd or a shell gives a meaning."""

from __future__ import annotations

import unicodedata

from hypothesis import strategies as st

FRAGMENTS = (
    '{"a": true, "n": [1, 2]}', " ", "  ", "\t", "'", '"', "it's", "''", "%", "%%", "%h", "%z", "%n", "$", "$$",
    "$HOME", "${HOME}", "$(id)", "`id`", "\\", "\\\\", "\\n", "\\x41", "\\q", ";", " ; ", "#", "# x", "&&", "|", ">",
    "*", "?", "[x]", "{a,b}", "~", "!", "@", "-", "--", "+", ":", "=", ",", "/", "é", "漢字", "\u2028", "\u00a0",
    "\U0001f9ea",    "/bin/evil", "ExecStartPost=/bin/evil", "[Service]", "ü b",
)  # fmt: skip

# Noncharacters (category Cn) are refused, see REFUSED.
_characters = st.characters(exclude_categories=("Cc", "Cs", "Cn"))
values = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(_characters, max_size=4)), max_size=5).map("".join)
nonempty_values = values.filter(lambda value: value.strip() != "")
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
environments = st.dictionaries(names, values, max_size=5)

# What no launch file may hold, wherever it stands in a value.
REFUSED = ("\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\udc80", "\ufdd0", "\uffff", "\U0010fffe")

assert not any(unicodedata.category(char) == "Cc" and char != "\t" for text in FRAGMENTS for char in text)
