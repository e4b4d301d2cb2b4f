"""The script that starts a server."""

from shlex import quote


def serve(model: str, command: str) -> str:
    """A script that takes another model, and options of the server behind it.

    Args:
        model: served where no other is named.
        command: with `"$model"`, and the options that the policy needs.
    """
    return (
        "#!/bin/sh\n# serve.sh [MODEL [OPTION ...]]\n"
        f"model=${{1:-{quote(model)}}}\n[ $# -eq 0 ] || shift\n"
        f'exec {command} "$@"\n'
    )
