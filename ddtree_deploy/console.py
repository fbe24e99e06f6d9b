"""All output goes through a :class:`Console`: data to stdout, everything else to stderr, no markup, no surprises."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    import rich.console

#: A piece of a line: text, or text with a rich style.
Piece = str | tuple[str, str]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """``text`` with control characters (escape sequences too) and undecodable bytes shown, not sent to a terminal."""
    text = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _one_line(text: str) -> str:
    """:func:`visible` for a text that must stay on its line."""
    return visible(text).replace("\n", "\\n")


class OutputClosed(Exception):
    """stdout's reader went away. Not an OSError, which the argument parser would take for its own affair."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise DeployError("DD902", f"the output could not be written: {error.strerror}") from None


class Console:
    """Where a command's output goes. ``json_mode``: stdout carries one JSON document and nothing else."""

    def __init__(
        self,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        *,
        json_mode: bool = False,
        record: bool = False,
        width: int | None = None,
    ) -> None:
        # A stream that the shell closed (`>&-`) is None: what would go there goes nowhere.
        self.stdout = stdout or sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
        self.stderr = stderr or sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
        self.json_mode = json_mode
        #: Whether every remote step is shown with its time.
        self.verbose = False
        self._record = record
        self._width = width
        self._rich: dict[bool, rich.console.Console] = {}
        #: Whether a JSON document takes one line.
        self.compact = False
        #: What failed last, for a summary.
        self.last_error: DeployError | None = None
        #: The exit status that the command has come to, for when its output is cut short.
        self.status = 0
        #: Lines put on stdout so far.
        self.lines_out = 0

    def _target(self, error: bool) -> rich.console.Console:
        if error not in self._rich:
            import rich.console

            self._rich[error] = rich.console.Console(
                file=self.stderr if error else self.stdout,
                markup=False,
                highlight=False,
                emoji=False,
                soft_wrap=True,
                record=self._record and not error,
                width=self._width,
            )
        return self._rich[error]

    @property
    def recorded(self) -> rich.console.Console:
        """The recording console behind stdout (``record=True``): it can export what was printed."""
        return self._target(False)

    @property
    def is_terminal(self) -> bool:
        """Whether stdout is a terminal."""
        return self._record or self.stdout.isatty()

    def flush(self) -> None:
        """Send what is buffered for stdout."""
        with _writing():
            self.stdout.flush()

    def line(self, *pieces: Piece, error: bool = False) -> None:
        """Print one line made of pieces; styles show on a terminal only."""
        stream = self.stderr if error else self.stdout
        self.lines_out += not error
        if not (self._record and not error) and (not stream.isatty() or os.environ.get("NO_COLOR")):
            text = "".join(piece if isinstance(piece, str) else piece[0] for piece in pieces)
            with _writing():
                stream.write(_one_line(text) + "\n")
            return
        from rich.text import Text

        text_object = Text()
        for piece in pieces:
            content, style = (piece, "") if isinstance(piece, str) else piece
            text_object.append(_one_line(content), style)
        with _writing():
            self._target(error).print(text_object, soft_wrap=True)

    def say(self, *pieces: Piece) -> None:
        """A line for people: stdout normally, stderr when stdout carries JSON."""
        self.line(*pieces, error=self.json_mode)

    def note(self, *pieces: Piece) -> None:
        """A line on stderr."""
        self.line(*pieces, error=True)

    def data(self, text: str) -> None:
        """Write data to stdout as it is; on a terminal control characters are made visible."""
        self.lines_out += text.count("\n")
        if self.is_terminal:
            text = "\n".join(visible(line) for line in text.split("\n"))
        if self._record:
            self._target(False).out(text, end="", highlight=False)
            return
        with _writing():
            try:
                self.stdout.write(text)
            except UnicodeEncodeError:
                self.stdout.flush()
                self.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
                self.stdout.buffer.flush()

    def rows(self, rows: Iterable[Sequence[Piece]], *, error: bool = False) -> None:
        """Print rows as aligned columns, two spaces apart; the last column is not padded."""
        table = [list(row) for row in rows]
        widths: dict[int, int] = {}
        for row in table:
            for index, piece in enumerate(row[:-1]):
                widths[index] = max(widths.get(index, 0), len(visible(piece if isinstance(piece, str) else piece[0])))
        for row in table:
            pieces: list[Piece] = []
            for index, piece in enumerate(row):
                content = piece if isinstance(piece, str) else piece[0]
                padding = " " * (widths[index] - len(visible(content)) + 2) if index < len(row) - 1 else ""
                pieces += [piece, padding]
            self.line(*pieces, error=error)

    def document(self, kind: str, value: dict[str, Any]) -> None:
        """Print the command's JSON document; ``kind`` and a version make its ``schema`` field."""
        document = {"schema": f"ddtree-deploy.{kind}/1", **value}
        with _writing():
            self.stdout.write(json.dumps(document, indent=None if self.compact else 2, default=str) + "\n")

    def outcome(self, kind: str, value: dict[str, Any], error: DeployError | None) -> None:
        """End a command that reports in full also when it failed: the one JSON document, then raise the error."""
        if self.json_mode:
            self.document(kind, value if error is None else {**value, "error": error.fields})
            self.json_mode = False  # the error's own document is part of it
        if error is not None:
            raise error

    def error(self, error: DeployError) -> None:
        """One line that says what and where, details, and what to do next."""
        self.last_error = error
        if self.json_mode:
            self.document("error", {"error": error.fields})
        self.note(("error", "bold red"), f"[{error.code}]: {error.message}")
        for detail in error.details:
            self.note(f"  {detail}")
        if error.hint:
            self.note("")
            self.note(("hint", "bold cyan"), f": {error.hint}")

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int, str], None]]:
        """A progress bar on stderr while something long runs; silent where stderr is no terminal.

        Yields ``update(done, total, text)``; a total of 0 means unknown.
        """
        if not self.stderr.isatty():
            yield lambda _done, _total, _text: None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=self._target(True),
            transient=True,
        )
        with bar:
            task = bar.add_task(visible(what), total=None)

            def update(done: int, total: int, text: str) -> None:
                bar.update(task, completed=done, total=total or None, description=visible(text or what))

            yield update
