"""Programs that stand in for ones that a test machine does not have."""

from __future__ import annotations

import sys
from pathlib import Path

#: What `docker exec -i NAME COMMAND...` does, and what it says when it cannot: container `sgl` runs, `off` does not.
DOCKER = """\
#!/bin/sh
echo "$0 $*" >> {log}
[ "$1 $2" = "exec -i" ] || exit 64
name=$3
shift 3
case $name in
sgl) ;;
off) echo "Error response from daemon: container 0123456789ab is not running" >&2; exit 1 ;;
*) echo "Error response from daemon: No such container: $name" >&2; exit 1 ;;
esac
command -v "$1" >/dev/null || {{
    echo "OCI runtime exec failed: exec failed: unable to start container process: exec: \\"$1\\":" \\
        "stat $1: no such file or directory: unknown" >&2
    exit 127
}}
exec env -i PATH={path} HOME=/ IN_CONTAINER=yes "$@"
"""


def write_docker(folder: Path, name: str = "docker") -> Path:
    """A stand-in engine in ``folder``; returns the log of its calls. Inside, ``python3`` is this interpreter."""
    inside = folder / "inside"
    inside.mkdir(parents=True)
    (inside / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (inside / "python3").chmod(0o755)
    log = folder / "calls"
    program = folder / name
    program.write_text(DOCKER.format(log=log, path=f"{inside}:/usr/bin:/bin"))
    program.chmod(0o755)
    return log
