"""Text and data without secrets, and without names of machines and people.

Secrets become ``***``. A name, address or UUID becomes a word with a number (``host-1``): what was the same stays the
same. Left as they are: versions, hashes in hexadecimal digits, names of units, models and packages, and paths, but
for whose home they lie in. The rules rather take too much than too little. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "***"
#: A shorter name would be found everywhere.
_SHORTEST = 2
#: Accounts that every machine has.
_EVERYBODYS = frozenset(("root", "sglang", "localhost", "nobody", "local"))
#: Hosts that everybody knows.
_PUBLIC = frozenset(("pypi.org", "files.pythonhosted.org", "download.pytorch.org", "huggingface.co", "github.com"))
_KEPT_ADDRESSES = frozenset(("127.0.0.1", "0.0.0.0", "::1", "::"))  # noqa: S104 - compared, not listened on

#: A name whose value is a secret: of a variable, a key or a flag.
_SECRET = re.compile(
    r"(?:^|[_.-])(?:api[_-]?key|apikey|token|secret|passw(?:or)?d|passphrase|credentials?|pass|pwd|bearer)$"
    r"|(?:access|private|signing|encryption|master|admin|session|service|account|auth|hf|aws|s3)[_-]?(?:key|id)$"
    r"|passw(?:or)?d|passphrase|secret(?!s(?:_file)?$)|api[_-]?key",
    re.IGNORECASE,
)
_PEM = re.compile(r"-----BEGIN [^-\n]*-----.*?(?:-----END [^-\n]*-----|\Z)", re.DOTALL)
_PUBLIC_KEY = re.compile(r"(?:ssh-[a-z0-9]+|ecdsa-sha2-[a-z0-9-]+|sk-[a-z0-9@.-]+) AAAA[A-Za-z0-9+/=]+")
_HASHED_HOST = re.compile(r"\|1\|[A-Za-z0-9+/=]+\|[A-Za-z0-9+/=]+")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{20,}={0,2}|\b(?:[0-9a-f]{2}:){15}[0-9a-f]{2}\b")
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20})://[^\s\"'<>`]+")
_AUTHORIZATION = re.compile(r"\b(authorization\s*[:=]\s*)[^\n\"']+|\b(bearer\s+)[^\s\"',]{8,}", re.IGNORECASE)
# The value of a flag goes as far as the next flag: a process's words are joined by spaces alone.
_FLAG = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)(?:=|\s+)")
_FLAG_VALUE = re.compile(r"(?!--)(?:(?!\s--)[^\n])+")
_ABBREVIATED = re.compile(r"--(?:[a-z]+-)*api(?:-k(?:ey?)?)?")
_ASSIGNMENT = re.compile(r"(?<![\w.-])([\w.-]+)[\"']?\s*[=:]\s*")
_ASSIGNED = re.compile(r"\"[^\"\n]*\"?|'[^'\n]*'?|[^\s,;}\])\"']+")
_TOKEN = re.compile(
    r"\b(?:sk-|gh[opusr]_|github_pat_|glpat-|xox[abeprs]-|pypi-|nvapi-|tskey-)[A-Za-z0-9_-]{12,}"
    r"|\b(?:hf|npm)_[A-Za-z0-9]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{12,}|\bAIza[\w-]{20,}|\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?"
)
_OPAQUE = re.compile(r"(?<![\w+-])(?!_Z)[A-Za-z0-9_+-]{24,}={0,2}(?![\w+-])")
_WORDS, _JOINTS = re.compile(r"[A-Z]?[a-z]{3,}|[A-Z]{4,}"), re.compile(r"[-_+=]")
# How much besides words a name may hold. One or two of a hundred random keys of 24 characters look like names.
_SPOKEN = 0.35
_AT = re.compile(r"(?<![\w.@/+-])[\w.+-]+@(?:\[[0-9A-Fa-f:.]+\]|[\w.-]*\w)")
_UNIT = re.compile(r".*@[\w.-]*\.(?:service|slice|socket|scope|mount|timer)")
_HOME = re.compile(r"/(home|Users)/([^/\s:\"',]+)")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![\w:])")
# Not behind `==` and the like: versions may have four numbers.
_ADDRESS4 = re.compile(r"(?<![\w.])(?<![=<>~!]=)(?<![=<>~!]= )(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_ADDRESS6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*(?:%\w+)?(?![\w:])")
_PLACEHOLDER = re.compile(r"(?:host|user|address|domain|uuid|container)-\d+")

_ENVIRONMENTS = frozenset(("environment", "environ", "env"))
_ARGUMENTS = frozenset(("argv", "command", "extra_args", "cmdline"))
#: Keys below which dotted numbers are versions.
_VERSIONS = frozenset(("packages", "kernels", "toolkit", "version", "versions", "driver"))
#: What people wrote for people.
_FREE_TEXT = frozenset(("reason",))
#: Variables whose values are settings, not secrets.
_SETTING = re.compile(
    r"(?:NCCL|SGLANG|SGL|CUDA|NVIDIA|TORCH|TORCHINDUCTOR|PYTORCH|FLASHINFER|TRITON|OMP|MKL|TOKENIZERS|PYTHON|LD|XDG|LC)"
    r"_?\w*|PATH|TMPDIR|LANG|HF_HOME|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE"
)


def is_secret(name: str) -> bool:
    """Whether a variable, key or flag of this name holds a secret."""
    return bool(_SECRET.search(name) or _ABBREVIATED.fullmatch(name))


class Scrubber:
    """Knows the names that must not be seen: tell it all of them before the first text."""

    def __init__(self, home: str | None = None) -> None:
        #: This machine's home folder, shown as ``~``.
        self.home = home if home and home != "/" else None
        #: name in lower case -> what stands for it.
        self._names: dict[str, str] = {}
        self._stands: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._pattern: re.Pattern[str] | None = None

    def name(self, kind: str, value: object) -> None:
        """A host, user, container or domain that is to be hidden wherever it stands."""
        text = str(value or "").strip().strip("[]").lower()
        if (
            len(text) < _SHORTEST
            or text in _EVERYBODYS
            or text in _KEPT_ADDRESSES
            or text in self._names
            or text.isdigit()
        ):
            return
        self._names[text] = self._stand(kind, text)
        self._pattern = None
        host, dot, domain = text.partition(".")
        if kind == "host" and dot and not re.fullmatch(r"[\d.]+", text):
            self._names.setdefault(host, self._names[text])
            if "." in domain:
                self.name("domain", domain)

    def destination(self, text: object) -> None:
        """``[user@]host[:port]``, with ``ssh://`` or ``openssh:`` before it or not; a URL's user and host, too."""
        rest = re.sub(r"^(?:openssh:)?(?:[a-z][a-z0-9+.-]*://)?", "", str(text or "").strip())
        user, at, place = rest.split("/", 1)[0].rpartition("@")
        if at:
            self.name("user", user.partition(":")[0])
        self.name("host", re.sub(r"(?<!:):\d+$", "", place) if place.count(":") < 2 else place.strip("[]"))

    def value(self, value: Any, key: str = "", *, versions: bool = False) -> Any:
        """A copy of JSON data, scrubbed. ``key``: under which it stands; ``versions``: dotted numbers are none of
        the network's."""
        versions = versions or key in _VERSIONS
        if key in _FREE_TEXT and value:
            return HIDDEN
        if isinstance(value, Mapping):
            if key in _ENVIRONMENTS:
                return self.environment(value)
            return {
                self._key(str(name)): self.value(item, str(name), versions=versions) for name, item in value.items()
            }
        if is_secret(key) and value and not isinstance(value, bool | int | float):
            return HIDDEN
        if isinstance(value, list | tuple):
            if key in _ARGUMENTS:
                return self.arguments([str(word) for word in value])
            return [self.value(item, key, versions=versions) for item in value]
        if key == "serial" and value not in (None, "0"):
            return HIDDEN
        return self.text(value, versions=versions) if isinstance(value, str) else value

    def environment(self, variables: Mapping[str, Any]) -> dict[str, str]:
        """Variables: the names, and the values of those that are settings of the engine and its libraries."""
        shown = {}
        for name, value in variables.items():
            open_ = _SETTING.fullmatch(str(name)) and not is_secret(str(name))
            shown[str(name)] = self.text(str(value)) if open_ else HIDDEN
        return shown

    def arguments(self, words: Sequence[str]) -> list[str]:
        """An argument vector without the values of flags that carry secrets."""
        shown: list[str] = []
        hide = False
        for word in words:
            flag, equals, _ = word.partition("=")
            secret = flag.startswith("-") and is_secret(flag)
            if secret and equals:
                shown.append(f"{flag}={HIDDEN}")
            elif hide and not word.startswith("--"):
                shown.append(HIDDEN)
            else:
                shown.append(self.text(word))
            hide = (secret and not equals) or (hide and not word.startswith("--"))
        return shown

    def text(self, text: str, *, versions: bool = False) -> str:
        """A text, scrubbed."""
        for pattern in (_PEM, _PUBLIC_KEY, _HASHED_HOST, _FINGERPRINT):
            text = pattern.sub(self._hide, text)
        text = _AUTHORIZATION.sub(lambda match: self._hide(match, match[1] or match[2]), text)
        text = self._values(text, _FLAG, _FLAG_VALUE)
        text = self._values(text, _ASSIGNMENT, _ASSIGNED)
        text = _URL.sub(self._url, text)
        text = _TOKEN.sub(self._hide, text)
        if self.home:
            text = re.sub(re.escape(self.home) + r"(?![\w.-])", "~", text)
        text = self._without_names(text)
        text = _HOME.sub(lambda match: f"/{match[1]}/{self._user(match[2])}", text)
        text = _AT.sub(self._at, text)
        text = _UUID.sub(lambda match: self._stand("uuid", match[0].lower()), text)
        text = _MAC.sub(lambda match: self._stand("address", match[0].lower()), text)
        if not versions:
            text = _ADDRESS4.sub(self._address, text)
        text = _ADDRESS6.sub(self._address, text)
        return _OPAQUE.sub(self._opaque, text)

    # --- the rules

    def _hide(self, _match: re.Match[str], before: str = "") -> str:
        return before + HIDDEN

    def _values(self, text: str, head: re.Pattern[str], value: re.Pattern[str]) -> str:
        """Hide the values behind those names (the first group of ``head``) that are a secret's."""
        pieces, at = [], 0
        for match in head.finditer(text):
            found = value.match(text, match.end()) if match.start() >= at and is_secret(match[1]) else None
            if found is not None and found[0] != HIDDEN:
                pieces += [text[at : match.end()], self._hide(found)]
                at = found.end()
        return "".join([*pieces, text[at:]])

    def _url(self, match: re.Match[str]) -> str:
        scheme = match[1]
        if scheme.lower() == "file":
            return match[0]
        try:
            parts = urlsplit(match[0])
            known = parts.hostname in _PUBLIC and not parts.query and "@" not in parts.netloc
        except ValueError:
            known = False
        return match[0] if known else self._hide(match, f"{scheme}://")

    def _without_names(self, text: str) -> str:
        if self._pattern is None and self._names:
            words = [self._word(name) for name in sorted(self._names, key=len, reverse=True)]
            self._pattern = re.compile("|".join(words), re.IGNORECASE)
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._named(match[0]), text)

    def _word(self, name: str) -> str:
        # A short name is hidden only as a whole word: it would be found inside of other ones.
        edge = "A-Za-z0-9" if len(name) > 3 else r"\w-"
        before = rf"(?<![{edge}])"
        if self._names[name].startswith("domain-"):  # with the host before it
            before = rf"(?:(?<![\w.-])(?:[\w-]+\.)+|{before})"
        return rf"{before}{re.escape(name)}(?![{edge}])"

    def _named(self, found: str) -> str:
        name = found.lower()
        while name not in self._names:  # a host of a known domain
            name = name.partition(".")[2]
        return self._names[name]

    def _user(self, name: str) -> str:
        kept = _PLACEHOLDER.fullmatch(name) or name == HIDDEN or name in _EVERYBODYS
        return name if kept else self._stand("user", name.lower())

    def _at(self, match: re.Match[str]) -> str:
        if _UNIT.fullmatch(match[0]):
            return match[0]
        user, _, place = match[0].rpartition("@")
        host = place if _PLACEHOLDER.fullmatch(place) or place in _EVERYBODYS else self._stand("host", place.lower())
        return f"{self._user(user)}@{host}"

    def _address(self, match: re.Match[str]) -> str:
        text = match[0]
        try:
            ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return text
        return text if text in _KEPT_ADDRESSES else self._stand("address", text.lower())

    def _opaque(self, match: re.Match[str]) -> str:
        """Long words of upper case, lower case and digits mixed, if little in them is words of a language."""
        word = match[0]
        kinds = (re.search("[a-z]", word), re.search("[A-Z]", word), re.search("[0-9]", word))
        characters, rest = (len(_JOINTS.sub("", text)) for text in (word, _WORDS.sub("", word)))
        return self._hide(match) if all(kinds) and rest > characters * _SPOKEN else word

    def _key(self, name: str) -> str:
        """A mapping's key: a field's name stays as it is, a path or an address is text."""
        return self.text(name) if re.search(r"[/@:\s]|\d\.\d", name) else name

    def _stand(self, kind: str, value: str) -> str:
        key = (kind, value)
        if key not in self._stands:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._stands[key] = f"{kind}-{self._counts[kind]}"
        return self._stands[key]
