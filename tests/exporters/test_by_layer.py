"""Bits by layer: what a runtime reads in its files is what the projected policy says."""

import ast
import json
import re

import pytest

from kvsearch.errors import KvsearchError
from kvsearch.exporters import (
    Job,
    Target,
    artefact,
    find,
    project,
    verdicts,
)
from kvsearch.policy import (
    HeadTiers,
    ModelShape,
    Policy,
    Tier,
)
from tests.random_policies import policies

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=64, heads=4)


def written(p: Policy, target: Target) -> dict[str, str]:
    return dict(artefact(Job(p, SHAPE, "MODEL"), target).files)


def test_layers_in_16_bits_are_exceptions_for_vllm_and_free_for_mlx() -> None:
    eight = (Tier(key_bits=8, value_bits=8),)
    four = (Tier(key_bits=4, value_bits=4),)
    q = dict(levels="e4m3")
    asked = Policy.build(dict(head_tiers=HeadTiers(others=(eight,), of=(0, 1, 1, 0)), quantizer=q))
    assert project(asked, find("vllm"), SHAPE) == asked
    files = written(asked, find("vllm"))
    assert "--kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers 0 3 " in files["serve.sh"]
    assert "policy.json" not in files and "PLUGIN = False" in files["run.py"]
    plugin = written(asked.model_copy(update={"slots": 64}), find("vllm"))
    assert "KVSEARCH_POLICY=" in plugin["serve.sh"] and "PLUGIN = True" in plugin["run.py"]
    assert Policy.build(json.loads(plugin["policy.json"])).slots == 64
    mixed = Policy.build(dict(tiers=eight, head_tiers=HeadTiers(others=(four,), of=(0, 1, 1, 0))))
    assert project(mixed, find("mlx"), SHAPE) == mixed
    text = written(mixed, find("mlx"))["run.py"]
    (layers,) = re.findall(r"^LAYERS = (.*?)  #", text, re.M)
    assert [layer["bits"] for layer in ast.literal_eval(layers)] == [8, 4, 4, 8]
    heads = Policy.build(
        dict(head_tiers=HeadTiers(others=(four,), of=((0, 1), (1, 1), (0, 0), (1, 1))))
    )
    given = project(heads, find("mlx"), SHAPE)
    assert given.head_tiers is not None and not given.head_tiers.per_head


BITS_OF = {"f16": 16, "q8_0": 8, "q5_0": 5, "q5_1": 5, "q4_0": 4, "q4_1": 4}
PAIR_OF = {None: (16, 16), "FP8": (8, 8), "NVFP4": (4, 4), "FP8_K_NVFP4_V": (8, 4)}


def _read(name: str, files: dict[str, str]) -> list[tuple[int, int]]:
    """Bits of the layers as the runtime reads them."""
    if name == "modelopt":
        config = json.loads(files["hf_quant_config.json"])["quantization"]
        layers = config.get("kv_cache_quantized_layers")
        if layers is None:
            return [PAIR_OF[config["kv_cache_quant_algo"]]] * 4
        assert {entry["quant_algo"] for entry in layers.values()} <= {config["kv_cache_quant_algo"]}
        names = [f"model.layers.{i}.self_attn" for i in range(4)]
        return [PAIR_OF[layers.get(n, {"quant_algo": None})["quant_algo"]] for n in names]
    if name == "turbo_attn":
        bits = re.search(r"TKV_BITS=(?:k(\d)v(\d)|\d+\.\d+) ", files["serve.sh"])
        if bits is None:
            return [(16, 16)] * 4
        if bits[1]:
            return [(int(bits[1]), int(bits[2]))] * 4
        store = json.loads(files["calibration.json"])
        pin = store["allocations"]["hadamard"]["pin"]
        assert f"TKV_BITS={pin['bpe']:g} " in files["serve.sh"]
        cells = store["calibrations"]["hadamard/lloyd"]["layers"]
        for layer, (k, v) in pin["allocation"].items():
            for cell in (cells[layer][f"k_bits_{k}"], cells[layer][f"v_bits_{v}"]):
                assert len(cell["centroids"]) == len(cell["boundaries"]) + 1
            assert len(cells[layer][f"k_bits_{k}"]["centroids"]) == 2**k
        return [tuple(pin["allocation"][str(i)]) for i in range(4)]
    sides = []
    for side in "kv":
        (base,) = re.findall(rf"--cache-type-{side} (\S+)", files["server.sh"])
        found = [BITS_OF[base]] * 4
        for end, word, count in re.findall(
            rf"--cache-type-{side}-(first|last) (\w+),(\d+)", files["server.sh"]
        ):
            n = int(count)
            found[slice(0, n) if end == "first" else slice(4 - n, 4)] = [BITS_OF[word]] * n
        sides.append(found)
        if f"--{side}-cache-hadamard" in files["server.sh"]:
            assert base != "f16"  # it would be ignored
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize("name", ["ik_llama", "modelopt", "turbo_attn"])
def test_files_give_each_layer_its_bits(name: str) -> None:
    target, seen = find(name), set()
    for asked in policies(300, SHAPE, seed=6):
        given = project(asked, target, SHAPE)
        which = [0] * 4 if given.head_tiers is None else given.head_tiers.of
        tiers = [given.every_tiers[i][0] for i in which if isinstance(i, int)]
        files = written(given, target)
        bits = _read(name, files)
        assert bits == [(t.key_bits, t.value_bits) for t in tiers]
        seen.add(len({*bits}))
        if name == "ik_llama":
            turned = [min(b[i] for b in bits) < 16 and given.quantizer.rotate for i in (0, 1)]
            assert [f"--{s}-cache-hadamard" in files["server.sh"] for s in "kv"] == turned
        if name == "turbo_attn":
            assert len({16 in pair for pair in bits}) == 1
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("asked", "rotate", "given"),
    [
        ((8, 4, 4, 16), True, (8, 4, 4, 16)),
        ((8, 4, 8, 4), False, (8, 8, 8, 4)),
        ((4, 16, 16, 8), False, (4, 16, 16, 8)),
        ((4, 16, 16, 8), True, (4, 16, 16, 16)),  # a middle in 16 bits leaves none rotated
        ((4, 5, 4, 5), True, (4, 5, 5, 5)),
    ],
)
def test_ik_llama_gets_three_runs_of_layers(
    asked: tuple[int, ...], rotate: bool, given: tuple[int, ...]
) -> None:
    def of(bits: tuple[int, ...]) -> Policy:
        others = tuple((Tier.model_validate(dict(key_bits=b, value_bits=4)),) for b in bits)
        tiers = HeadTiers(others=others, of=(1, 2, 3, 4))
        q = dict(levels="ggml-0", group=32, rotate=rotate)
        return Policy.build(dict(head_tiers=tiers, quantizer=q))

    target = find("ik_llama")
    found = project(of(asked), target, SHAPE)
    assert [k for k, _ in _read("ik_llama", written(found, target))] == [*given]
    exact = {v.verdict for v in verdicts(of(asked), found, 4)} == {"exact"}
    assert exact == (asked == given)


def test_layers_of_turbo_attn_need_a_model_in_one_sentence() -> None:
    tiers = HeadTiers(others=((Tier(key_bits=8, value_bits=4),),), of=(0, 1))
    given = project(Policy(tiers=(Tier(key_bits=4, value_bits=4),), head_tiers=tiers), find("mlx"))
    with pytest.raises(KvsearchError, match=r"calibration file .* name the model with --model"):
        artefact(Job(given, None, "MODEL"), find("turbo_attn"))
