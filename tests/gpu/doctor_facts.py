"""Record the doctor's facts on a machine with GPUs: the very agent operation, redacted, written as one JSON file.

    python -m tests.gpu.doctor_facts --out FILE [--site SITE] [--models DIR] [--deep [--live]]

SITE is the folder that holds sglang/ (without it, what this interpreter imports). DIR holds ``target/`` and
``draft/``: a service on one GPU is then looked at, too. Needs packaging and jinja2 beside the standard library.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from ddtree_deploy.doctor.examine import examine
from ddtree_deploy.doctor.gather import Deep, Wanted, gather, wanted
from ddtree_deploy.doctor.redact import redact
from ddtree_deploy.hosts.local import LocalTransport
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.launch.service import Service


def capability() -> str:
    """The first GPU's compute capability; 9.0 where none says."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()
    except OSError:
        said = []
    return said[0] if said else "9.0"


def service(models: Path) -> Wanted:
    table = {
        "model": str(models / "target"),
        "drafter": str(models / "draft"),
        "algorithm": "DFLASH",
        "hybrid": True,
        "python": sys.executable,
        "compute_capability": capability(),
        "attention_backend": "triton",
        "draft_attention_backend": "triton",
        "max_running_requests": 8,
        "context_length": 4096,
    }
    return wanted(Service.from_table("tiny", table), sys.executable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--live", action="store_true", help="with --deep: although other processes hold the GPUs")
    options = parser.parse_args()
    root = str(options.site.resolve()) if options.site else None
    target = Target("gpu-machine", "local", python=sys.executable, root=root, any_python=True)
    services = [service(options.models.resolve())] if options.models else []
    deep = Deep(60.0, 64 * 1024 * 1024, live=options.live) if options.deep else None
    with HostSession(target, LocalTransport) as session:
        facts = redact(gather(session, services, [], deep=deep))
    options.out.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    for finding in examine(facts):
        print(finding.severity.word, finding.code, finding.message, *finding.evidence, sep=" | ")


if __name__ == "__main__":
    main()
