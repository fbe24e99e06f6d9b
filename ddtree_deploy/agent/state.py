"""What a host remembers of a root: lock, journals, pre-images and history, kept outside the package tree.

::

    <base>/<key>/schema                     "1"
                 root                       whose state it is: a root's real path, or unit:NAME
                 lock                       held with flock by the one deployer at work; says who
                 record.json                the applied sets, oldest first, with the entries before and after
                 objects/<sha256>           file contents: pre-images, post-images of lower sets
                 transactions/<id>/journal.json
                 saved/<id>/<path>          what a forced rollback discarded
                 history.jsonl              one line an operation

``base`` is the inventory's ``state_dir``, else /var/lib/ddtree-deploy, else ``.ddtree-deploy`` beside the
environment. Whichever already knows the root wins, so that every client and user finds the same state.
Everything is plain JSON that a person can read and, at need, repair.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

from . import records
from .protocol import AgentError
from .root import Place
from .tree import read_all

SCHEMA = 1
DEFAULT_BASE = "/var/lib/ddtree-deploy"
KEEP_TRANSACTIONS = 20
_FOLDER_MODE, _FILE_MODE = 0o750, 0o640
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\Z")


def check_id(value: Any) -> str:
    """A transaction id fit to be a file name; raises AgentError DD307."""
    if not isinstance(value, str) or not _ID.match(value):
        raise AgentError("DD307", "bad transaction id %r" % (value,))
    return value


def _key(identity: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", identity)[-60:].strip("-.")
    return "%s-%s" % (readable, hashlib.sha256(os.fsencode(identity)).hexdigest()[:12])


class State:
    """The state folder of one root. ``exists`` is False until something was recorded there."""

    def __init__(self, root: Place, chosen: Optional[str]) -> None:
        key = _key(root.identity)
        self._identity = root.identity
        self._check_path = root.check_path
        self._folders = [os.path.join(base, key) for base in ([chosen] if chosen else [DEFAULT_BASE, root.beside])]
        known = [folder for folder in self._folders if _is_state(folder)]
        self.folder = known[0] if known else self._folders[0]
        self.exists = bool(known)
        self._gid = root.gid
        if self.exists:
            self._check_owner()
            self._check_schema()

    def _check_owner(self) -> None:
        """Whoever owns the state can make us write its bytes: only root's and our own is believed."""
        info = os.lstat(self.folder)
        if not stat.S_ISDIR(info.st_mode):
            raise AgentError("DD508", "%s is not a folder" % self.folder)
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise AgentError(
                "DD508",
                "%s belongs to uid %d with mode %o: others could forge it"
                % (self.folder, info.st_uid, stat.S_IMODE(info.st_mode)),
                "deploy as its owner, or choose another state_dir",
            )

    def _check_schema(self) -> None:
        text = self._read_text("schema")
        if text is None or not re.match(r"[1-9][0-9]{0,8}\Z", text.strip(), re.ASCII):
            raise AgentError("DD508", "%s/schema is missing or damaged" % self.folder, "it should hold: %d" % SCHEMA)
        if int(text) > SCHEMA:
            raise AgentError(
                "DD508",
                "%s was written by a newer ddtree-deploy (schema %s)" % (self.folder, text.strip()),
                "use that version or a later one",
            )
        if (self._read_text("root") or "").rstrip("\n") != self._identity:
            raise AgentError("DD508", "%s belongs to another root" % self.folder)

    # --- reading

    def _read_text(self, name: str) -> Optional[str]:
        try:
            return _read(os.path.join(self.folder, name)).decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise AgentError(
                "DD508",
                "cannot read %s/%s: %s" % (self.folder, name, error.strerror),
                "its group may read it: join that group or use sudo",
            ) from None

    def _read_json(self, name: str) -> Any:
        text = self._read_text(name)
        if text is None:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise AgentError("DD508", "%s/%s is damaged: %s" % (self.folder, name, error)) from None

    def record(self) -> Dict[str, Any]:
        """``{"layers": [...], "install": {...}}``: the applied sets, oldest first."""
        value = self._read_json("record.json") if self.exists else None
        if value is None:
            return {"layers": [], "transaction": None}
        with self._sound("record.json"):
            records.check_record(value, self._check_path)
        result: Dict[str, Any] = value
        return result

    @contextlib.contextmanager
    def _sound(self, name: str) -> Iterator[None]:
        try:
            yield
        except (AgentError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise AgentError(
                "DD508",
                "%s/%s is damaged: %s" % (self.folder, name, error),
                "mend it by hand, or put it back from a backup",
            ) from None

    def journal(self, transaction: str) -> Optional[Dict[str, Any]]:
        """The journal of a transaction, None if it never wrote one."""
        name = "transactions/%s/journal.json" % transaction
        value = self._read_json(name) if self.exists else None
        if value is None:
            return None
        with self._sound(name):
            records.check_journal(value, transaction, self._check_path)
        result: Dict[str, Any] = value
        return result

    def transactions(self) -> List[str]:
        """Ids of all transactions, oldest first by this host's clock."""
        folder = os.path.join(self.folder, "transactions")
        try:
            return sorted(os.listdir(folder), key=lambda name: os.stat(os.path.join(folder, name)).st_mtime_ns)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise AgentError("DD508", "cannot read %s: %s" % (self.folder, error.strerror)) from None

    def interrupted(self) -> Optional[Dict[str, Any]]:
        """The journal that did not reach its end, if there is one; meaningful while no deployer holds the lock."""
        for transaction in reversed(self.transactions() if self.exists else []):
            journal = self.journal(transaction)
            if journal and journal["state"] not in ("committed", "undone"):
                return journal
        return None

    def object(self, digest: str) -> bytes:
        """A stored content, verified. Raises AgentError DD508 when it is gone or damaged."""
        path = os.path.join(self.folder, "objects", digest)
        try:
            data = _read(path)
        except OSError as error:
            raise AgentError("DD508", "stored content %s: %s" % (path, error.strerror)) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise AgentError("DD508", "stored content %s is damaged" % path)
        return data

    def history(self) -> List[Dict[str, Any]]:
        """Every recorded operation, oldest first; a line that a crash cut short is skipped."""
        entries = []
        for line in (self._read_text("history.jsonl") or "").splitlines() if self.exists else []:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if records.is_history(entry):
                entries.append(entry)
        return entries

    def holder(self) -> Optional[Dict[str, Any]]:
        """Who holds the lock right now, None if nobody does."""
        if not self.exists:
            return None
        try:
            fd = os.open(os.path.join(self.folder, "lock"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise AgentError("DD508", "cannot read %s/lock: %s" % (self.folder, error.strerror)) from None
        try:
            return None if _try_lock(fd, fcntl.LOCK_SH) else _holder_in(fd)
        finally:
            os.close(fd)

    # --- writing

    def create(self) -> None:
        """Make the state folder if there is none. Raises AgentError DD508 when no place can be written."""
        if self.exists:
            return
        problems = []
        for folder in self._folders:
            try:
                self._create(folder)
            except OSError as error:
                problems.append("%s: %s" % (folder, error.strerror))
                continue
            self.folder, self.exists = folder, True
            return
        raise AgentError(
            "DD508",
            "no place on the host to keep the lock and the pre-images",
            "set state_dir in the inventory to a folder that you may write, or use sudo",
            problems,
        )

    def _create(self, folder: str) -> None:
        os.makedirs(os.path.dirname(folder), mode=0o755, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, _FOLDER_MODE)
        self.folder = folder
        self._check_owner()
        self._own(folder, _FOLDER_MODE)
        for name in ("objects", "transactions", "saved"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(folder, name))
            self._own(os.path.join(folder, name), _FOLDER_MODE)
        self._write(folder, "root", (self._identity + "\n").encode("utf-8", "surrogateescape"))
        self._write(folder, "schema", b"%d\n" % SCHEMA)
        sync_folder(os.path.dirname(folder))

    def _own(self, path: str, mode: int) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with contextlib.suppress(PermissionError):
                if os.fstat(fd).st_gid != self._gid:
                    os.fchown(fd, -1, self._gid)
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def _write(self, folder: str, name: str, data: bytes) -> None:
        path = os.path.join(folder, name)
        temporary = "%s.%d.new" % (path, os.getpid())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except OSError:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        self._own(temporary, _FILE_MODE)
        os.replace(temporary, path)
        sync_folder(os.path.dirname(path))

    def write_record(self, record: Dict[str, Any]) -> None:
        """Replace record.json as a whole; on disk when this returns."""
        self._write(self.folder, "record.json", _dump(record))

    def write_journal(self, journal: Dict[str, Any]) -> None:
        """Replace the journal of ``journal["id"]`` as a whole; on disk when this returns."""
        folder = os.path.join(self.folder, "transactions", journal["id"])
        if not os.path.isdir(folder):
            os.mkdir(folder)
            self._own(folder, _FOLDER_MODE)
            sync_folder(os.path.dirname(folder))
        self._write(folder, "journal.json", _dump(journal))

    def drop_journal(self, transaction: str) -> None:
        """Forget a transaction that changed nothing."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.folder, "transactions", transaction, "journal.json"))

    def add_object(self, data: bytes) -> str:
        """Store content under its sha256; on disk, with its folder entry, when this returns."""
        digest = hashlib.sha256(data).hexdigest()
        folder = os.path.join(self.folder, "objects")
        path = os.path.join(folder, digest)
        try:
            if _read(path) == data:
                return digest
        except FileNotFoundError:
            pass
        self._write(folder, digest, data)
        return digest

    def save(self, transaction: str, path: str, data: bytes) -> str:
        """Keep bytes that a forced operation discards; returns where they lie on the host."""
        target = os.path.join(self.folder, "saved", transaction, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        self._write(os.path.dirname(target), os.path.basename(target), data)
        return target

    def append_history(self, entry: Dict[str, Any]) -> None:
        """Append one line to the history, once for each (id, kind)."""
        if any((old.get("id"), old.get("kind")) == (entry["id"], entry["kind"]) for old in self.history()):
            return
        path = os.path.join(self.folder, "history.jsonl")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            line = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode("ascii")
            os.write(fd, (b"\n" if torn else b"") + line + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        self._own(path, _FILE_MODE)

    def prune(self) -> None:
        """Drop all but the newest finished transactions, every content that nothing refers to any more, and
        what a crash left half-written. Only with the lock held.
        """
        transactions = os.path.join(self.folder, "transactions")
        begun = [name for name in self.transactions() if self.journal(name)]
        for name in os.listdir(transactions):
            folder, keep = os.path.join(transactions, name), name in begun[-KEEP_TRANSACTIONS:]
            _remove_files(folder, _is_half_written if keep else _always)
            if not keep:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        _remove_files(self.folder, _is_half_written)
        kept: Set[str] = set(_digests(self.record()))
        for name in self.transactions():
            kept.update(_digests(self.journal(name)))
        _remove_files(os.path.join(self.folder, "objects"), lambda name: name not in kept)

    @contextlib.contextmanager
    def lock(self, who: Dict[str, Any], wait: float, gone: Callable[[], bool]) -> Iterator[None]:
        """Hold the root's lock; it goes with the process. Raises AgentError DD501 naming the holder.

        ``gone()``: whether whoever asked for this went away; then waiting ends, and nothing is done.
        """
        self.create()
        path = os.path.join(self.folder, "lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
        except OSError as error:
            raise AgentError(
                "DD508",
                "cannot write %s: %s" % (path, error.strerror),
                "deploy as the user who owns it, or set sudo in the inventory",
            ) from None
        try:
            deadline = time.monotonic() + wait
            while not _try_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() >= deadline:
                    holder = _holder_in(fd)
                    raise AgentError(
                        "DD501",
                        "locked by %s since %s (%s, pid %s)"
                        % tuple(holder.get(key, "?") for key in ("who", "since", "command", "pid")),
                        "wait for it, or give --wait SECONDS",
                    )
                if gone():
                    raise AgentError("DD308", "the client went away while it waited for the lock")
                time.sleep(0.05)
            if gone():
                raise AgentError("DD308", "the client went away before anything was done")
            self._own(path, _FILE_MODE)
            holder = dict(who, pid=os.getpid(), since=utc_now())
            os.ftruncate(fd, 0)
            os.pwrite(fd, _dump(holder), 0)
            try:
                yield
            finally:
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return read_all(fd)
    finally:
        os.close(fd)


def _is_state(folder: str) -> bool:
    try:
        os.stat(os.path.join(folder, "schema"))
    except PermissionError:
        raise AgentError(
            "DD508",
            "cannot read %s" % folder,
            "its group may read it: join that group or use sudo",
        ) from None
    except OSError:
        return False
    return True


def _is_half_written(name: str) -> bool:
    return name.endswith(".new")


def _always(_name: str) -> bool:
    return True


def _remove_files(folder: str, unwanted: Callable[[str], bool]) -> None:
    """Remove the unwanted files of a folder; what is no file was not put there by us, and stays."""
    try:
        names = os.listdir(folder)
    except NotADirectoryError:
        return
    for name in names:
        if unwanted(name):
            with contextlib.suppress(IsADirectoryError, PermissionError):
                os.unlink(os.path.join(folder, name))


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise AgentError(
            "DD508",
            "the state folder's file system cannot lock: %s" % error.strerror,
            "set state_dir in the inventory to a local file system",
        ) from None
    return True


def _holder_in(fd: int) -> Dict[str, Any]:
    os.lseek(fd, 0, os.SEEK_SET)
    try:
        value = json.loads(read_all(fd).decode("utf-8", "replace"))
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"who": "someone"}


def _digests(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "sha256" and isinstance(item, str):
                yield item
            else:
                yield from _digests(item)
    elif isinstance(value, list):
        for item in value:
            yield from _digests(item)


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode("ascii")


def sync_folder(path: str) -> None:
    """Make a folder's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def utc_now() -> str:
    """Now, in UTC, to the second, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
