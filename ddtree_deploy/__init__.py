"""Snapshot, search and patch a remote sglang install, and render its launch units."""

__version__ = "0.1.0"
