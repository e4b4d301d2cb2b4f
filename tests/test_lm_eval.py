"""lm-eval's requests through policy caches: what it scores, what it generates, its command line."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvsearch.cache.huggingface import PolicyCache
from kvsearch.errors import KvsearchError
from kvsearch.policy import Anchors, Policy
from tests.command import call

PLACES = [f"the {colour} door leads to room {i * i};" for i, colour in enumerate("abcdefgh")]
CONTEXT = " ".join(PLACES)
CHOICES = (" room 4", " room 16", " 9")
WINDOW = Policy(slots=24, sinks=2, name="window")
TASKS = {
    "choices.yaml": """
task: choices
custom_dataset: !function rows.rows
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list:
  - metric: acc
""",
    "answers.yaml": """
task: answers
custom_dataset: !function rows.rows
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {max_gen_toks: 12, until: []}
metric_list:
  - metric: exact_match
""",
    "rows.py": f"""
import datasets

def rows(**_):
    found = [dict(context={CONTEXT!r}[i:], choices={list(CHOICES)!r}) for i in range(3)]
    return dict(test=datasets.Dataset.from_list(found))
""",
}


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> Callable[..., Any]:
    """Makes lm-eval's model of the tiny model: `hf`, or under a policy."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.models.huggingface import HFLM

    from kvsearch.lm_eval import KVSearchLM

    def make(policy: Policy | str | None = None, *, plain: bool = False, **options: Any) -> Any:
        options = {"pretrained": str(tiny_folder), "device": "cpu", **options}
        return HFLM(**options) if plain else KVSearchLM(policy=policy, **options)

    return make


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def scored(model: Any) -> torch.Tensor:
    """Log-likelihood and greediness of requests: shared contexts, none, one that is too long."""
    pairs = [(CONTEXT, x) for x in CHOICES] + [("", " room"), ("of ", "a"), (9 * CONTEXT, " 9")]
    found = torch.tensor(model.loglikelihood(asked("loglikelihood", *pairs)))
    texts = asked("loglikelihood_rolling", (CONTEXT,), (3 * CONTEXT,))
    rolled = torch.tensor(model.loglikelihood_rolling(texts))
    return torch.cat([found.double().flatten(), rolled.double()])


def test_the_full_cache_scores_as_plain_hf_and_a_window_does_not(lm: Any) -> None:
    plain = scored(lm(plain=True))
    assert (plain - scored(lm())).abs().max() < 2e-3 < (plain - scored(lm(WINDOW))).abs().max()
    assert (plain - scored(lm("full"))).abs().max() < 2e-3


@pytest.mark.parametrize("policy", [WINDOW, WINDOW.model_copy(update={"trigger": "prompt"})])
def test_a_request_is_its_context_in_one_call_and_then_the_continuation(
    policy: Policy, lm: Any
) -> None:
    model = lm(policy)
    context, answer = (model.tok_encode(x) for x in (CONTEXT, CHOICES[1]))
    cache, logits = PolicyCache(policy, model.model), []
    for part in (context, *([x] for x in answer[:-1])):
        with torch.no_grad():
            out = model.model(torch.tensor([part]), past_key_values=cache, use_cache=True)
        logits.append(out.logits[0, -1].log_softmax(-1))
    right = sum(float(row[x]) for row, x in zip(logits, answer, strict=True))
    pairs = [(CONTEXT, x) for x in CHOICES]
    assert model.loglikelihood(asked("loglikelihood", *pairs))[1][0] == pytest.approx(right, 1e-4)


WORDS = "The Answer is here. The next is there, and is long. " * 9


@pytest.mark.parametrize(
    ("context", "choices", "says"),
    [
        ("The Ans", (" here", "wer"), "'wer' has no token of its own behind the context 'The Ans'"),
        ("The next is the", ("re",), "'re' has no token of its own"),
        ("The Answer", (" is", ""), "the continuation of 'The Answer' is empty"),
        ("", ("The", ""), "the continuation of '' is empty"),
        ("", ("<end>",), "'<end>' has no token of its own"),
        ("", ("x" * 600,), "600 tokens, and the model takes 512"),
    ],
)
def test_choices_that_have_no_likelihood_are_one_sentence(
    context: str, choices: tuple[str, ...], says: str, lm: Any, tiny_folder: Path
) -> None:
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.train_from_iterator([WORDS], BpeTrainer(vocab_size=200, initial_alphabet=["x"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    pairs = asked("loglikelihood", *((context, choice) for choice in choices))
    with pytest.warns(RuntimeWarning, match="the tokenizer has"):
        made = lm(pretrained=model, tokenizer=tokenizer)
    with pytest.raises(KvsearchError, match=re.escape(says)):
        made.loglikelihood(pairs)
    assert made.loglikelihood(asked("loglikelihood", ("The Answer", " is")))[0][0] < 0


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("", {}, "the prompt '' has no tokens"),
        (CONTEXT, {"max_gen_toks": 512}, "512 tokens are to be generated"),
        (CONTEXT, {"max_new_tokens": 0}, "0 tokens are to be generated"),
    ],
)
def test_prompts_after_which_nothing_can_be_generated_are_one_sentence(
    prompt: str, options: dict[str, Any], says: str, lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kind = lm(WINDOW), "generate_until"
    monkeypatch.setattr(model, "_model_generate", lambda *_, **__: pytest.fail("generates first"))
    pairs = [(CONTEXT, {"max_gen_toks": 4}), (prompt, {"max_gen_toks": 4, **options})]
    if "max_new_tokens" in options:
        del pairs[1][1]["max_gen_toks"]
    with pytest.raises(KvsearchError, match=re.escape(says)):
        model.generate_until(asked(kind, *pairs))


def test_generation_is_that_of_a_fresh_policy_cache(lm: Any, tiny_folder: Path) -> None:
    options = {"max_gen_toks": 24, "until": []}
    prompts = [(CONTEXT, options), (CONTEXT[40:], options)]
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    right = []
    for text, _ in prompts:
        given = tokenizer(text, return_tensors="pt")
        cache = PolicyCache(WINDOW, model)
        out = model.generate(**given, past_key_values=cache, max_new_tokens=24, do_sample=False)
        new = out[0, given.input_ids.shape[1] :]
        right.append(tokenizer.decode(new, skip_special_tokens=True))
    given = lm(WINDOW, pretrained=model, tokenizer=tokenizer)
    for mine in (lm(WINDOW), given):
        assert mine.generate_until(asked("generate_until", *prompts)) == right
    assert lm().generate_until(asked("generate_until", *prompts)) != right


def test_methods_are_sized_by_the_models_arguments(lm: Any, tmp_path: Path) -> None:
    slots, size = lm("h2o", budget=48).policy, lm("h2o", budget_bytes="4kB").policy
    assert 24 < slots.slots <= 48 and 0 < size.slots < slots.slots
    file = tmp_path / "mine.json"
    file.write_text(slots.to_json())
    assert lm(str(file)).policy == slots
    info = lm(str(file)).get_model_info()
    assert Policy.model_validate(info["policy"]) == slots


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        ("h2o", {}, "method h2o needs a size"),
        ("h2p", {"budget": 48}, "'h2p' is neither a method nor"),
        ("h2o", {"budget": "4k"}, "budget must be a number of slots, got '4k'"),
        ("h2o", {"budget_bytes": "4 slots"}, "such as 5000000, 5MB or 4.8MiB"),
        (WINDOW, {"budget": 48}, "budget and budget_bytes size a method"),
        (WINDOW, {"batch_size": 8}, "one request at a time: leave batch_size at 1, got 8"),
        (WINDOW, {"mixed_precision_dtype": "bfloat16"}, "mixed_precision_dtype"),
        (Policy(anchors=Anchors(at="sentences", insert=True)), {}, "inserted anchors"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    policy: Any, options: dict[str, Any], says: str, lm: Any
) -> None:
    with pytest.raises(KvsearchError, match=re.escape(says)):
        lm(policy, **options)


@pytest.fixture
def few_tasks(lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two tasks. Not there: lm-eval's own ones, and its report on the machine, each
    of which takes many seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "none" / "manager.py"))
    for name, text in TASKS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_command_runs_tasks_under_a_policy(
    few_tasks: Path, tiny_folder: Path, capsys: Any
) -> None:
    found, config = {}, few_tasks / "config.yaml.txt"
    config.write_text("model: hf\n")
    window = [f"--model_args=pretrained={tiny_folder},policy=streamingllm,budget=24"]
    for name, options in {
        "hf": ["--model", "hf", "--model_args", f"pretrained={tiny_folder}"],
        "full": ["--model_args", f"pretrained={tiny_folder}"],
        "window": ["--config", str(config), *window],
    }.items():
        argv = ["--tasks", "choices,answers", "--include_path", str(few_tasks), "--device", "cpu"]
        out = few_tasks / name
        code, told, err = call(
            ["lm-eval", *options, *argv, "--output_path", str(out), "--log_samples"], capsys
        )
        assert code == 0 and "|choices|" in told.replace(" ", ""), err
        (results,) = out.rglob("results_*.json")
        assert ("policy" in json.loads(results.read_text())["config"]) == (name != "hf")
        (rows,) = out.rglob("samples_choices_*.jsonl")
        scores = [json.loads(line)["filtered_resps"] for line in rows.read_text().splitlines()]
        (texts,) = out.rglob("samples_answers_*.jsonl")
        said = [json.loads(line)["resps"] for line in texts.read_text().splitlines()]
        found[name] = torch.tensor([[float(x[0]) for x in row] for row in scores]), said
    assert (found["hf"][0] - found["full"][0]).abs().max() < 2e-3
    assert (found["hf"][0] - found["window"][0]).abs().max() > 2e-3
    assert found["hf"][1] == found["full"][1] != found["window"][1]


def test_a_task_that_is_not_there_is_one_sentence(few_tasks: Path, capsys: Any) -> None:
    code, _, err = call(["lm-eval", "--tasks", "no_such_task"], capsys)
    assert code == 2 and "lm-eval: " in err and "no_such_task" in err


def test_where_lm_eval_stops_at_an_assertion_is_one_sentence(
    lm: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops() -> None:
        raise AssertionError

    monkeypatch.setattr("kvsearch.lm_eval.cli_evaluate", stops)
    code, _, err = call(["lm-eval", "--model", "hf", "--tasks", "mine"], capsys)
    assert code == 2 and "lm-eval: it stops at an assertion" in err


def test_without_lm_eval_the_command_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "kvsearch.lm_eval", raising=False)
    code, _, err = call(["lm-eval", "--tasks", "arc_easy"], capsys)
    assert code == 2 and err.splitlines() == [
        "kvsearch: lm-eval is not installed: pip install 'kvsearch[lm-eval]'"
    ]
