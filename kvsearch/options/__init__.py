"""What callers can choose: an option is one field here, and one use where it matters.

Options of the command line, keys of run.yaml, `options` in study.json, and the signature and
docstring of a Python function are made from the fields of a config.
"""
