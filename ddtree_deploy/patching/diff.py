"""The strict reader of unified diffs.

Two rules carry it. Inside a hunk the header's counts decide what a line is, so a removed line ``-- x``
(shown as ``--- x``) is no header. Outside of hunks a line is a known header, or text at a place where text
may stand, or a problem: what another tool would skip without a word is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ddtree_deploy.patching.filediff import EXECUTABLE, REGULAR, FileDiff, Hunk, HunkLine, Kind
from ddtree_deploy.patching.names import BadNameError, resolve, unquote
from ddtree_deploy.patching.problems import Problem, as_error, printable

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?", re.DOTALL)
_INDEX = re.compile(rb"[0-9a-f]+\.\.[0-9a-f]+(?: ([0-7]{6}))?")
_MODE = re.compile(rb"[0-7]{6}")
_PERCENT = re.compile(rb"\d{1,3}%")
_BINARY = re.compile(rb"GIT binary patch|(?:Binary f|F)iles .+ differ|Binary file .+ has changed")
_NORMAL = re.compile(rb"\d+(?:,\d+)?[acd]\d+(?:,\d+)?")
_ED = re.compile(rb"\d+(?:,\d+)?[acdi]")
_ONLY_IN = re.compile(rb"Only in [^:]+: .+")
_SUBMODULE = re.compile(rb"Submodule .+ [0-9a-f]+\.{2,3}[0-9a-f]+")
_SIGNATURE = re.compile(rb"(?!diff |Index: |From )[^ +\-\\@]")  # what follows the line `-- ` of a mail
_CONTEXT_STARS = re.compile(rb"\*{15}(?: .*)?")
_ORPHAN = re.compile(
    rb"(?:old|new|new file|deleted file) mode [0-7]{6}|(?:dis)?similarity index \d+%"
    rb"|index [0-9a-f]+\.\.[0-9a-f]+(?: [0-7]{6})?"
)
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.\d+)? ?(?:([-+]\d\d):?(\d\d)|Z)?")
_SVN_ABSENT = (b"(nonexistent)", b"(revision 0)")
_EXTENDED = {
    b"old mode": "old_mode",
    b"new mode": "new_mode",
    b"new file mode": "new_file_mode",
    b"deleted file mode": "deleted_file_mode",
    b"rename from": "rename_from",
    b"rename to": "rename_to",
    b"copy from": "copy_from",
    b"copy to": "copy_to",
    b"similarity index": "similarity",
    b"dissimilarity index": "dissimilarity",
    b"index": "index",
}
_SPECIAL_MODES = {0o120000: "a symbolic link", 0o160000: "a submodule", 0o040000: "a folder"}
_NULL = b"/dev/null"
_TO = (b"rename to ", b"copy to ")
_MAX_HEADER = 4096
_BODY = frozenset(b" +-\\")


def parse(data: bytes, *, strip: int = 1, source: str) -> tuple[FileDiff, ...]:
    """Read a unified diff (git's, GNU's, svn's, quilt's; text around it is skipped as other tools do).

    ``strip`` leading components are dropped from names, exactly. ``source`` names the input in messages.
    Raises one DeployError (DD104 damaged or unsupported, DD105 unsafe name) with every problem found:
    anything that is not a complete, text, unified diff of regular files is refused, never skipped.
    """
    diffs, problems = read(data, strip, source)
    if problems:
        raise as_error(problems, source)
    return diffs


def read(data: bytes, strip: int, source: str) -> tuple[tuple[FileDiff, ...], tuple[Problem, ...]]:
    """All file diffs of ``data``, and all its problems; with a problem the diffs are of no use."""
    reader = _Reader(data, strip, source)
    reader.read()
    return tuple(reader.diffs), tuple(reader.problems)


class _BadSectionError(Exception):
    """The rest of a section cannot be read; its problem is already noted."""


@dataclass
class _Section:
    """What the headers of one file diff said, before it is known whether they agree."""

    line: int
    git: bool
    pairs: frozenset[tuple[bytes, bytes]] = frozenset()  # what the names of the `diff --git` line can be, stripped
    old: str | None = None  # None also for /dev/null: see old_null
    new: str | None = None
    old_null: bool = False
    new_null: bool = False
    old_absent: bool = False
    new_absent: bool = False
    fields: dict[str, bytes] = field(default_factory=dict)
    hunks: list[Hunk] = field(default_factory=list)


class _Reader:
    def __init__(self, data: bytes, strip: int, source: str) -> None:
        self.data = data
        self.strip = strip
        self.source = source
        self.lines = data.split(b"\n")
        self.cut = bool(self.lines[-1])  # the last line has no newline
        if not self.cut:
            self.lines.pop()
        self.at = 0
        self.part = 0
        self.crlf = False
        self.blank = False
        self.last_hunk = ""
        self.diffs: list[FileDiff] = []
        self.problems: list[Problem] = []

    def problem(self, at: int, text: str, code: str = "DD104") -> None:
        self.problems.append(Problem(code, f"{self.source}:{at + 1}: {text}"))

    def line(self, at: int) -> bytes:
        return self.lines[at] if at < len(self.lines) else b""

    def starts(self, at: int, prefix: bytes) -> bool:
        return at < len(self.lines) and self.lines[at].startswith(prefix)

    def is_header(self, at: int) -> bool:
        return self.starts(at, b"--- ") and self.starts(at + 1, b"+++ ")

    # -- the input as a whole ------------------------------------------------------------------

    def read(self) -> None:
        if self.data.startswith((b"\xff\xfe", b"\xfe\xff")):
            self.problem(0, "the diff is UTF-16 text; save it as plain bytes (git diff --output=FILE)")
            return
        if self.data.startswith(b"\xef\xbb\xbf"):
            self.problem(0, "the diff begins with a byte order mark; remove it")
            return
        if not self.data.strip():
            self.problems.append(Problem("DD104", f"{self.source}: the diff is empty"))
            return
        text = True
        while self.at < len(self.lines):
            if self.starts(self.at, b"diff --git "):
                self.section(git=True)
                text = self.blank = False
            elif self.is_header(self.at):
                self.section(git=False)
                text = self.blank = False
            else:
                was = text
                text = self.between(text)
                self.part += text and not was
        if not self.diffs and not self.problems:
            self.problems.append(Problem("DD104", f"{self.source}: contains no unified diff"))

    def resync(self, inside: bool = False) -> bool:
        """Move to the next place where reading on makes sense; True when that is a hunk of the same file."""
        for at in range(self.at, len(self.lines)):
            header = self.is_header(at) and self.starts(at + 2, b"@@ -")
            if header or self.starts(at, b"diff --git "):
                self.at = at
                return False
            if inside and _HUNK.fullmatch(self.lines[at]):
                self.at = at
                return True
        self.at = len(self.lines)
        return False

    # -- outside of file diffs -----------------------------------------------------------------

    def between(self, text: bool) -> bool:
        """Take one line outside of sections. ``text``: whether free text may stand here; returns the same
        for the next line.
        """
        at, line = self.at, self.lines[self.at]
        unsupported = self.unsupported(at, line, text)
        if unsupported:
            self.problem(at, unsupported)
            self.at += 1
            self.resync()
            return text
        self.at += 1
        if not line:
            self.blank = True
            return text
        if self.starts(at, b"Index: ") and self.starts(at + 1, b"====="):
            self.at += 1
            if not self.is_header(self.at) and not self.starts(self.at, b"diff --git "):
                self.problem(at, "an Index header without a diff (an empty or a binary file?)")
            return text
        if text:
            return True
        if line in (b"-- ", b"--") and _SIGNATURE.match(self.line(at + 1)):
            return True
        if line[0] in _BODY:
            self.problem(at, f"{self.last_hunk} ends before this line, {printable(line)}")
            self.resync()
            return False
        if line.startswith((b"diff ", b"Index: ")):
            return False
        if line.startswith((b"From ", b"# HG changeset patch")) or self.blank:
            return True
        self.problem(at, f"text directly after a file's diff, {printable(line)}: a damaged line of it?")
        return True

    def unsupported(self, at: int, line: bytes, text: bool) -> str | None:
        """Why this line outside of hunks must not be skipped, or None."""
        reason = None
        if line.startswith(b"@@ -") or (line.startswith(b"@@") and not text):
            reason = f"a hunk header without a file header directly before it, {printable(line)}"
        elif _BINARY.fullmatch(line):
            reason = f"binary changes are not supported, {printable(line)}"
        elif line.startswith((b"diff --cc ", b"diff --combined ")):
            reason = "combined diffs (of merges) are not supported"
        elif _CONTEXT_STARS.fullmatch(self.line(at + 2)) and self.starts(at, b"*** ") and self.starts(at + 1, b"--- "):
            reason = "context diffs are not supported; make a unified one (diff -u)"
        elif _NORMAL.fullmatch(line) and self.line(at + 1)[:2] in (b"< ", b"> "):
            reason = "normal diffs are not supported; make a unified one (diff -u)"
        elif _ED.fullmatch(line):
            reason = f"ed scripts are not supported, {printable(line)}"
        elif _ORPHAN.fullmatch(line) or (
            line.startswith((b"rename from ", b"copy from ")) and self.line(at + 1).startswith(_TO)
        ):
            reason = f"a git header line outside of a 'diff --git' section, {printable(line)}"
        elif line.startswith(b"Property changes on: "):
            reason = "svn property changes are not supported"
        elif _SUBMODULE.match(line):
            reason = "submodule changes are not supported"
        elif _ONLY_IN.fullmatch(line):
            reason = f"{printable(line)}: the diff lacks that file; make it with diff -N"
        elif line.startswith(b"--- ") and (at + 1 >= len(self.lines) or self.starts(at + 1, b"@@ -")):
            reason = f"a '---' header without a '+++' header, {printable(line)}"
        return reason

    # -- one file's diff -----------------------------------------------------------------------

    def section(self, git: bool) -> None:
        section = _Section(self.at, git)
        self.last_hunk = f"the diff at line {self.at + 1}"
        before = len(self.problems)
        try:
            if git:
                self.git_headers(section)
            if self.is_header(self.at):
                self.names(section)
                self.hunks(section)
            if self.at >= len(self.lines) and self.cut and len(self.problems) == before:
                self.problem(len(self.lines) - 1, "the last line has no newline: the diff is cut off")
            if len(self.problems) == before:
                self.diffs.append(self.build(section))
        except _BadSectionError:
            self.resync()

    def bad(self, at: int, text: str, code: str = "DD104") -> _BadSectionError:
        self.problem(at, text, code)
        return _BadSectionError()

    def check_crlf(self, at: int) -> None:
        """Refuse a header that ends in CR LF, once for the whole input."""
        if not self.line(at).endswith(b"\r"):
            return
        if not self.crlf:
            self.crlf = True
            self.problem(at, "the patch file has CRLF line ends; save it with LF ones (dos2unix FILE)")
        self.at = max(self.at, at + 1)
        raise _BadSectionError

    def path(self, at: int, raw: bytes, strip: int) -> str:
        try:
            return resolve(raw, strip)
        except BadNameError as error:
            self.at = max(self.at, at + 1)
            raise self.bad(at, f"the name {printable(raw)} is refused: {error}", "DD105") from None

    def raw_name(self, at: int, text: bytes) -> tuple[bytes, bytes]:
        """The name in a header line, unquoted, and what follows its tab (a timestamp)."""
        if not text.startswith(b'"'):
            name, _, stamp = text.partition(b"\t")
            return name, stamp
        try:
            name, rest = unquote(text)
        except BadNameError as error:
            self.at = max(self.at, at + 1)
            raise self.bad(at, f"the name {printable(text)} is refused: {error}", "DD105") from None
        if rest and not rest.startswith(b"\t"):
            self.at = max(self.at, at + 1)
            raise self.bad(at, f"text after the quoted name, {printable(rest)}")
        return name, rest[1:]

    def git_headers(self, section: _Section) -> None:
        first = self.at
        self.at += 1
        self.check_crlf(first)
        section.pairs = self.git_line(first, self.lines[first][len(b"diff --git ") :])
        while self.at < len(self.lines):
            at, line = self.at, self.lines[self.at]
            key = next((key for key in _EXTENDED if line.startswith(key + b" ")), None)
            if key is None:
                break
            self.check_crlf(at)
            self.at += 1
            name, value = _EXTENDED[key], line[len(key) + 1 :]
            if name in section.fields:
                raise self.bad(at, f"a second '{key.decode()}' header")
            if name in ("similarity", "dissimilarity") and not _PERCENT.fullmatch(value):
                raise self.bad(at, f"a damaged header, {printable(line)}")
            section.fields[name] = self.check_mode(at, name, value)
        at = self.at
        if at >= len(self.lines) or self.is_header(at):
            return
        line = self.lines[at]
        self.check_crlf(at)
        if _BINARY.fullmatch(line):
            self.at += 1
            raise self.bad(at, f"binary changes are not supported, {printable(line)}")
        if line and not line.startswith((b"diff ", b"Index: ", b"-- ", b"From ", b"# HG changeset patch")):
            self.at += 1
            raise self.bad(at, f"an unknown line in a git header, {printable(line)}")

    def check_mode(self, at: int, name: str, value: bytes) -> bytes:
        """The value as it is, or for a header with a mode that mode (empty where ``index`` has none)."""
        mode: bytes | None = None
        if name == "index":
            match = _INDEX.fullmatch(value)
            if match is None:
                raise self.bad(at, f"a damaged index header, {printable(value)}")
            mode = match.group(1) or b""
        elif name.endswith("mode"):
            if not _MODE.fullmatch(value):
                raise self.bad(at, f"a damaged mode, {printable(value)}")
            mode = value
        if mode is None:
            return value
        if mode and int(mode, 8) not in (REGULAR, EXECUTABLE):
            special = _SPECIAL_MODES.get(int(mode, 8) & 0o170000, "not a mode that git writes")
            raise self.bad(at, f"mode {mode.decode()} is {special}; only regular files are patched")
        return mode

    def git_line(self, at: int, text: bytes) -> frozenset[tuple[bytes, bytes]]:
        """Every way to read a ``diff --git`` line as two names, stripped: unquoted ones may hold blanks."""
        if len(text) > _MAX_HEADER:
            raise self.bad(at, "the header line is too long")
        try:
            if text.startswith(b'"'):
                left, rest = unquote(text)
                right = unquote(rest[1:])[0] if rest.startswith(b' "') else rest[1:]
                pairs = [(left, right)]
            elif text.endswith(b'"') and b' "' in text:
                cut = text.index(b' "')
                pairs = [(text[:cut], unquote(text[cut + 1 :])[0])]
            else:
                cuts = (match.start() for match in re.finditer(b" ", text))
                pairs = [(text[:cut], text[cut + 1 :]) for cut in cuts]
        except BadNameError as error:
            raise self.bad(at, f"the names {printable(text)} are refused: {error}", "DD105") from None
        stripped = (tuple(name.split(b"/", self.strip)[self.strip :] for name in pair) for pair in pairs)
        return frozenset((left[0], right[0]) for left, right in stripped if left and right)

    def names(self, section: _Section) -> None:
        for offset in (0, 1):
            self.check_crlf(self.at + offset)
        old_raw, old_stamp = self.raw_name(self.at, self.lines[self.at][4:])
        new_raw, new_stamp = self.raw_name(self.at + 1, self.lines[self.at + 1][4:])
        section.old_null, section.new_null = old_raw == _NULL, new_raw == _NULL
        if not section.old_null:
            section.old = self.path(self.at, old_raw, self.strip)
        if not section.new_null:
            section.new = self.path(self.at + 1, new_raw, self.strip)
        section.old_absent, section.new_absent = _absent(old_stamp), _absent(new_stamp)
        self.at += 2

    def hunks(self, section: _Section) -> None:
        name = section.new if section.old_null else section.old
        number = 0
        while self.starts(self.at, b"@@"):
            number += 1
            hunk = self.hunk(number, name or "/dev/null")
            if hunk is not None:
                section.hunks.append(hunk)
            elif not self.resync(inside=True):
                return
        if not number:
            found = printable(self.line(self.at)) if self.at < len(self.lines) else "the end"
            raise self.bad(self.at - 1, f"no hunk follows the header of {name}, found {found}")
        old_end = new_end = 0
        for hunk in section.hunks:
            if hunk.index < old_end or hunk.new_index < new_end:
                self.problem(
                    hunk.line - 1,
                    f"hunk {hunk.number} of {name} begins at old line {hunk.old_start}, new line "
                    f"{hunk.new_start}: inside or before the hunk above it",
                )
            old_end, new_end = hunk.index + hunk.old_count, hunk.new_index + hunk.new_count

    def hunk(self, number: int, name: str) -> Hunk | None:
        """One hunk, or None with its problem noted and the position after its header."""
        header = self.at
        self.at += 1
        match = _HUNK.fullmatch(self.lines[header])
        if match is None:
            if self.lines[header].endswith(b"@@\r"):
                self.check_crlf(header)
            self.problem(header, f"the header of hunk {number} of {name} is damaged, {printable(self.lines[header])}")
            return None
        old_start, new_start = int(match[1]), int(match[3])
        old_count = 1 if match[2] is None else int(match[2])
        new_count = 1 if match[4] is None else int(match[4])
        where = f"hunk {number} of {name}"
        declared = f"declares {old_count} old and {new_count} new lines"
        self.last_hunk = f"{where} (line {header + 1}) {declared} and"
        if (old_count and not old_start) or (new_count and not new_start):
            self.problem(header, f"the header of {where} puts lines at line 0")
            return None
        lines: list[HunkLine] = []
        old_left, new_left = old_count, new_count
        while old_left or new_left:
            at, line = self.at, self.line(self.at)
            kind = chr(line[0]) if line else " "
            takes_old, takes_new = kind in " -", kind in " +"
            ended = at >= len(self.lines) or kind not in " +-"
            if ended or takes_old > old_left or takes_new > new_left:
                found = "the diff ends" if at >= len(self.lines) else f"line {at + 1} is {printable(line)}"
                self.problem(
                    header,
                    f"{where} {declared}, has {old_count - old_left} and {new_count - new_left} where {found}",
                )
                self.at = header + 1
                return None
            lines.append(HunkLine(kind, line[1:] + b"\n"))
            old_left -= takes_old
            new_left -= takes_new
            self.at += 1
            if self.starts(self.at, b"\\ "):
                if (takes_old and old_left) or (takes_new and new_left):
                    self.problem(self.at, f"{where} has lines after one without a newline at the end of file")
                    return None
                lines[-1] = HunkLine(kind, line[1:])
                self.at += 1
        if all(line.kind == " " for line in lines):
            self.problem(header, f"{where} changes nothing")
            return None
        return Hunk(number, header + 1, old_start, old_count, new_start, new_count, tuple(lines))

    # -- what the headers of a section mean together -------------------------------------------

    def build(self, section: _Section) -> FileDiff:
        kind, old, new = self.git_paths(section) if section.git else self.plain_paths(section)
        at, hunks = section.line, section.hunks
        if kind is Kind.CREATE and hunks and (len(hunks) > 1 or hunks[0].old_count or hunks[0].old_start):
            raise self.bad(at, f"{new} is a new file, so its one hunk must begin with '@@ -0,0'")
        if kind is Kind.DELETE and hunks and (len(hunks) > 1 or hunks[0].new_count or hunks[0].new_start):
            raise self.bad(at, f"{old} is a deleted file, so its one hunk must have '+0,0'")
        modes = {name: int(value, 8) for name, value in section.fields.items() if name.endswith("mode")}
        old_mode = modes.get("old_mode", modes.get("deleted_file_mode"))
        new_mode = modes.get("new_mode", modes.get("new_file_mode"))
        if kind is Kind.MODIFY and not hunks and old_mode == new_mode:
            raise self.bad(at, f"the diff of {old} changes nothing")
        return FileDiff(self.source, at + 1, kind, old, new, tuple(hunks), old_mode, new_mode, self.part)

    def plain_paths(self, section: _Section) -> tuple[Kind, str | None, str | None]:
        old, new, hunks = section.old, section.new, section.hunks
        if section.old_null and section.new_null:
            raise self.bad(section.line, "both names are /dev/null")
        single = hunks[0] if len(hunks) == 1 else None
        if section.old_null or (section.old_absent and single and not single.old_count + single.old_start):
            kind, old = Kind.CREATE, new
        elif section.new_null or (section.new_absent and single and not single.new_count + single.new_start):
            kind, new = Kind.DELETE, old
        else:
            kind = Kind.MODIFY
        if old != new:
            raise self.bad(section.line, f"the names {old} and {new} differ and no rename is declared", "DD105")
        return kind, None if kind is Kind.CREATE else old, None if kind is Kind.DELETE else new

    def git_paths(self, section: _Section) -> tuple[Kind, str | None, str | None]:
        at, fields = section.line, section.fields
        for one, other in (
            ("old_mode", "new_mode"),
            ("rename_from", "rename_to"),
            ("copy_from", "copy_to"),
        ):
            if (one in fields) != (other in fields):
                raise self.bad(at, f"'{one.replace('_', ' ')}' without '{other.replace('_', ' ')}' or the reverse")
        declared = {
            Kind.RENAME: "rename_from" in fields,
            Kind.COPY: "copy_from" in fields,
            Kind.CREATE: "new_file_mode" in fields,
            Kind.DELETE: "deleted_file_mode" in fields,
        }
        kinds = [kind for kind, there in declared.items() if there] or [Kind.MODIFY]
        kind = kinds[0]
        if len(kinds) > 1 or ("old_mode" in fields and kind in (Kind.CREATE, Kind.DELETE)):
            raise self.bad(at, "the git headers contradict one another")
        if section.hunks and (section.old_null, section.new_null) != (kind is Kind.CREATE, kind is Kind.DELETE):
            raise self.bad(at, "/dev/null and the headers 'new file mode', 'deleted file mode' do not agree")
        if kind in (Kind.RENAME, Kind.COPY):
            prefix = kind.value
            old, new = (
                self.path(at, self.raw_name(at, fields[f"{prefix}_{end}"])[0], max(self.strip - 1, 0))
                for end in ("from", "to")
            )
            if old == new:
                raise self.bad(at, f"a {prefix} of {old} to itself")
            if (old.encode(), new.encode()) not in section.pairs:
                raise self.bad(at, f"{printable(self.lines[at])} is not about {old} and {new}", "DD105")
        else:
            equal = [left for left, right in section.pairs if left == right]
            if len(equal) != 1:
                raise self.bad(
                    at, f"the names of {printable(self.lines[at])} differ and no rename is declared", "DD105"
                )
            old = new = self.path(at, equal[0], 0)
        for stated, name in ((section.old, old), (section.new, new)):
            if stated not in (None, name):
                raise self.bad(at, f"the headers name both {stated} and {name}", "DD105")
        return kind, None if kind is Kind.CREATE else old, None if kind is Kind.DELETE else new


def _absent(stamp: bytes) -> bool:
    """Whether the timestamp after a name says that the file is not there: the epoch (GNU diff -N), or svn's
    words for it.
    """
    if stamp in _SVN_ABSENT:
        return True
    match = _STAMP.fullmatch(stamp.strip())
    if match is None:
        return False
    zone = f"{match[3].decode()}:{match[4].decode()}" if match[3] else "+00:00"
    try:
        moment = datetime.fromisoformat(f"{match[1].decode()}T{match[2].decode()}{zone}")
    except ValueError:
        return False
    return moment == datetime.fromtimestamp(0, UTC)
