"""What the engine's folders are held against: RECORD; without one, git HEAD and, by the client, published hashes."""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import Any, Dict, List, Optional

from .manifest import Manifest
from .root import Root

GIT_SECONDS = 20.0
MAX_LISTING = 32 * 1024 * 1024  # bytes
_LINK_MODE, _FILE_MODES = b"120000", (b"100644", b"100755", b"100664")


def survey(root: Root) -> Dict[str, Any]:
    """The engine's folders against RECORD: its ``state``, and the paths that ``differ``, are ``unlisted``, ``missing``.

    Where RECORD lists none of them (a source tree, an editable install), ``hashes`` (path -> sha256 of every file)
    and ``git``: None where no repository holds them, ``{"problem"}`` where git cannot say, else ``commit`` (HEAD),
    ``files`` (how many it has), and the paths that ``differ``, are ``untracked``, ``missing``.
    """
    manifest = Manifest(root, False)
    found: Dict[str, List[str]] = {"differs": [], "unlisted": []}
    listed = manifest.record.state == "present"
    head = None if listed else _Head.read(root)
    hashes: Dict[str, str] = {}
    for scan in manifest.scan():
        entry = scan.entry
        verdict = entry.get("record")
        if verdict in found:
            found[verdict].append(entry["path"])
        if not listed and entry["kind"] == "file":
            hashes[entry["path"]] = entry["sha256"]
        if head is not None:
            head.hold(entry, scan.data)
    summary: Dict[str, Any] = manifest.facts["record"]
    result = dict(summary, files=manifest.count, tree=manifest.tree, **found)
    if not listed:
        result.update(hashes=hashes, git=head.summary() if head else None)
    return result


class _Head:
    """The files of HEAD below the engine's folders, ticked off one by one."""

    def __init__(self, commit: str = "", problem: Optional[str] = None) -> None:
        self.commit = commit
        self.problem = problem
        self.blobs: Dict[str, str] = {}
        self.files = 0
        self.differs: List[str] = []
        self.untracked: List[str] = []

    @classmethod
    def read(cls, root: Root) -> Optional["_Head"]:
        """What the repository around the site has; None where there is none, or it holds nothing of the engine."""
        if not _in_repository(root.site):
            return None
        try:
            commit = _git(root.site, "rev-parse", "--verify", "HEAD").decode("ascii").strip()
            listing = _git(root.site, "ls-tree", "-r", "-z", "HEAD", "--", *root.parts())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return cls(problem=_words(error))
        head = cls(commit)
        for row in listing.split(b"\0"):
            facts, tab, path = row.partition(b"\t")
            words = facts.split()
            if tab and len(words) == 3 and (words[0] in _FILE_MODES or words[0] == _LINK_MODE):
                head.blobs[path.decode("utf-8", "surrogateescape")] = words[2].decode("ascii")
        head.files = len(head.blobs)
        return head if head.blobs else None

    def hold(self, entry: Dict[str, Any], data: Optional[bytes]) -> None:
        """Tick off what was found; built and large files are not compared."""
        if entry["kind"] == "link":
            data = entry["target"].encode("utf-8", "surrogateescape")
        blob = self.blobs.pop(entry["path"], None)
        if blob is None:
            self.untracked.append(entry["path"])
        elif data is not None and _blob_id(data, len(blob)) != blob:
            self.differs.append(entry["path"])

    def summary(self) -> Dict[str, Any]:
        """For the client, after every file was held."""
        if self.problem:
            return {"problem": self.problem}
        return {
            "commit": self.commit,
            "files": self.files,
            "differs": self.differs,
            "untracked": self.untracked,
            "missing": sorted(self.blobs),
        }


def _blob_id(data: bytes, length: int) -> str:
    """git's name for file contents: SHA-1, or SHA-256 in a repository of that kind."""
    digest = hashlib.sha256() if length == 64 else hashlib.sha1()  # noqa: S324 - git's choice, not ours
    digest.update(b"blob %d\0" % len(data))
    digest.update(data)
    return digest.hexdigest()


def _in_repository(folder: str) -> bool:
    while True:
        if os.path.lexists(os.path.join(folder, ".git")):
            return True
        above = os.path.dirname(folder)
        if above == folder:
            return False
        folder = above


def _git(site: str, *arguments: str) -> bytes:
    """What git prints. It only reads: no lock, no fetch, no prompt, and its own check of the owner stays on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment.update(LC_ALL="C", GIT_OPTIONAL_LOCKS="0", GIT_NO_LAZY_FETCH="1", GIT_TERMINAL_PROMPT="0")
    done = subprocess.run(
        ["git", "--no-pager", "-C", site, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        timeout=GIT_SECONDS,
    )
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ValueError(said[0] if said else "git ended with status %d" % done.returncode)
    if len(done.stdout) > MAX_LISTING:
        raise ValueError("the listing of HEAD is too long")
    return done.stdout


def _words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no git on the host"
    if isinstance(error, subprocess.TimeoutExpired):
        return "git gave no answer in %g s" % GIT_SECONDS
    return str(error)[:300]
