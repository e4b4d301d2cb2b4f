"""The example rule of docs/adding.md works as the page says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Ladder, Policy, Quantizer, Tier, layout
from kvsearch.policy_space import KNOBS
from kvsearch.policy_space.features import features
from kvsearch.policy_space.methods import METHODS
from kvsearch.report.describe import describe
from kvsearch.rules import RULES, Attention, Rule
from tests.cache.test_device import WAYS, holds
from tests.cache_cases import IDS, SETTING, T
from tests.tagged import Device

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"
K4 = Tier(share=0.6, key_bits=4, value_bits=4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's one Python block, as a file; under a name that nobody lists who tries the page."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    code, changed = re.subn('"fading', '"page-fading', code)
    assert changed == 5
    file = tmp_path_factory.mktemp("rules") / "fading.py"
    file.write_text(code, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def module(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fading", source)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def rule(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[Rule]:
    """Listed in the table."""
    found: type[Rule] = module.Fading
    monkeypatch.setitem(RULES, found().name, found)
    return found


def made(rule: Rule) -> dict[str, Policy]:
    parts: dict[str, object] = dict(sinks=2, recent_window=6, rule=rule)
    return {
        "every token": Policy.build(dict(parts, slots=40)),
        "in two tiers": Policy.build(
            dict(
                parts, slots=60, interval=8, tiers=(Tier(share=0.4, key_bits=8, value_bits=8), K4),
                quantizer=Quantizer(group=8, fp16_sinks=True),
            )
        ),
        "in a ladder, re-indexed, heads together": Policy.build(
            dict(
                parts, slots=44, interval=6, rule=rule.model_copy(update={"share": "layer"}),
                ladder=Ladder(span=0.5), positions="cache",
            )
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["every token", "in two tiers", "in a ladder, re-indexed, heads together"]
)
def test_one_pass_equals_token_by_token(name: str, rule: type[Rule], loaded: LoadedModel) -> None:
    policy = made(rule.model_validate({}))[name]
    sizes = layout(policy, loaded.shape)
    slow, cache = stepwise(loaded, policy, IDS)
    quality = Evaluator(loaded, batch=2).quality(policy, IDS)
    assert np.abs(slow - quality.nll).max() < 1e-5
    assert cache.bytes_resident == sizes.bytes_at(T) == quality.bytes_resident
    assert cache.bytes_peak_resident >= sizes.bytes_peak(T)
    other = Evaluator(loaded, batch=2).quality(made(Attention())[name], IDS, resident=False)
    assert np.abs(other.nll - quality.nll).max() > 1e-3  # the rule decides something


@pytest.mark.parametrize("way", WAYS)
def test_no_device_is_waited_for(
    way: str, rule: type[Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    for policy in made(rule.model_validate({})).values():
        holds(policy, way, WAYS[way][2], Device())


def test_files_words_and_features(rule: type[Rule]) -> None:
    slow = rule.model_validate({"carry": 0.9})
    policy, other = made(slow)["every token"], made(rule.model_validate({}))["every token"]
    assert Policy.parse(policy.to_json()) == policy
    assert isinstance(Policy.parse(policy.to_json()).rule, rule)
    assert len({p.fingerprint() for p in (policy, other, made(Attention())["every token"])}) == 3
    assert "fading" in describe(policy) and "carrying 0.9 over" in describe(policy)
    a, b = features(policy, SETTING), features(other, SETTING)
    assert {(x, y) for x, y in zip(a, b, strict=True) if x != y} == {(0.9, 0.5)}


def test_a_rule_that_is_listed_late_is_no_knob_and_no_method(rule: type[Rule]) -> None:
    assert "page-fading" not in KNOBS["rule"].names and "page-fading" not in METHODS
    assert "page-fading" not in str(Policy.model_json_schema())


ENTRY_POINTS = """
[kvsearch.rules]
page-fading = fading:Fading
attention = fading:Fading
gone = fading_gone:Rule
nothing = fading:CARRIED

[kvsearch.tasks]
page-needle = extras:TASK

[kvsearch.samplers]
page-random = extras:sampler

[kvsearch.targets]
page-target = extras:TARGET
"""
EXTRAS = """
from dataclasses import replace
from kvsearch.exporters.config_only import SGLANG
from kvsearch.workloads.tasks.needle import TASK
TARGET = replace(SGLANG, name="page-target")
def sampler(seed, context):
    from optuna.samplers import RandomSampler
    return RandomSampler(seed=seed)
"""


def test_what_a_package_declares_is_known_everywhere_and_what_is_broken_is_named(
    source: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    (about := site / "fading_kv-0.1.dist-info").mkdir(parents=True)
    (site / "fading.py").write_text(source.read_text() + "\nCARRIED = 0.5\n")
    (site / "extras.py").write_text(EXTRAS)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fading-kv\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "mine.json").write_text(
        '{"schema": "kvsearch.policy/2", "slots": 40, "rule": {"name": "page-fading"}}'
    )
    code = (
        "import multiprocessing\n"
        "from kvsearch.policy_space import KNOBS\n"
        "from kvsearch.policy_space.methods import METHODS\n"
        "from kvsearch.policy import Policy\n"
        "from kvsearch.rules import read\n"
        "assert {'page-fading', 'page-fading-slow'} <= set(KNOBS['rule'].names)\n"
        "assert (KNOBS['rule.carry'].low, KNOBS['rule.carry'].high) == (0.0, 1.0)\n"
        "assert METHODS['page-fading'].knobs['rule'] == 'page-fading'\n"
        "assert 'page-fading' in str(Policy.model_json_schema())\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as evaluator:\n"
        "        assert evaluator.apply(read, [{'name': 'page-fading'}]).carry == 0.5\n"
        "    from kvsearch.exporters import find\n"
        "    from kvsearch.policy_search.samplers import check_name\n"
        "    from kvsearch.workloads import parse\n"
        "    check_name('page-random'), parse('page-needle:4')\n"
        "    assert find('page-target').runtime == 'sglang'\n"
        "    from kvsearch.cli import main\n"
        "    main(['validate', 'mine.json'])\n"
    )
    (tmp_path / "user.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "user.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = subprocess.run(
        [sys.executable, "-m", "kvsearch", "methods"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert told.returncode == 0 and "page-fading" in told.stdout
    lines = told.stderr.splitlines()
    head = "kvsearch: {!r} of the package fading-kv (kvsearch.rules) is left out: "
    for name, why in {
        "attention": "the name is taken",
        "gone": "ModuleNotFoundError: No module named 'fading_gone'",
        "nothing": "it is no class of kvsearch.rules.Rule: 0.5",
    }.items():
        assert head.format(name) + why in lines
    assert len(lines) == 3
