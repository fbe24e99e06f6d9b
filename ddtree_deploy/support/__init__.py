"""A bundle for a bug report: what a maintainer needs to know, without secrets and without names."""
