"""Which files of a tree a search looks at: a folder, and globs to include and exclude."""

from __future__ import annotations

import re
from typing import Any, Callable, List, Optional, Pattern, Sequence

from .protocol import AgentError

_PACKAGE = "sglang"


def glob_pattern(glob: str) -> Pattern[str]:
    """The regular expression, for ``match``, of a glob over a path's end.

    ``*`` and ``?`` stop at ``/``, ``**`` does not, ``[...]`` and ``[!...]`` are sets. The glob matches at the
    end of the path from a component's start, so ``*.py`` is about the name and ``speculative/*.py`` about the
    last folder too; a leading ``/`` ties it to the site, a trailing ``/`` means all below that folder.
    Raises AgentError DD008.
    """
    body = glob[1:] if glob.startswith("/") else glob
    if body.endswith("/"):
        body += "**"
    if not body or "\0" in glob:
        raise AgentError("DD008", "bad glob %r" % glob, "for example: *.py, speculative/**, /sglang/srt/*.py")
    out: List[str] = []
    at = 0
    while at < len(body):
        char = body[at]
        at += 1
        if char == "*":
            if body[at : at + 2] == "*/":
                out.append("(?:.*/)?")
                at += 2
            elif body[at : at + 1] == "*":
                out.append(".*")
                at += 1
            else:
                out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[":
            # The first character of a set may be "]" itself, as in a shell.
            end = body.find("]", at + 2 if body[at : at + 1] == "!" else at + 1)
            if end < 0:
                raise AgentError("DD008", "bad glob %r: '[' is never closed" % glob, "write [[] for a bracket")
            inner = body[at:end]
            negated = inner.startswith("!")
            inner = inner[1:] if negated else inner
            out.append("(?!/)[%s%s]" % ("^" if negated else "", _set(inner)))
            at = end + 1
        else:
            out.append(re.escape(char))
    start = "" if glob.startswith("/") else "(?:.*/)?"
    try:
        return re.compile(start + "".join(out) + r"\Z", re.DOTALL)
    except re.error as error:
        raise AgentError("DD008", "bad glob %r: %s" % (glob, error.msg), "sets are like [a-z] or [!_]") from None


def _set(inner: str) -> str:
    out, at = "", 0
    while at < len(inner):
        if inner[at + 1 : at + 2] == "-" and at + 2 < len(inner):
            out += re.escape(inner[at]) + "-" + re.escape(inner[at + 2])
            at += 3
        else:
            out += re.escape(inner[at])
            at += 1
    return out


class Selection:
    """The files to look at: those below ``under`` that an include glob names (if any) and no exclude glob does."""

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = (), under: Optional[str] = None) -> None:
        self._include = [glob_pattern(glob) for glob in include]
        self._exclude = [glob_pattern(glob) for glob in exclude]
        self.under = under

    @classmethod
    def parse(cls, request: Any) -> Selection:
        """From the keys ``include``, ``exclude`` (lists of globs) and ``under`` of a request."""
        return cls(request.get("include") or (), request.get("exclude") or (), request.get("under"))

    def wants(self, path: str) -> bool:
        """Whether the globs let this path through (``under`` is the walk's affair)."""
        if self._include and not any(pattern.match(path) for pattern in self._include):
            return False
        return not any(pattern.match(path) for pattern in self._exclude)

    def starts(self, parts: Sequence[str], exists: Callable[[str], bool]) -> List[str]:
        """Where to look: the engine's folders ``parts``, or the one place in them that ``under`` names.

        ``speculative``, ``srt/speculative`` and ``sglang/srt/speculative`` name the same folder. Raises
        AgentError DD008 when it is none, or is outside the engine's folders.
        """
        if self.under is None:
            return list(parts)
        cleaned = self.under.strip("/") if not self.under.startswith("/") else ""
        components = [part for part in cleaned.split("/") if part not in ("", ".")]
        if components and ".." not in components and "\0" not in cleaned:
            path = "/".join(components)
            for prefix in ("", _PACKAGE + "/", *(part + "/" for part in parts)):
                full = prefix + path
                inside = any(full == part or full.startswith(part + "/") for part in parts)
                if inside and exists(full):
                    return [full]
            if path == _PACKAGE:
                return list(parts)
        raise AgentError(
            "DD008",
            "there is no %r in the engine's folders" % self.under,
            "--under takes a path below %s, for example srt/speculative" % " or ".join(parts),
        )
