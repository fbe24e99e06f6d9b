"""From a rendered service to a serving host: install, start, check, stop, go back."""
