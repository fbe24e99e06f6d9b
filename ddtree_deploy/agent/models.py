"""Model folders for the client: configuration and size, read without loading anything."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict

from .doctor_models import gather
from .protocol import AgentError

if TYPE_CHECKING:
    from .call import Call

MAX_FOLDERS = 4


def run_models(call: Call) -> Dict[str, Any]:
    """The request's ``folders`` (name -> absolute path): for each ``there``, ``config``, its error, weight bytes."""
    folders = call.request.get("folders")
    if not isinstance(folders, dict) or len(folders) > MAX_FOLDERS:
        raise AgentError("DD307", "the request names no folders, or too many")
    found: Dict[str, Any] = {}
    for name, folder in folders.items():
        if not isinstance(folder, str) or not os.path.isabs(folder):
            raise AgentError("DD307", "a model's folder is not an absolute path")
        facts = gather(folder)
        found[str(name)] = {
            "there": facts["there"],
            "readable": facts["readable"],
            "config": facts["config"],
            "config_error": facts["config_error"],
            "weight_files": len(facts["weights"]),
            "weight_bytes": facts["bytes"],
        }
    return {"models": found}
