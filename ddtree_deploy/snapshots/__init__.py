"""Snapshots of hosts' engine folders, kept here by content; and the published wheels to compare them with."""
