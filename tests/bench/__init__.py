"""The side-by-side benchmark of ``make bench``: this program and others at the same jobs, in one run."""
