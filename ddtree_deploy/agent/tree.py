"""Files below a root, reached component by component so that no symbolic link is ever followed.

An *entry* is what stands at a path, as plain data: ``{"kind": "file", "sha256", "size", "mode"}``,
``{"kind": "link", "target"}``, ``{"kind": "other"}`` (a folder, a device) or None (nothing there).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
from typing import Any, Dict, List, Optional, Tuple

from .protocol import AgentError

Entry = Optional[Dict[str, Any]]

TEMP_PREFIX = ".ddtree-"
UTF8_NAMES = sys.getfilesystemencoding().lower() in ("utf-8", "utf8")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_COMPONENT = re.compile(r"[^\x00-\x1f\x7f\\]+\Z")


def check_path(path: Any, package: str) -> str:
    """``path`` if it is a clean relative path below the package folder; raises AgentError DD105 otherwise."""
    if not isinstance(path, str) or not path:
        problem = "is not a path"
    else:
        problem = ""
        parts = path.split("/")
        if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
            problem = "is not a clean relative path"
        elif not all(_COMPONENT.match(part) for part in parts):
            problem = "holds control characters or a backslash"
        elif parts[0] != package or len(parts) < 2:
            problem = "is not below %s/" % package
        elif any(part.startswith(TEMP_PREFIX) or part == "__pycache__" for part in parts):
            problem = "is reserved"
    if problem or not isinstance(path, str):
        raise AgentError("DD105", "path %r %s" % (path, problem))
    return path


def local_name(name: str) -> str:
    """The spelling under which this interpreter opens a path or name that came as UTF-8 with surrogates."""
    return name if UTF8_NAMES else os.fsdecode(name.encode("utf-8", "surrogateescape"))


def split_path(path: str) -> Tuple[str, str]:
    """The folder of a path, as it came, and the name in it, as this interpreter opens it."""
    folder, _, name = path.rpartition("/")
    return folder, local_name(name)


def descend(fd: int, folder: str) -> int:
    """An open descriptor of ``folder`` below the open one ``fd``, reached without following a link.

    Raises AgentError DD509 where a component is a link, and OSError.
    """
    fd = os.dup(fd)
    done: List[str] = []
    for part in folder.split("/") if folder else []:
        done.append(part)
        if part in ("", ".", ".."):
            os.close(fd)
            raise AgentError("DD105", "path %r is not a clean relative path" % folder)
        try:
            below = os.open(local_name(part), _DIRECTORY, dir_fd=fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                with contextlib.suppress(OSError):
                    target = os.readlink(local_name(part), dir_fd=fd)
                    raise AgentError(
                        "DD509",
                        "%s is a symbolic link to %s" % ("/".join(done), target),
                        "set root to the real folder, or replace the link on the host by what it points to",
                    ) from None
            raise
        finally:
            os.close(fd)
        fd = below
    return fd


class Tree:
    """The folder ``site`` as an open directory, and the files below it."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.fd = os.open(site, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self.fd)

    def open_folder(self, folder: str) -> Optional[int]:
        """An open descriptor of ``folder`` (the caller closes it), None if it does not exist.

        Raises AgentError DD509 when a component is a symbolic link, DD106 when one is a file.
        """
        try:
            return descend(self.fd, folder)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise AgentError("DD106", "%s: a file is where a folder is needed" % folder) from None

    def entry(self, path: str) -> Tuple[Entry, Optional[os.stat_result], bytes]:
        """What stands at ``path``: the entry, its stat and, for a file, the bytes that were hashed."""
        folder, name = split_path(path)
        fd = self.open_folder(folder)
        if fd is None:
            return None, None, b""
        try:
            return entry_at(fd, name)
        finally:
            os.close(fd)


def entry_at(fd: int, name: str) -> Tuple[Entry, Optional[os.stat_result], bytes]:
    """As :meth:`Tree.entry`, for a name in an open folder."""
    try:
        info = os.lstat(name, dir_fd=fd)
    except FileNotFoundError:
        return None, None, b""
    if stat.S_ISLNK(info.st_mode):
        return {"kind": "link", "target": os.readlink(name, dir_fd=fd)}, info, b""
    if not stat.S_ISREG(info.st_mode):
        return {"kind": "other"}, info, b""
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        data = read_all(handle)
        info = os.fstat(handle)
    finally:
        os.close(handle)
    return file_entry(data, stat.S_IMODE(info.st_mode)), info, data


def file_entry(data: bytes, mode: int) -> Dict[str, Any]:
    """The entry of a regular file with these bytes and permission bits."""
    return {"kind": "file", "sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "mode": mode}


def read_all(handle: int) -> bytes:
    """Every byte from an open descriptor."""
    pieces: List[bytes] = []
    while True:
        piece = os.read(handle, 1 << 20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


def same(one: Entry, other: Entry) -> bool:
    """Whether two entries are the same thing: kind, bytes, mode; or link target."""
    return one == other


def write_new(fd: int, name: str, data: bytes, mode: int, owner: Optional[List[int]], source: int) -> None:
    """Create ``name`` in an open folder with these bytes, on disk when this returns.

    ``owner`` is [uid, gid] or None for ours; extended attributes come from the open file ``source`` (-1 for
    none). The mode is set last, since changing the owner clears set-id bits. Raises OSError; the name may
    then exist.
    """
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        if owner is not None:
            mine = os.fstat(handle)
            if [mine.st_uid, mine.st_gid] != owner:
                os.fchown(handle, owner[0], owner[1])
        if source >= 0:
            _copy_xattrs(source, handle)
        os.fchmod(handle, mode)
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_xattrs(source: int, target: int) -> None:
    if not hasattr(os, "listxattr"):
        return
    try:
        names = os.listxattr(source)
    except OSError:
        return
    for name in names:
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as error:
            # security.* and trusted.* belong to the kernel or to root: the new file has its own.
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EACCES, errno.EINVAL):
                raise
