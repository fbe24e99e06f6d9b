"""The checks, one module an area: importing this package registers them all."""

from __future__ import annotations

from ddtree_deploy.doctor.checks import cuda, gpu, host, launch, links, models, patches, python, units

__all__ = ["cuda", "gpu", "host", "launch", "links", "models", "patches", "python", "units"]
