"""Which host is meant, and how to run something on it."""
