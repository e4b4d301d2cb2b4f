"""vLLM's own cache types: which policies are one of them, and what is written for it."""

from dataclasses import replace

import pytest

from kvsearch.exporters import Job, artefact, find, project, proof_of, unknown_options
from kvsearch.exporters.capability import Capability
from kvsearch.exporters.vllm import TURBOQUANT
from kvsearch.policy import HeadTiers, ModelShape, Policy, Tier
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import METHODS, at

DEEP = ModelShape(layers=7, kv_heads=2, head_dim=64, heads=4)
VLLMS_OWN = ("int8_", "fp8_", "int4_", "turboquant_", "nvfp4")


@pytest.mark.parametrize("method", [m for m in METHODS if m.startswith(VLLMS_OWN)])
def test_vllms_own_cache_types_need_no_plugin(method: str) -> None:
    target, asked = find("vllm"), at(method, Setting(DEEP, None, 512))
    if method.startswith("turboquant_"):  # in all layers vLLM does not have it
        assert proof_of(asked, target, DEEP) == "nll"
        assert "policy.json" in artefact(Job(asked, DEEP, "MODEL"), target).files
        ends = HeadTiers(others=((Tier(),),), of=(1, 1, 0, 0, 0, 1, 1))
        asked = asked.model_copy(update={"head_tiers": ends})
    assert project(asked, target, DEEP) == asked and proof_of(asked, target, DEEP) == "schema"
    made = artefact(Job(asked, DEEP, "MODEL"), target)
    assert unknown_options(target, made.options) == [] and "policy.json" not in made.files
    assert made.options["--kv-cache-dtype"] == method
    skipped = made.options.get("--kv-cache-dtype-skip-layers")
    assert skipped == ("0 1 5 6" if method.startswith("turboquant_") else None)
    for changed in (dict(slots=64), dict(quantizer=asked.quantizer.model_copy(update=OTHER))):
        other = asked.model_copy(update=changed)
        assert "policy.json" in artefact(Job(other, DEEP, "MODEL"), target).files


OTHER = dict(levels="uniform", value_levels="lloyd", group=32)


@pytest.mark.parametrize(
    ("head_dim", "word"), [(64, "turboquant_3bit_nc"), (128, "turboquant_3bit_nc"), (96, None)]
)
def test_turboquant_rotates_whole_heads_and_spares_both_ends(
    head_dim: int, word: str | None
) -> None:
    target = find("vllm")
    shape = ModelShape(layers=9, kv_heads=2, head_dim=head_dim, heads=4)
    only = replace(target, executes=Capability(formats=TURBOQUANT, layers="exceptions"))
    asked = Policy.build(dict(tiers=[dict(key_bits=3, value_bits=3)], quantizer=dict(group=32)))
    given = project(asked, only, shape)
    assert project(given, only, shape) == given
    if word is None:
        assert not given.quantizes
        return
    assert [t[0].key_bits for t in given.every_tiers] == [3, 16]
    assert given.head_tiers is not None and given.head_tiers.of == (1, 1, 0, 0, 0, 0, 0, 1, 1)
    assert artefact(Job(given, shape, "MODEL"), target).options["--kv-cache-dtype"] == word
    few = ModelShape(layers=3, kv_heads=2, head_dim=head_dim, heads=4)
    few_given = project(asked, only, few)
    assert few_given.head_tiers is not None and few_given.head_tiers.of == (0, 1, 0)
    assert not project(asked, only).quantizes  # how many layers there are is not known
