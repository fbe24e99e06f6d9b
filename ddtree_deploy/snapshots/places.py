"""The user's folders that this program keeps things in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from ddtree_deploy.errors import DeployError

_APP = "ddtree-deploy"


def data_folder() -> Path:
    """Where snapshots are kept: ``$DDTREE_DEPLOY_DATA``, or the platform's folder for user data."""
    return Path(os.environ.get("DDTREE_DEPLOY_DATA") or platformdirs.user_data_dir(_APP, appauthor=False))


def cache_folder() -> Path:
    """Where wheels are kept: ``$DDTREE_DEPLOY_CACHE``, or the platform's folder for caches."""
    return Path(os.environ.get("DDTREE_DEPLOY_CACHE") or platformdirs.user_cache_dir(_APP, appauthor=False))


def config_folder() -> Path:
    """Where the user's own settings are: the platform's folder for configuration."""
    return platformdirs.user_config_path(_APP)


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Turns an OSError about a folder of ours (full, not writable) into DeployError DD007."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(folder)
        raise DeployError("DD007", f"{where}: {error.strerror or error}") from error
