"""One transaction on a tree: stage, commit, verify, or undo; and what is left to do after a crash.

The journal goes through these states, each on disk before the step that follows it::

    prepared ── stage ── staged ── replace one by one ── replaced ── record ── committed
        └───────────────────┴──────────── undo ────────────┴──────────────────── undone

Before ``prepared`` nothing in the tree was touched and every pre-image is stored. A crash at any point
leaves each file either at its entry before or at its entry after, since files change by rename alone;
:meth:`Transaction.recover` tells them apart by hash. All after: finish. Anything else: undo.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import py_compile
import signal
import stat
import subprocess
import sys
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from .protocol import AgentError
from .root import Place
from .state import State
from .tree import TEMP_PREFIX, Entry, Tree, local_name, same, split_path, write_new

SMOKE_TIMEOUT_S = 600.0
# A child of an agent that is killed must not go on: the kernel kills it too, where it can be asked to.
_SMOKE = """
import contextlib, importlib, os, signal, sys
with contextlib.suppress(ImportError, AttributeError, OSError):
    import ctypes
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the agent is gone")
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    print(name, flush=True)
    importlib.import_module(name)
"""
_STAT_KEYS = ("st_dev", "st_ino", "st_size", "st_mtime_ns")


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no hang-up or Ctrl-C stop a commit half-way: it takes milliseconds, and undoing it takes more."""
    kinds = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(kind, signal.SIG_IGN) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, old):
            signal.signal(kind, handler)


class Transaction:
    """The operations of one journal on one tree: ``{"path", "before", "after"}`` each, all or none."""

    def __init__(self, root: Place, tree: Tree, state: State, journal: Dict[str, Any]) -> None:
        self._root = root
        self._tree = tree
        self._state = state
        self.journal = journal
        self.operations: List[Dict[str, Any]] = journal["operations"]
        self.notes: List[str] = []
        self._stats: Dict[str, os.stat_result] = {}

    def carry_out(self, contents: Dict[str, bytes], say_checking: Callable[[], None]) -> Dict[str, Any]:
        """Drive the transaction to its end; returns what was read back. Raises AgentError after undoing.

        ``say_checking`` is called before the check that the journal's ``smoke`` asks for, which may take long.
        """
        with uninterrupted():
            self.prepare(contents)
            try:
                self.stage()
            except BaseException:
                self.abort()
                raise
            try:
                self.replace()
                self.verify()
                self.refresh_bytecode()
                if self.journal["smoke"]:
                    say_checking()
                    self.smoke()
                self.commit()
            except Exception as error:  # noqa: BLE001 - whatever went wrong, the tree goes back
                self.undo("undone: %s" % error)
                raise AgentError(
                    "DD505",
                    "the transaction was undone: %s" % error,
                    "every file was read back and is as before",
                    getattr(error, "details", []),
                ) from None
            self.close()
        return {
            "transaction": self.journal["id"],
            "files": {item["path"]: self._tree.entry(item["path"])[0] for item in self.operations},
            "notes": self.notes,
            "state_dir": self._state.folder,
        }

    # --- forward

    def prepare(self, contents: Dict[str, bytes]) -> None:
        """Check every file against its entry before, store pre- and post-images, write the journal.

        ``contents``: post-images by sha256. Raises AgentError with nothing in the tree touched.
        """
        wrong: List[str] = []
        for index, operation in enumerate(self.operations):
            entry, info, data = self._tree.entry(operation["path"])
            if not same(entry, operation["before"]):
                wrong.append("%s: planned on %s, found %s" % (operation["path"], say(operation["before"]), say(entry)))
                continue
            if info is not None:
                self._stats[operation["path"]] = info
                operation["owner"] = [info.st_uid, info.st_gid]
                if info.st_nlink > 1 and stat.S_ISREG(info.st_mode):
                    self.notes.append(
                        "%s is hard-linked (a package cache?); only this copy changes" % operation["path"]
                    )
            if operation["before"] is not None and operation["before"]["kind"] == "file":
                contents[operation["before"]["sha256"]] = data
            operation["temporary"] = "%s%s-%d.tmp" % (TEMP_PREFIX, self.journal["id"], index)
        if wrong:
            raise AgentError("DD502", "the tree changed since it was planned", "run the command again", wrong)
        self.journal["folders"] = self._missing_folders()
        self._annotate_layers()
        try:
            for digest in sorted(contents):
                self._state.add_object(contents[digest])
            self._enter("prepared")
        except OSError as error:
            raise _unwritable(self._state.folder, error) from None

    def _annotate_layers(self) -> None:
        """Note in the new layers what their rollback will need: owners of deleted files, folders made."""
        owners = {operation["path"]: operation.get("owner") for operation in self.operations}
        new = [item for item in self.journal["record"]["layers"] if item.get("transaction") == self.journal["id"]]
        for layer in new:
            for item in layer["files"]:
                if item["after"] is None and owners.get(item["path"]):
                    item["owner"] = owners[item["path"]]
            layer["folders"] = layer.get("folders", []) + [
                folder
                for folder in self.journal["folders"]
                if any(item["path"].startswith(folder + "/") for item in layer["files"])
            ]

    def _missing_folders(self) -> List[str]:
        missing: List[str] = []
        for operation in self.operations:
            parts = operation["path"].split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                folder = "/".join(parts[:depth])
                if operation["after"] is None or folder in missing:
                    continue
                fd = self._tree.open_folder(folder)
                if fd is None:
                    missing.append(folder)
                else:
                    os.close(fd)
        return missing

    def _enter(self, state: str) -> None:
        self.journal["state"] = state
        self._state.write_journal(self.journal)

    def stage(self) -> None:
        """Write every new file beside its target. On failure nothing has changed and the temporaries are gone."""
        try:
            for folder in self.journal["folders"]:
                self._make_folder(folder)
            for operation in self.operations:
                self._stage(operation, operation["after"])
            self._enter("staged")
        except OSError as error:
            raise _unwritable(self._root.site, error) from None

    def _make_folder(self, folder: str) -> None:
        parent, name = split_path(folder)
        fd = self._open(parent)
        try:
            like = os.fstat(fd)
            os.mkdir(name, stat.S_IMODE(like.st_mode), dir_fd=fd)
            made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            try:
                if os.geteuid() == 0:
                    os.fchown(made, like.st_uid, like.st_gid)
                os.fchmod(made, stat.S_IMODE(like.st_mode))
            finally:
                os.close(made)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _open(self, folder: str) -> int:
        fd = self._tree.open_folder(folder)
        if fd is None:
            raise OSError(errno.ENOENT, "folder %s is gone" % folder)
        return fd

    def _stage(self, operation: Dict[str, Any], entry: Entry) -> None:
        """Put ``entry`` under the operation's temporary name; owner and attributes are those of what it replaces."""
        if entry is None:
            return
        folder, name = split_path(operation["path"])
        fd = self._open(folder)
        source = -1
        try:
            if entry["kind"] == "link":
                os.symlink(entry["target"], operation["temporary"], dir_fd=fd)
                return
            owner = operation.get("owner")
            try:
                current = os.lstat(name, dir_fd=fd)
                if stat.S_ISREG(current.st_mode):
                    owner = [current.st_uid, current.st_gid]
                    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            except FileNotFoundError:
                pass
            if owner is None and os.geteuid() == 0:
                around = os.fstat(fd)
                owner = [around.st_uid, around.st_gid]
            data = self._state.object(entry["sha256"])
            write_new(fd, operation["temporary"], data, entry["mode"], owner, source)
        finally:
            if source >= 0:
                os.close(source)
            os.close(fd)

    def replace(self) -> None:
        """Move every staged file onto its target. Any failure leaves undo to the caller."""
        for operation in self.operations:
            self._check_untouched(operation["path"])
            self._replace(operation, operation["after"])
        self._sync_folders()

    def _check_untouched(self, path: str) -> None:
        expected = self._stats.get(path)
        folder, name = split_path(path)
        fd = self._open(folder)
        try:
            now: Optional[os.stat_result] = os.lstat(name, dir_fd=fd)
        except FileNotFoundError:
            now = None
        finally:
            os.close(fd)
        if [getattr(now, key, None) for key in _STAT_KEYS] != [getattr(expected, key, None) for key in _STAT_KEYS]:
            raise AgentError("DD502", "%s changed while the transaction ran" % path, "run the command again")

    def _replace(self, operation: Dict[str, Any], entry: Entry) -> None:
        folder, name = split_path(operation["path"])
        fd = self._open(folder)
        try:
            if entry is None:
                os.unlink(name, dir_fd=fd)
            else:
                os.replace(operation["temporary"], name, src_dir_fd=fd, dst_dir_fd=fd)
        finally:
            os.close(fd)

    def _sync_folders(self) -> None:
        for folder in sorted({operation["path"].rpartition("/")[0] for operation in self.operations}):
            fd = self._tree.open_folder(folder)
            if fd is not None:
                os.fsync(fd)
                os.close(fd)

    def verify(self) -> None:
        """Read every file back. Raises AgentError DD505 naming what is not as planned."""
        wrong = []
        for operation in self.operations:
            entry = self._tree.entry(operation["path"])[0]
            if not same(entry, operation["after"]):
                wrong.append("%s: wanted %s, is %s" % (operation["path"], say(operation["after"]), say(entry)))
        if wrong:
            raise AgentError("DD505", "the files read back are not what was written", None, wrong)

    def refresh_bytecode(self) -> None:
        """Drop the bytecode of every changed module; recompile what this interpreter had compiled before.

        A pyc is trusted by the interpreter when the source's size and whole-second mtime agree (or always,
        if unchecked), so an old one could outlive its source. One that can neither go nor be trusted is noted;
        for one that would be trusted this raises AgentError DD504.
        """
        for operation in self.operations:
            if operation["path"].endswith(".py"):
                self._refresh_bytecode(operation["path"])

    def _refresh_bytecode(self, path: str) -> None:
        folder, name = split_path(path)
        try:
            fd = self._tree.open_folder(folder + "/__pycache__")
        except (AgentError, OSError) as error:
            self.notes.append("bytecode of %s was left alone: %s" % (path, error))
            return
        if fd is None:
            return
        try:
            stem = name[:-3] + "."
            for cached in sorted(os.listdir(fd)):
                if cached.startswith(stem) and cached.endswith(".pyc"):
                    self._refresh_one(fd, path, cached)
            with contextlib.suppress(OSError):
                os.fsync(fd)
        finally:
            os.close(fd)

    def _refresh_one(self, fd: int, path: str, cached: str) -> None:
        info = os.lstat(cached, dir_fd=fd)
        head = _pyc_head(fd, cached)
        mode = _invalidation_mode(head)
        try:
            os.unlink(cached, dir_fd=fd)
        except OSError as error:
            if self._would_run(path, head):
                raise AgentError(
                    "DD504",
                    "stale bytecode of %s cannot be removed: %s" % (path, error.strerror),
                    "deploy as the owner of its __pycache__, or set sudo in the inventory",
                ) from None
            self.notes.append("old bytecode of %s stays, python will not trust it: %s" % (path, error.strerror))
            return
        if mode is not None and os.path.exists(os.path.join(self._root.site, local_name(path))):
            self._recompile(path, cached, mode, info)

    def _would_run(self, path: str, head: bytes) -> bool:
        """Whether this interpreter would run a pyc with this head for the source as it is now."""
        mode = _invalidation_mode(head)
        if mode is None or mode is py_compile.PycInvalidationMode.CHECKED_HASH:
            return False
        if mode is py_compile.PycInvalidationMode.UNCHECKED_HASH:
            return True
        try:
            source = os.stat(os.path.join(self._root.site, local_name(path)))
        except OSError:
            return False
        told = int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
        return told == (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)

    def _recompile(self, path: str, cached: str, mode: py_compile.PycInvalidationMode, like: os.stat_result) -> None:
        source = os.path.join(self._root.site, local_name(path))
        for level in ("", "1", "2"):
            target = importlib.util.cache_from_source(source, optimization=level)
            if os.path.basename(target) != cached:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    py_compile.compile(source, target, doraise=True, optimize=int(level or 0), invalidation_mode=mode)
                os.chmod(target, stat.S_IMODE(like.st_mode))
                if os.geteuid() == 0:
                    os.chown(target, like.st_uid, like.st_gid)
            except (OSError, py_compile.PyCompileError):
                # Without a pyc the interpreter compiles by itself; a half-made one must not stay.
                if os.path.exists(target):
                    os.unlink(target)

    def smoke(self) -> None:
        """Import the changed modules in a fresh interpreter. Raises AgentError DD505 with the error's last line."""
        modules = []
        for operation in self.operations:
            if operation["path"].endswith(".py") and operation["after"] is not None:
                parts = operation["path"][:-3].split("/")
                modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        try:
            result = subprocess.run(
                [sys.executable, "-c", _SMOKE, str(os.getpid()), self._root.site, *modules],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=SMOKE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise AgentError("DD505", "importing the patched modules took over %d s" % SMOKE_TIMEOUT_S) from None
        if result.returncode:
            at = (result.stdout.decode("utf-8", "replace").split() or ["?"])[-1]
            lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
            raise AgentError(
                "DD505",
                "importing %s failed: %s" % (at, lines[-1] if lines else "status %d" % result.returncode),
                "the service would not have started either; the tree is as before",
                lines[-12:],
            )
        self.journal["smoke"] = False

    def commit(self) -> None:
        """Write the record: from here on the transaction stands, whatever happens."""
        self._state.write_record(dict(self.journal["record"], transaction=self.journal["id"]))

    def close(self) -> None:
        """Write the history and the end of the journal. What fails here is a note: the change stands."""
        steps: List[Callable[[], Any]] = [
            lambda: self._state.append_history(dict(self.journal["history"], outcome="done")),
            lambda: remove_folders(self._tree, self.journal["emptied"]),
            lambda: self._enter("committed"),
            self._state.prune,
        ]
        for step in steps:
            try:
                step()
            except (OSError, AgentError) as error:
                self.notes.append("the change stands, but its bookkeeping is not complete: %s" % error)

    # --- back

    def abort(self) -> None:
        """Give up before anything was replaced: the tree is as before, only the staged files go."""
        with contextlib.suppress(OSError, AgentError):
            self.remove_temporaries()
            remove_folders(self._tree, self.journal["folders"])
        try:
            self._enter("undone")
        except OSError:
            # A full disk has room for no journal, but for less of one: without it nothing was ever begun.
            self._state.drop_journal(self.journal["id"])

    def undo(self, outcome: str) -> List[str]:
        """Bring every file back to its entry before; returns the paths that had to be restored.

        Raises AgentError DD506 if a file could not be restored, DD510 if a file is neither as before nor as
        after (someone else edited it): then nothing is restored.
        """
        todo, foreign = self._sort_out()
        if foreign:
            raise AgentError(
                "DD510",
                "transaction %s cannot be undone: files were edited since" % self.journal["id"],
                "save your edits elsewhere, then `ddtree-deploy recover --force` puts the files back",
                foreign,
            )
        return self._restore(todo, outcome)

    def _sort_out(self) -> Tuple[List[Dict[str, Any]], List[str]]:
        """The operations whose file is as after; and what was found where a file is neither before nor after."""
        done, foreign = [], []
        for operation in self.operations:
            entry = self._tree.entry(operation["path"])[0]
            if same(entry, operation["before"]):
                continue
            if same(entry, operation["after"]):
                done.append(operation)
            else:
                foreign.append("%s: found %s" % (operation["path"], say(entry)))
        return done, foreign

    def force_undo(self) -> List[str]:
        """As :meth:`undo`, but foreign edits are saved in the state folder and then replaced."""
        todo = []
        for operation in self.operations:
            entry, _info, data = self._tree.entry(operation["path"])
            if same(entry, operation["before"]):
                continue
            if not same(entry, operation["after"]) and entry is not None and entry["kind"] == "file":
                self.notes.append("saved %s" % self._state.save(self.journal["id"], operation["path"], data))
            todo.append(operation)
        return self._restore(todo, "undone by recover --force")

    def _restore(self, todo: List[Dict[str, Any]], outcome: str) -> List[str]:
        failed = []
        self.remove_temporaries()
        for operation in reversed(todo):
            try:
                self._stage(operation, operation["before"])
                self._replace(operation, operation["before"])
            except FileNotFoundError:
                if operation["before"] is not None:
                    failed.append("%s: its folder is gone" % operation["path"])
            except (OSError, AgentError) as error:
                failed.append("%s: %s" % (operation["path"], error))
        self._sync_folders()
        for operation in self.operations:
            entry = self._tree.entry(operation["path"])[0]
            if not same(entry, operation["before"]):
                failed.append("%s: is %s" % (operation["path"], say(entry)))
        try:
            self.refresh_bytecode()
        except AgentError as error:
            self.notes.append(str(error))
        self.remove_temporaries()
        if failed:
            raise AgentError(
                "DD506",
                "transaction %s could not be undone" % self.journal["id"],
                "mend the cause, then run `ddtree-deploy recover`; pre-images are in %s" % self._state.folder,
                failed,
            )
        remove_folders(self._tree, self.journal["folders"])
        self._state.append_history(dict(self.journal["history"], outcome=outcome))
        self._enter("undone")
        return [operation["path"] for operation in todo]

    def remove_temporaries(self) -> None:
        """Remove the staged files that are still there."""
        for operation in self.operations:
            fd = self._tree.open_folder(operation["path"].rpartition("/")[0])
            if fd is None:
                continue
            try:
                os.unlink(operation["temporary"], dir_fd=fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.EROFS:  # where nothing can be written, nothing was left either
                    raise
            finally:
                os.close(fd)

    def recover(self) -> Tuple[str, List[str]]:
        """Finish or undo after a crash: ("finished" | "undone", the paths restored)."""
        if self._state.record().get("transaction") == self.journal["id"]:
            self.close()
            return "finished", []
        done, foreign = self._sort_out()
        if not foreign and len(done) == len(self.operations) and not self.journal["smoke"]:
            self.remove_temporaries()
            self.refresh_bytecode()
            self.commit()
            self.close()
            return "finished", []
        return "undone", self.undo("undone by recover")


def check_compiles(operations: List[Dict[str, Any]], contents: Dict[str, bytes]) -> None:
    """Compile every module as it will be, in memory. Raises AgentError DD112 naming each file and line.

    A file that did not compile before either is no module of the engine's, and is let through.
    """
    bad = []
    for operation in operations:
        problem = _compile_problem(operation["path"], operation["after"], contents)
        if problem and not _compile_problem(operation["path"], operation["before"], contents):
            bad.append("%s: %s" % (operation["path"], problem))
    if bad:
        raise AgentError(
            "DD112",
            "%d file(s) would not compile on python %d.%d" % (len(bad), *sys.version_info[:2]),
            "the patch is wrong or made for another version",
            bad,
        )


def _compile_problem(path: str, entry: Entry, contents: Dict[str, bytes]) -> Optional[str]:
    if not path.endswith(".py") or entry is None or entry["kind"] != "file":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(contents[entry["sha256"]], path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return "line %s: %s" % (getattr(error, "lineno", "?"), error)
    except (RecursionError, MemoryError) as error:
        return "too deeply nested: %s" % type(error).__name__
    return None


def remove_folders(tree: Tree, folders: List[str]) -> None:
    """Remove folders that a transaction made, deepest first, where nothing but bytecode is left in them."""
    for folder in sorted(folders, key=len, reverse=True):
        parent, name = split_path(folder)
        fd = tree.open_folder(folder)
        if fd is None:
            continue
        os.close(fd)
        cache = tree.open_folder(folder + "/__pycache__")
        above = tree.open_folder(parent)
        if above is None:
            continue
        try:
            if cache is not None and not os.listdir(cache):
                os.rmdir("%s/__pycache__" % name, dir_fd=above)
            os.rmdir(name, dir_fd=above)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            os.close(above)
            if cache is not None:
                os.close(cache)


def _pyc_head(fd: int, name: str) -> bytes:
    """The first 16 bytes of a pyc; nothing of what is no regular file."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return b""
    try:
        return os.read(handle, 16) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    finally:
        os.close(handle)


def _invalidation_mode(head: bytes) -> Optional[py_compile.PycInvalidationMode]:
    """How a pyc with this head says it is to be checked; None for one that this interpreter did not make."""
    if len(head) < 16 or head[:4] != importlib.util.MAGIC_NUMBER:
        return None
    flags = int.from_bytes(head[4:8], "little")
    if not flags & 1:
        return py_compile.PycInvalidationMode.TIMESTAMP
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    return checked if flags & 2 else py_compile.PycInvalidationMode.UNCHECKED_HASH


def _unwritable(where: str, error: OSError) -> AgentError:
    hints = {
        errno.ENOSPC: "free some space on the host; nothing was changed",
        errno.EDQUOT: "the quota is used up; nothing was changed",
        errno.EROFS: "the file system is read-only; nothing was changed",
        errno.EACCES: "deploy as the owner of the tree, or set sudo in the inventory; nothing was changed",
        errno.EPERM: "deploy as the owner of the tree, or set sudo in the inventory; nothing was changed",
    }
    name = error.filename if isinstance(error.filename, str) else ""
    return AgentError(
        "DD504",
        "cannot write below %s%s: %s" % (where, " (%s)" % name if name else "", error.strerror or error),
        hints.get(error.errno or 0, "nothing was changed"),
    )


def say(entry: Entry) -> str:
    """An entry in a few words for a person."""
    if entry is None:
        return "nothing"
    if entry["kind"] == "file":
        return "sha256 %s mode %o" % (entry["sha256"][:12], entry["mode"])
    if entry["kind"] == "link":
        return "a link to %s" % entry["target"]
    return "no regular file"
