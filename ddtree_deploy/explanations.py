"""What each code means, what usually causes it and what to do: the errors' codes and the doctor's, from one file."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources

from ddtree_deploy import errors
from ddtree_deploy.doctor import codes as doctor
from ddtree_deploy.errors import DeployError
from ddtree_deploy.wording import did_you_mean

FILE = "explanations.toml"
# As people copy it: DD101, dd101, 101, error[DD101].
_CODE = re.compile(r"(?:error\[)?(?:DD)?([0-9]{3})\]?:?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One code. ``exit_status`` is the error's, None for a check of the doctor, which then has an ``area``."""

    code: str
    title: str
    exit_status: int | None
    area: str | None
    means: str
    causes: tuple[str, ...]
    mends: tuple[str, ...]


@functools.cache
def explanations() -> dict[str, Explanation]:
    """Every code's explanation, in the order of the codes."""
    text = resources.files("ddtree_deploy").joinpath(FILE).read_text(encoding="utf-8")
    told = tomllib.loads(text)
    known: dict[str, tuple[str, int | None, str | None]] = {
        code: (title, int(status), None) for code, (title, status) in errors.CODES.items()
    }
    known |= {code: (title, None, area) for code, (area, title) in doctor.CODES.items()}
    return {
        code: Explanation(
            code, *known[code], told[code]["means"], tuple(told[code]["causes"]), tuple(told[code]["mends"])
        )
        for code in sorted(known)
    }


def explanation(word: str) -> Explanation:
    """The explanation of a code, however it is written. Raises DeployError DD001 for a code that does not exist."""
    known = explanations()
    match = _CODE.fullmatch(word.strip())
    code = f"DD{match[1]}" if match else word
    if code not in known:
        meant = did_you_mean(code, known)
        raise DeployError("DD001", f"there is no code {code}{meant}", "`ddtree-deploy explain` lists all")
    return known[code]
