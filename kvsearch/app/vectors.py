"""A conformance kit on disk, for people who write runtimes."""

from os import PathLike
from pathlib import Path

from kvsearch.exporters.vectors import kit
from kvsearch.files import write_all
from kvsearch.policy import Policy


def vectors(
    policy: str | PathLike[str],
    out: str | PathLike[str] | None = None,
    *,
    prompt: int = 0,
    force: bool = False,
) -> tuple[Path, ...]:
    """Write what a runtime must compute under a policy, see `docs/vectors.md`.

    Args:
        policy: a policy file.
        out: folder; by default one beside the policy file.
        prompt: tokens that arrive in one call; 0 chooses.
        force: overwrite existing files.

    Returns:
        The files.

    Raises:
        KvsearchError: the policy cannot be read, needs a text, or other files exist; nothing was
            written.
    """
    asked = Policy.from_json(policy)
    folder = Path(policy).with_name(f"{Path(policy).stem}-vectors") if out is None else Path(out)
    return write_all(folder, kit(asked, prompt), force=force)
