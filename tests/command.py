"""The command line in this process."""

from typing import Any

import pytest

from kvsearch.cli import main


def exit_code(*argv: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as done:
        main([*map(str, argv)])
    return int(done.value.code or 0)


def call(argv: list[str], capsys: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    ended = exit_code(*argv)
    out, err = capsys.readouterr()
    return ended, out, err
