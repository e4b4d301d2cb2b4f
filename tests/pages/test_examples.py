"""The examples in the documentation run as they are printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvsearch.cli import cli
from kvsearch.exporters import TARGETS, Job, artefact, find, project
from kvsearch.exporters.space import why_not
from kvsearch.exporters.target_space import aim
from kvsearch.policy import ModelShape, Policy
from kvsearch.policy_space import Setting, load
from tests.random_policies import policies

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs/zoo/README.md"]
SAYS = {
    "search": "SearchResult", "generate": "full cache: ", "own_rule": "value-norm",
    "my_documents": "on the front", "rule_in_a_report": "my value norm         earlier ",
}  # fmt: skip


NAMES = sorted(f.stem for f in EXAMPLES.glob("*.py") if f.stem != "tiny")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "generate")) for n in NAMES]
)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    here, temporary = tmp_path / "here", tmp_path / "tmp"
    here.mkdir()
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--smoke"],
        cwd=here, env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout and not list(here.iterdir())


def blocks(page: Path, language: str) -> list[str]:
    """Its blocks of code."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [code for of, code in found if of == language]


def commands(page: Path) -> list[list[str]]:
    """The words of every command of ours in its blocks without a language."""
    lines = "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in re.split(r"&&|;", line.partition(" #")[0])]
    return [shlex.split(part)[1:] for part in parts if part.strip().startswith("kvsearch ")]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if commands(p)], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_commands_of_a_page_have_the_options_that_it_gives(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("budget: 64\n", encoding="utf-8")
    for name, *args in commands(page):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        try:
            command.make_context(name, ["64" if word == "N" else word for word in args])
        except click.BadParameter as error:  # a file of the reader's, which is not here
            assert not isinstance(error, click.MissingParameter), (name, args)
            assert "does not exist" in error.message, (name, args, error.message)


RECIPES = (ROOT / "docs/recipes.md").read_text(encoding="utf-8").split("\n## ")[1:]
SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=64, heads=4)


def test_every_target_has_one_recipe_in_the_order_of_the_table() -> None:
    assert [re.findall(r" --to (\w+) -o", recipe) for recipe in RECIPES] == [[n] for n in TARGETS]


@pytest.mark.parametrize(("name", "recipe"), [*zip(TARGETS, RECIPES, strict=False)])
def test_a_recipe_says_what_its_target_does(name: str, recipe: str, tmp_path: Path) -> None:
    """Versions, level of proof, a search that is not refused, and the files, one of which runs."""
    target = find(name)
    assert re.findall(r"\[(\w+)\]\(targets.md#levels-of-proof\)", recipe) == [target.proof]
    needs = () if target.environment is None else target.environment.requirements
    pins = re.findall(r"[\w-]+==[\w.]+", recipe)
    assert all(pin in needs or pin.endswith(f"=={target.version}") for pin in pins), pins
    page = tmp_path / "recipe.md"
    page.write_text(recipe, encoding="utf-8")
    searches = [args for command, *args in commands(page) if command == "run"]
    assert len(searches) == (why_not(target, on_prompts=True) is None)
    for args in searches:
        prompts = 480 if "--prompts" in args else 0
        budget = SHAPE.budget_bytes(int(args[args.index("--budget") + 1]))
        assert args[args.index("--target") + 1] == name
        assert bool(prompts) == (why_not(target) is not None)
        base = load("prompts" if prompts else "default")
        aim(name, base, Setting(SHAPE, budget, 1536, prompt=prompts))
    made: set[str] = set()
    for asked in policies(100, SHAPE, seed=4):
        made |= artefact(Job(project(asked, target, SHAPE), SHAPE, "MODEL"), target).files.keys()
    *_, export, last = blocks(page, "")[0].splitlines()
    assert {*re.findall(r"[\w-]+\.\w+|Modelfile", export.partition(" #")[2])} == made
    used = {*re.findall(r"deploy/([\w.-]+)", last)}
    assert used and used <= made


def test_policies_of_the_policy_page_are_policies() -> None:
    whole, part = blocks(ROOT / "docs/policy.md", "json")
    assert Policy.parse(whole).rule is not None
    assert Policy.parse(f'{{"schema": "kvsearch.policy/2", {part}}}').head_tiers is not None
