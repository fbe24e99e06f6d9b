"""All checks over one set of facts. Pure: the same facts give the same findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ddtree_deploy.doctor.checks  # noqa: F401 - registers them
from ddtree_deploy.doctor.codes import AREAS, CODES
from ddtree_deploy.doctor.facts import Facts, NotKnown
from ddtree_deploy.doctor.findings import CHECKS, Check, Finding, Severity


def examine(facts: Mapping[str, Any]) -> list[Finding]:
    """The findings, worst first, then by area and code.

    A check whose facts are missing gives a note that says which; it never fails.
    """
    found = [finding for code in sorted(CHECKS) for finding in run_check(CHECKS[code], Facts(dict(facts)))]
    return sorted(found, key=lambda finding: (finding.severity, AREAS.index(finding.area), finding.code))


def run_check(check: Check, facts: Facts) -> list[Finding]:
    """What one check finds."""
    area, title = CODES[check.code]
    found: list[Finding] = []
    try:
        for saying in check.function(facts):
            # A service and its sibling may run into the same thing; it is said once.
            finding = Finding(check.code, area, saying.severity, saying.message, saying.evidence, saying.mend)
            if finding not in found:
                found.append(finding)
    except NotKnown as unknown:
        found.append(
            Finding(check.code, area, Severity.NOTE, f"not known: whether {title}", (str(unknown),), None, False)
        )
    return found
