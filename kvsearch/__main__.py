"""`python -m kvsearch`."""

from kvsearch.cli import main

main()
