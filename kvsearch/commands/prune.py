"""A smaller checkpoint without the channels that a policy removes: `kvsearch prune`."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kvsearch.errors import PolicyError, TextError
from kvsearch.files import require_writable, write_atomic
from kvsearch.folders import drafted, require_new
from kvsearch.models import surgery
from kvsearch.models.in_memory import require_plain
from kvsearch.models.load import LoadedModel, max_context
from kvsearch.models.pruned import PrunedForCausalLM
from kvsearch.models.read import quiet
from kvsearch.options.function import takes
from kvsearch.options.other_commands import PruneConfig
from kvsearch.policy import Channels, Policy
from kvsearch.policy_space import Setting
from kvsearch.policy_space.channels import needs
from kvsearch.session.policies import prunes, values_of
from kvsearch.session.session import Session
from kvsearch.train.work import saving

CONTEXT = 512  # tokens of the windows that a method is measured on


@dataclass(frozen=True)
class Pruned:
    """What was written.

    Attributes:
        folder: the checkpoint, with `policy.json`: the policy without its channels.
        parameters, parameters_before: of the smaller model and of the whole one.
        token_bytes, token_bytes_before: of keys and values of one token in 16 bits, all layers.
        removed: layers that have no attention any more.
    """

    folder: str
    parameters: int
    parameters_before: int
    token_bytes: int
    token_bytes_before: int
    removed: tuple[int, ...]


@takes(PruneConfig)
def prune(config: PruneConfig) -> Pruned:
    """Write a Hugging Face checkpoint that has lost the channels of `policy`.

    The folder gets its name when all of it is written; an interrupted call leaves none.

    A method is measured on the text first.

    Returns:
        The folder, and numbers of weights and bytes of keys and values before and after.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence; nothing was written.
    """
    folder, policy = config.out, config.policy
    require_new(folder)
    session = Session(config, policy, sized=True)  # sizes are of what is evicted: nothing is here
    if not prunes(policy):
        raise PolicyError("field channels: the policy keeps every channel, so nothing is pruned")
    require_writable(folder)
    loaded = session.load(context=0)
    require_plain(loaded.model, "kvsearch prune")
    setting = Setting(loaded.shape, None, CONTEXT)
    if needs(values_of(policy)):
        source = session.text
        there = source.ids.size + len(source.start)
        length = min(CONTEXT, max_context(loaded.model.config) or CONTEXT, there)
        if length < 2:
            raise TextError(f"{source.name} has {there} tokens; give a longer text with --text")
        setting = session.measured(setting, source, length=length)
    (chosen,) = session.policies(setting)
    if chosen.offset is not None:
        raise PolicyError(
            "field quantizer.offset: its vectors are of whole heads, and pruned ones are narrower; "
            "remove it from the policy"
        )
    place = loaded.device
    try:
        loaded.model.to("cpu")
        small = surgery.prune(loaded.model, chosen.channels)
        with session.shown.step("write", 1) as step:
            _write(small, loaded, chosen, folder)
            step.advance()
    finally:
        loaded.model.to(place)
    left = chosen.channels.on(loaded.shape)
    return Pruned(
        folder=str(folder),
        parameters=_parameters(small),
        parameters_before=_parameters(loaded.model),
        token_bytes=left.budget_bytes(1),
        token_bytes_before=loaded.shape.budget_bytes(1),
        removed=tuple(i for i, widths in enumerate(left.per_layer) if widths == (0, 0)),
    )


def _write(small: PrunedForCausalLM, loaded: LoadedModel, policy: Policy, folder: Path) -> None:
    """All files under another name first."""
    about = {**policy.about, "channels": policy.channels.model_dump(mode="json")}
    rest = policy.model_copy(update={"channels": Channels(), "about": about})
    with saving(folder), drafted(folder) as draft:
        with quiet():
            surgery.write(small, loaded.tokenizer, draft)
        write_atomic(draft / "policy.json", rest.to_json())


def _parameters(model: torch.nn.Module) -> int:
    """Numbers in the weights; tied ones count once."""
    return sum(p.numel() for p in model.parameters())
