"""Eviction with anchors: at the end of a sequence, and in a full layer.

Which slots those are is known on the host (`policy.sequences`), and is the same in all heads but
for what a rule picks among the ordinary tokens of the open sequence.
"""

from kvsearch.cache.general.compaction import Decision, settled
from kvsearch.cache.state import LayerState
from kvsearch.rules import Slots
from kvsearch_kernels.choose_slots import best_between
from kvsearch_kernels.host_to_device import sent


def take_ahead(state: LayerState, most: int) -> int:
    """Hold the flags of the next tokens, as many as attend alike; returns how many those are.

    A token that does not see earlier anchors (isolated, as in AnLLM) attends alone.
    """
    assert state.sequences is not None and state.stream is not None
    flags = state.stream.flags(state.seen, most)
    many = state.sequences.ahead(flags, most)
    if many > 1 and state.sequences.isolated(flags[:many])[-1]:
        many -= 1
    state.sequences.take(flags[:many])
    return many


def isolated(state: LayerState) -> bool:
    """Whether there are slots that the next token does not see."""
    if state.sequences is None or not state.sequences.anchor.any():
        return False
    assert state.stream is not None
    return bool(state.sequences.isolated(state.stream.flags(state.seen, 1))[0])


def hidden(state: LayerState) -> list[int]:
    """Slots that the newest token does not see."""
    return [] if state.sequences is None else state.sequences.hidden().tolist()


def ended(state: LayerState, slots: Slots) -> Decision | None:
    """Drop what the newest token leaves behind; None if it leaves nothing."""
    assert state.sequences is not None
    stays = state.sequences.kept_at_end()
    if stays is None:
        return None
    scores = None
    if state.scorer is not None and state.layer.policy.tagged:
        scores = state.scorer.ranks(slots)
    state.sequences.keep(stays)
    return settled(state.layer, state.store, sent(stays, state.store.device), scores)


def evicted(state: LayerState, slots: Slots) -> Decision:
    """Compact the layer: ordinary tokens go first, then the oldest anchors."""
    sequences, layer, scorer = state.sequences, state.layer, state.scorer
    assert sequences is not None
    n, target = state.store.n, layer.target
    over = target is not None and n > target
    scores = keep = None
    if scorer is not None and (over or layer.policy.tagged):
        scores = scorer.ranks(slots)
    if over and target is not None:
        found = sequences.eviction(target)
        keep = sent(found.stays, state.store.device)
        if scores is not None and n - target < found.last - found.first:
            keep = best_between(scores, found.first, found.last, n - target)
        sequences.keep(found.stays)
    return settled(layer, state.store, keep, scores)
