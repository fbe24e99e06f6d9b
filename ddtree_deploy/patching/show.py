"""Patch sets as plain unified diffs, for people and for other tools."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.patchset import PatchSet


def show(sets: Sequence[PatchSet], engine: str, *, only: bool = False) -> bytes:
    """The sets (in apply order) for one engine version as one diff: ``git apply -p1`` and ``patch -p1`` take it.

    Patches are given byte for byte, each after a line of text that names it; added files become new-file diffs.
    (git reads one input as one change: a file that one set creates and a later one deletes stays with git.)
    ``only``: the last set alone. Raises DeployError DD109 for a set that does not list the version.
    """
    pieces = []
    for patch_set in sets[-1:] if only else sets:
        family = patch_set.family_for(engine)
        if family is None and engine in patch_set.unneeded and patch_set is not sets[-1]:
            continue
        if family is None:
            why = patch_set.unneeded.get(engine)
            if why is not None:
                raise DeployError("DD109", f"{patch_set.name} is not needed on {engine}: {why}")
            raise DeployError(
                "DD109",
                f"{patch_set.name} has no family for {engine}",
                f"it serves {', '.join(patch_set.engines)}",
            )
        title = f"# {patch_set.name} {patch_set.version}"
        for path, data in sorted(family.added.items()):
            pieces.append(f"{title}: new/{path}\n".encode() + new_file_diff(path, data))
        for patch in family.patches:
            end = b"" if patch.data.endswith(b"\n") else b"\n"
            pieces.append(f"{title}: {family.name}/{patch.name}\n".encode() + patch.data + end)
    return b"\n".join(pieces)


def new_file_diff(path: str, data: bytes) -> bytes:
    """A git diff that creates ``path`` (of plain characters) with exactly ``data``, mode 0644."""
    name = path.encode()
    head = b"diff --git a/%b b/%b\nnew file mode 100644\n" % (name, name)
    if not data:
        return head
    lines = data.split(b"\n")
    last = lines.pop()
    body = b"".join(b"+%b\n" % line for line in lines)
    if last:
        body += b"+%b\n\\ No newline at end of file\n" % last
    count = len(lines) + bool(last)
    return head + b"--- /dev/null\n+++ b/%b\n@@ -0,0 +1,%d @@\n%b" % (name, count, body)
