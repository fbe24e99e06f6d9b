"""One compressed archive of a few texts: the same bytes for the same texts, never over a file that is there."""

from __future__ import annotations

import errno
import gzip
import io
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ddtree_deploy.errors import DeployError

SUFFIXES = (".tar.gz", ".tgz", ".zip")
_MODE = 0o600  # what is inside is for whom it is given to
#: What a file system without hard links says.
_NO_LINKS = (errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP)
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def check(path: Path) -> None:
    """Raises DeployError DD001 for another kind of file, DD007 where something is there already."""
    if not path.name.endswith(SUFFIXES) or path.name in SUFFIXES:
        raise DeployError(
            "DD001", f"{path.name}: the bundle is a .tar.gz or .zip file", "name it so: --out FILE.tar.gz"
        )
    if path.is_symlink() or path.exists():
        raise _there(path)


def write(path: Path, folder: str, members: Mapping[str, str]) -> bytes:
    """Write the members (name -> text) below ``folder`` of a new archive; returns its bytes.

    It appears whole or not at all. Raises DeployError DD001, DD007.
    """
    check(path)
    named = {f"{folder}/{name}": text.encode() for name, text in sorted(members.items())}
    data = _zip(named) if path.name.endswith(".zip") else _tar(named)
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        _place(Path(temporary), path)
    except FileExistsError:
        raise _there(path) from None
    except OSError as error:
        raise DeployError("DD007", f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return data


def _place(temporary: Path, path: Path) -> None:
    """Give the finished file its name; a link, unlike a rename, fails where a file is."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError from None
        temporary.rename(path)


def _there(path: Path) -> DeployError:
    return DeployError("DD007", f"{path} is there already, and nothing is written over", "name another: --out FILE")


def _tar(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), _MODE
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _zip(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, _ZIP_EPOCH)
            info.create_system, info.external_attr = 3, (0o100000 | _MODE) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return buffer.getvalue()
