"""Whether an engine that answers also does what it was started for. Pure: facts in, findings out.

Accept lengths count the bonus token, so 1.0 means that no drafted token was ever accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

BROKEN_BELOW = 1.05
SUSPECT_BELOW = 1.5  # tokens a verify, on a text that any model continues alike


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found wrong, or could not be told."""

    severity: Literal["error", "warning"]
    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """``accept_length`` is in tokens a verify, of the most telling source; None where there is none."""

    findings: tuple[Finding, ...]
    accept_length: float | None

    @property
    def sound(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)


def judge(service: Mapping[str, Any], proof: Mapping[str, Any]) -> Verdict:
    """Judge what the agent's ``prove`` brought against what the service was installed to be."""
    findings = []
    completion = proof["completion"]
    if completion is None or not completion["text"].strip() or completion["tokens"] == 0:
        findings.append(Finding("error", "it gave no completion", "see the log: `ddtree-deploy logs`"))
    elif _is_noise(completion["text"]):
        findings.append(
            Finding(
                "error", "its completion is one character over and over", "a kernel computes NaN: try another backend"
            )
        )
    accept = _accept_length(proof["accept_length"])
    if service["algorithm"] != "none":
        findings += _speculation(service, proof["server"], accept)
    findings += [Finding("warning", f"could not be asked: {problem}", "see the log") for problem in proof["problems"]]
    return Verdict(tuple(findings), accept)


def _accept_length(sources: Mapping[str, float]) -> float | None:
    """The own request's, else the server's average, else the gauge's."""
    return next((sources[name] for name in ("request", "server", "metrics") if name in sources), None)


def _is_noise(text: str) -> bool:
    return len(text.strip()) >= 16 and len(set(text.strip())) == 1


def _speculation(service: Mapping[str, Any], server: Mapping[str, Any], accept: float | None) -> list[Finding]:
    wanted = service["algorithm"]
    findings = []
    running = server.get("speculative_algorithm")
    if "speculative_algorithm" not in server:
        findings.append(Finding("warning", "it does not say whether it speculates", "see /server_info on the host"))
    elif str(running).upper() != wanted:
        findings.append(
            Finding(
                "error", f"it runs with speculation {running or 'off'}, not {wanted}", "restart it as it is installed"
            )
        )
    tokens = int(service.get("verify_tokens") or 0)
    if accept is None:
        findings.append(Finding("warning", "it tells no accept length yet", "look again under load: /metrics"))
    elif tokens and accept > tokens + 0.01:
        findings.append(
            Finding("error", f"accept length {accept:.2f} is more than the {tokens} tokens of a verify", "report it")
        )
    elif accept < BROKEN_BELOW:
        findings.append(
            Finding(
                "error",
                f"accept length {accept:.2f}: nothing that is drafted gets accepted",
                "is it the drafter of this very target? Compare layer ids, hidden size, vocabulary and mask token",
            )
        )
    elif accept < SUSPECT_BELOW:
        findings.append(
            Finding(
                "warning",
                f"accept length {accept:.2f} is low",
                "compare rope base, sliding windows and layer ids of drafter and target",
            )
        )
    return findings
