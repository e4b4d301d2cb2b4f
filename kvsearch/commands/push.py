"""Sharing a policy: its file and a card, in a folder or on the Hugging Face hub."""

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from kvsearch.errors import RunError, quoted
from kvsearch.exporters import TARGETS, find, project, proof_of, verdicts
from kvsearch.exporters.transformers import custom_generate
from kvsearch.files import write_all
from kvsearch.models.learned import beside
from kvsearch.models.read import brief
from kvsearch.models.shared import FILE, is_repository, policy_file
from kvsearch.policy import ModelShape, Policy, check
from kvsearch.policy.policy import without_figures
from kvsearch.report.card import Proven, card, document
from kvsearch.results.folder import RunFolder, run_of
from kvsearch.results.records import Row
from kvsearch.results.summary import Summary
from kvsearch.run import summarise

HEADS = "heads.json"  # as in a run folder


@dataclass(frozen=True)
class Pushed:
    """What was shared.

    Attributes:
        where: address on the hub, or the folder.
        measured: whether the finished run that it lies in gave the card its figures.
        files: their names.
    """

    where: str
    measured: bool
    files: tuple[str, ...]


def push(
    source: str | PathLike[str],
    repository: str | None = None,
    *,
    out: str | PathLike[str] | None = None,
    model: str | None = None,
    private: bool = False,
    force: bool = False,
) -> Pushed:
    """Share a policy.

    Args:
        source: a policy file, or a run folder, whose recommended policy it is then. Figures come
            from the run that the file lies in; those that a file without a run has in its `about`
            are not passed on.
        repository: hub id `owner/name`.
        out: a folder instead of the hub.
        model: name of its model, where no run says it.
        private: make a private repository.
        force: overwrite existing files of the folder.

    Returns:
        Where it is now, and which files it has.

    Raises:
        KvsearchError: the policy cannot be read, its run is damaged, other files exist, or the hub
            refuses; of a folder nothing was written then.
    """
    if (repository is None) == (out is None):
        raise RunError("give either a hub id owner/name or a folder with -o")
    if repository is not None and not is_repository(repository):
        raise RunError(f"{quoted(repository)} is no hub id owner/name; a folder is given with -o")
    file = policy_file(str(source))
    policy = Policy.from_json(file)
    run = run_of(file)
    found = _measured(run, policy)
    shape: ModelShape | None = None
    if found is None:
        policy = without_figures(policy)  # nothing here says that they are this policy's
    else:
        shape = found[0].study.shape
        model = found[0].model.name
    exact = _exact(policy, shape)
    losses: str | None = None  # what the KV heads of the model lose, as the run has it
    if run is not None and found is not None and policy.budgets.weights:
        with suppress(FileNotFoundError):
            losses = (run / HEADS).read_text(encoding="utf-8")
    name, needed = repository or Path(str(out)).name, beside(policy)
    files: dict[str, str | bytes] = {
        FILE: policy.to_json(),
        "README.md": card(
            name, policy, model, found, exact, heads=losses is not None, code=not needed
        ),
        "card.json": document(policy, model, found, exact),
        **({} if losses is None else {HEADS: losses}),
        **({} if needed else custom_generate(policy)),
        **needed,
    }
    if out is not None:
        folder = Path(out)
        write_all(folder, files, force=force)
        return Pushed(str(folder), found is not None, tuple(files))
    assert repository is not None
    return Pushed(_upload(repository, files, private), found is not None, tuple(files))


def _measured(run: Path | None, policy: Policy) -> tuple[Summary, Row] | None:
    """The run, if it is finished, and the row of the policy."""
    if run is None:
        return None
    try:
        summary = summarise.read(RunFolder(run, write=False))
    except summarise.Unfinished:
        return None
    layers = summary.study.shape.layers
    key = policy.fingerprint(layers)
    rows = [r for r in summary.rows if r.policy.fingerprint(layers) == key]
    return (summary, rows[0]) if rows else None


def _exact(policy: Policy, shape: ModelShape | None) -> list[Proven]:
    out = []
    if shape is not None:
        check(policy, shape, prompt=policy.slots or 1)
    layers = None if shape is None else shape.layers
    for target in map(find, TARGETS):
        given = project(policy, target, shape)
        if all(v.verdict == "exact" for v in verdicts(policy, given, layers)):
            out.append(
                Proven(
                    target.name,
                    f"{target.runtime} {target.version}",
                    proof_of(policy, target, shape),
                )
            )
    return out


def _upload(repository: str, files: dict[str, str | bytes], private: bool) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    with tempfile.TemporaryDirectory() as place:
        for name, data in files.items():
            raw = data.encode() if isinstance(data, str) else data
            (file := Path(place) / name).parent.mkdir(exist_ok=True)
            file.write_bytes(raw)
        try:
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository, folder_path=place, commit_message="KV-cache policy of kvsearch"
            )
        # The hub's client raises errors of whichever HTTP library it was built on.
        except Exception as error:
            raise RunError(
                f"{repository} cannot be written on the hub ({brief(error)}); run `hf auth login`, "
                "or write a folder with -o"
            ) from error
    return str(address)
