"""Rules that read a layer's output projection: what is shared, and who cannot run them."""

import pytest
import torch

from kvsearch.cache import PolicyCache
from kvsearch.cache.model.projections import outputs
from kvsearch.errors import ModelError, PolicyError
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Channels, Policy, check
from kvsearch.rules import Critical
from tests.cache_cases import IDS, tiny

POLICY = Policy(slots=44, interval=4, sinks=2, recent_window=6, rule=Critical())


def test_a_fork_shares_the_weights(loaded: LoadedModel) -> None:
    cache = PolicyCache(POLICY, loaded.model)
    with torch.inference_mode():
        loaded.model(torch.from_numpy(IDS[:1]), past_key_values=cache)
    weights = [s.output.weight.data_ptr() for s in cache.fork().states if s.output is not None]
    layers = loaded.model.model.layers
    assert weights == [x.self_attn.o_proj.weight.data_ptr() for x in layers]


def test_who_has_no_whole_projection_says_so(loaded: LoadedModel) -> None:
    channels = Channels(vo=("00ff 00ff",) * 4)
    with pytest.raises(PolicyError, match=r"field channels\.vo: rule 'critical' multiplies whole"):
        check(POLICY.model_copy(update={"channels": channels}), loaded.shape)
    fused = tiny()
    del fused.model.model.layers[1].self_attn.o_proj
    with pytest.raises(ModelError, match=r"rule 'critical' needs whole .* and layer 1 of this"):
        outputs(POLICY, fused.model)
