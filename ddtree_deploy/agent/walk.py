"""Walks the engine's folders without following links, in the order of the paths' bytes.

Paths are relative to the site, with ``/``; bytes that are not UTF-8 stand as lone surrogates (PEP 383), so
every name the host allows has exactly one spelling, whatever the host's locale is.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .protocol import AgentError
from .tree import TEMP_PREFIX, UTF8_NAMES, descend, local_name

# Larger files, and built objects, are listed by hash; their bytes stay on the host unless asked for.
MAX_TEXT = 8 * 1024 * 1024
BUILT_SUFFIXES = (".so", ".a", ".o", ".pyd", ".dylib", ".cubin", ".fatbin")
MAX_DEPTH = 64
RETRY_AFTER = 0.05  # seconds; a writer that replaces a file in place is done by then

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO that takes a file's place must not hang the open.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Node(NamedTuple):
    """One thing in the tree that is not a folder.

    ``folder`` is the open descriptor of the folder it is in, ``name`` its name there; both are good until the
    next node is asked for.
    """

    path: str
    kind: str  # "file", "link" or "other" (a socket, a device, a FIFO)
    folder: int
    name: str


class Unreadable(AgentError):
    """Something in the tree cannot be read by the user that the agent runs as."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(
            "DD406",
            "%s cannot be read: %s" % (path, os.strerror(error.errno or 0)),
            "connect as a user that may read the engine's files, or set sudo = true for this host",
        )


class Changed(AgentError):
    """A file did not stay the same while it was read."""

    def __init__(self, path: str) -> None:
        super().__init__(
            "DD403",
            "%s changed while it was being read" % path,
            "wait until whatever writes to the tree is done, then try again",
        )


def is_built(path: str) -> bool:
    """Whether the name is that of a built object (``x.so``, ``libx.so.1.2``), whose bytes are not text."""
    name = path.rpartition("/")[2]
    return name.endswith(BUILT_SUFFIXES) or ".so." in name


def _text(name: str) -> str:
    return name if UTF8_NAMES else os.fsencode(name).decode("utf-8", "surrogateescape")


def open_folder(site: str, path: str) -> int:
    """An open descriptor of the folder ``path`` below ``site``, reached without following a link.

    Raises AgentError DD509 where a component is a link, and OSError.
    """
    fd = os.open(site, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return descend(fd, path)
    finally:
        os.close(fd)


def _kind(folder: int, name: str) -> Optional[str]:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def walk(site: str, starts: Sequence[str], wants: Optional[Callable[[str], bool]] = None) -> Iterator[Node]:
    """Every file, link and other thing in the folders (or single files) ``starts``, sorted by the paths' bytes.

    Bytecode and our own temporary files are left out, and so are paths for which ``wants`` is false.
    What vanishes during the walk is as if it had not been there. Raises AgentError DD406 for a folder that
    cannot be read, DD509 for a start that lies beyond a link.
    """
    for start in sorted(starts, key=lambda path: path.encode("utf-8", "surrogateescape")):
        parent, _, name = start.rpartition("/")
        try:
            folder = open_folder(site, parent)
        except OSError as error:
            raise Unreadable(start, error) from None
        try:
            kind = _kind(folder, local_name(name))
            if kind == "link":
                os.close(open_folder(site, start))  # raises DD509
            elif kind == "folder":
                yield from _below(folder, local_name(name), start, wants, MAX_DEPTH)
            elif kind is not None and (wants is None or wants(start)):
                yield Node(start, kind, folder, local_name(name))
        finally:
            os.close(folder)


def _below(parent: int, name: str, path: str, wants: Optional[Callable[[str], bool]], depth: int) -> Iterator[Node]:
    if depth == 0:
        raise AgentError("DD406", "%s: folders are nested more than %d deep" % (path, MAX_DEPTH))
    try:
        folder = os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Changed(path) from None
        raise Unreadable(path, error) from None
    try:
        found: List[Tuple[bytes, str, str]] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name != "__pycache__":
                            found.append((os.fsencode(entry.name) + b"/", entry.name, "folder"))
                    elif not entry.name.endswith(".pyc") and not entry.name.startswith(TEMP_PREFIX):
                        kind = "link" if entry.is_symlink() else "other"
                        if entry.is_file(follow_symlinks=False):
                            kind = "file"
                        found.append((os.fsencode(entry.name), entry.name, kind))
        except OSError as error:
            raise Unreadable(path, error) from None
        found.sort()
        for _, below, kind in found:
            below_path = path + "/" + _text(below)
            if kind == "folder":
                yield from _below(folder, below, below_path, wants, depth - 1)
            elif wants is None or wants(below_path):
                yield Node(below_path, kind, folder, below)
    finally:
        os.close(folder)


class Reading:
    """A regular file opened for reading, with the means to tell whether it stayed the same meanwhile."""

    def __init__(self, node: Node) -> None:
        self._node = node
        try:
            # O_NOFOLLOW and a check of the kind: what took the file's place since the walk is not read.
            self._handle = os.open(node.name, _FILE, dir_fd=node.folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Changed(node.path) from None
            raise Unreadable(node.path, error) from None
        self.info = os.fstat(self._handle)
        if not stat.S_ISREG(self.info.st_mode):
            self.close()
            raise Changed(node.path)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._handle)

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; empty at the end. Raises AgentError DD406."""
        try:
            return os.read(self._handle, size)
        except OSError as error:
            raise Unreadable(self._node.path, error) from None

    def settled(self, size: int) -> bool:
        """Whether the ``size`` bytes read are all of the file, and nobody wrote to it since it was opened."""
        now = os.fstat(self._handle)
        return size == self.info.st_size and (now.st_size, now.st_mtime_ns) == (size, self.info.st_mtime_ns)


def read_file(node: Node, limit: Optional[int] = None) -> Tuple[os.stat_result, Optional[bytes]]:
    """The file's stat and bytes, as one state of it; the bytes are None when there are more than ``limit``.

    A file that changes meanwhile is read once more. Raises FileNotFoundError, AgentError DD403 and DD406.
    """
    for attempt in (1, 2):
        with Reading(node) as reading:
            if limit is not None and reading.info.st_size > limit:
                return reading.info, None
            data = reading.read(reading.info.st_size + 1)
            if reading.settled(len(data)):
                return reading.info, data
        if attempt == 1:
            time.sleep(RETRY_AFTER)
    raise Changed(node.path)


def hash_file(node: Node) -> Tuple[os.stat_result, bytes]:
    """The stat and sha256 of a file of any size, as one state of it; retries and raises as :func:`read_file`."""
    for attempt in (1, 2):
        with Reading(node) as reading:
            digest, size = hashlib.sha256(), 0
            # A file that grows as fast as it is read must not be read for ever.
            while size <= reading.info.st_size:
                piece = reading.read(1 << 20)
                if not piece:
                    break
                digest.update(piece)
                size += len(piece)
            if reading.settled(size):
                return reading.info, digest.digest()
        if attempt == 1:
            time.sleep(RETRY_AFTER)
    raise Changed(node.path)


def read_link(node: Node) -> str:
    """The text that a link holds. Raises FileNotFoundError, and AgentError DD403 if it is no link any more."""
    try:
        target = os.readlink(node.name, dir_fd=node.folder)
    except FileNotFoundError:
        raise
    except OSError:
        raise Changed(node.path) from None
    return os.fsencode(target).decode("utf-8", "surrogateescape")
