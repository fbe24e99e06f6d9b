"""Writing patch sets: scratch trees, refreshing from them, ordering, and putting sets on disk whole."""
