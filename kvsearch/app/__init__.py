"""The commands as functions: load, measure, summarise, write. The command line only parses."""
