"""Reading diffs and patch sets, and planning what they make of a tree: pure, bytes in and bytes out."""
