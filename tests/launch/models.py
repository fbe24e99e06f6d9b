"""The model configurations of tests/cases/launch/models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddtree_deploy.launch.models import Drafter, Model, read_drafter, read_model

FOLDER = Path(__file__).parent.parent / "cases" / "launch" / "models"


def config(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def target(name: str, **more: Any) -> Model:
    return read_model(config(name), f"{name}.json", **more)


def drafter(name: str, **more: Any) -> Drafter:
    return read_drafter(config(name), f"{name}.json", **more)
