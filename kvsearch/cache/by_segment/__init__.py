"""From one compaction to the next: attend, rank, evict and pack; serves every policy."""
