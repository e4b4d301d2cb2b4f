"""The stages of `kvsearch run`."""
