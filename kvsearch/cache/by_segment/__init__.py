"""The general loop: attend up to the next compaction, then compact; any policy."""
