"""The commands: each module parses, calls and prints; nothing imports this room."""
