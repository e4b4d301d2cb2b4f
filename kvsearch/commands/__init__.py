"""What `kvsearch` can be asked to do, a module a command."""
