"""Added by demo."""

VALUE = 1
