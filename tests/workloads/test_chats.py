"""Chats: what is scored is what the assistant says, after all that a template puts before it."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from kvsearch.errors import KvsearchError
from kvsearch.workloads.items import ids
from kvsearch.workloads.prompts.encode import items_of
from kvsearch.workloads.prompts.files import read
from tests.tokenizer_kinds import kind

PLAIN = (
    "{% if tools is defined and tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name }}"
    "({{ c.function.arguments.city }})]{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
R1 = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1] }}<end>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}<{{ m.role }}>\n{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% if enable_thinking is defined and not "
    "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
V03 = (  # of Mistral 7B: a system prompt stands before the last question, unless that is answered
    "{% set sys = messages[0].content if messages[0].role == 'system' else '' %}{% for m in "
    "messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] {{ sys + '\n\n' if loop.last "
    "and sys }}{{ m.content }}[/INST]{% else %} {{ m.content }}<end>{% endif %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
USER, SAID = {"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "Here."}
MORE = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHere."}
CALL = {"type": "function", "function": {"name": "find", "arguments": '{"city": "Paris"}'}}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
          {"role": "tool", "content": "mat"}, SAID]  # fmt: skip
PARTS = [{"type": "text", "text": "Where"}, {"type": "text", "text": "is it?"}]


@pytest.fixture(
    params=["llama 2, legacy", "llama 2, mistral", "gemma", "smollm2", "llama 3", "glm"]
)
def tokenizer(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = kind(request.param)
    yield found
    found.chat_template = None


def asked(tokenizer: Any, tmp_path: Path, template: str, row: dict[str, Any]) -> list[Any]:
    """Of every item the texts of its context, and of each question and answer."""
    tokenizer.chat_template = template
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps(row))
    model = SimpleNamespace(config=LlamaConfig())
    loaded: Any = SimpleNamespace(tokenizer=tokenizer, name="m", model=model)
    items = items_of(loaded, "chat", read(file), "agnostic", lambda _: ids([40])).items
    assert len({i.name for i in items}) == len(items) and len({i.group for i in items}) == 1
    found = []
    for item in items:
        seen, texts = item.context.tolist(), [tokenizer.decode(item.context)]
        for ask in item.asks:
            for part in (ask.question, ask.answer):  # as they stand after what was before
                before = tokenizer.decode(seen)
                seen += part.tolist()
                texts.append(tokenizer.decode(seen)[len(before) :])
        found.append(texts)
    return found


@pytest.mark.parametrize(
    ("template", "row", "want"),
    [
        (PLAIN, {"messages": [USER, SAID, *MORE]},
         [["<user>Where is it?\n<assistant>", "", "Here.\n", "<user>Sure?\n<assistant>",
           "Yes.\n"]]),
        (PLAIN, {"messages": [{"role": "user", "content": PARTS}, SAID]},
         [["<user>Where\nis it?\n<assistant>", "", "Here.\n"]]),
        (PLAIN, {"messages": CALLED},
         [["<user>Where is it?\n<assistant>", "", "[find(Paris)]\n", "<tool>mat\n<assistant>",
           "Here.\n"]]),
        (PLAIN, {"messages": [USER, THOUGHT]},
         [["<user>Where is it?\n<assistant>", "", "<think>\nHm.\n</think>\n\nHere.\n"]]),
        (PLAIN, {"messages": [USER, SAID], "tools": [{"name": "f"}]},
         [['[{"name": "f"}]<user>Where is it?\n<assistant>', "", "Here.\n"]]),
        (R1, {"messages": [USER, SAID]}, [["<user>Where is it?<assistant>", "", "Here.<end>"]]),
        (R1, {"messages": [USER, SAID, *MORE]},
         [["<user>Where is it?<assistant>", "", "Here.<end>", "<user>Sure?<assistant>",
           "Yes.<end>"]]),
        (QWEN3, {"messages": [USER, SAID]},
         [["<user>\nWhere is it?<end>\n<assistant>\n<think>\n\n</think>\n\n", "", "Here.<end>\n"]]),
        (QWEN3, {"messages": [USER, SAID], "chat_template_kwargs": {"enable_thinking": False}},
         [["<user>\nWhere is it?<end>\n<assistant>\n<think>\n\n</think>\n\n", "", "Here.<end>\n"]]),
        (QWEN3, {"messages": [USER, {**SAID, "reasoning_content": "Hm."}]},
         [["<user>\nWhere is it?<end>\n<assistant>\n", "",
           "<think>\nHm.\n</think>\n\nHere.<end>\n"]]),
        (QWEN3, {"messages": [USER, SAID, *MORE]},  # the first turn is another text in the second
         [["<user>\nWhere is it?<end>\n<assistant>\n<think>\n\n</think>\n\n", "", "Here.<end>\n"],
          ["<user>\nWhere is it?<end>\n<assistant>\nHere.<end>\n<user>\nSure?<end>\n<assistant>\n"
           "<think>\n\n</think>\n\n", "", "Yes.<end>\n"]]),
        (V03, {"messages": [SYSTEM, USER, SAID, *MORE]},
         [["[INST] Be brief.\n\nWhere is it?[/INST]", "", "Here.<end>"],
          ["[INST] Where is it?[/INST] Here.<end>[INST] Be brief.\n\nSure?[/INST]", "",
           "Yes.<end>"]]),
        (QWEN3, {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
         [["<user>\nWhere is it?<end>\n<assistant>\n<think>\n\n</think>\n\n", "", None]]),
    ],
)  # fmt: skip
def test_an_answer_follows_on_all_that_the_template_puts_before_it(
    template: str, row: dict[str, Any], want: list[Any], tokenizer: Any, tmp_path: Path
) -> None:
    got = asked(tokenizer, tmp_path, template, row)
    text = [[said if wanted is not None else None for said, wanted in zip(a, b, strict=True)]
            for a, b in zip(got, want, strict=True)]  # fmt: skip
    assert [[x and x.lstrip(" ") for x in turns] for turns in text] == want


def test_a_space_before_an_answer_is_a_part_of_it(tmp_path: Path) -> None:
    tokenizer = kind("llama 2, mistral")
    try:
        got = asked(tokenizer, tmp_path, LLAMA2, {"messages": [USER, SAID, *MORE]})
        whole = tokenizer.apply_chat_template([USER, SAID, *MORE], tokenize=False)
    finally:
        tokenizer.chat_template = None
    assert got[0][2] == " Here. </s>" and "".join(got[0]) == whole


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (R1, [USER, THOUGHT], "leaves out a part of message 2, such as its thoughts"),
        (R1, CALLED, "leaves out tool_calls of message 2"),
        (R1, [USER, {**SAID, "reasoning_content": "Hm."}], "leaves out reasoning_content of mess"),
        (PLAIN, [USER, {"role": "assistant", "content": None}], "the content of a message is"),
        (PLAIN, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, SAID],
         "content of type 'image_url' is not served, only text"),
        (PLAIN, [USER, {**SAID, "function_call": {"name": "f"}}], "function_call of a message"),
        (PLAIN, [{"content": "x"}], "a list of objects with role and content"),
        (PLAIN, [USER, {"role": "model", "content": "x"}], "whether role 'model' asks or answers"),
        (PLAIN, [USER, {**SAID, "content": " "}, *MORE], "an answer of the assistant is empty"),
        (PLAIN, [USER, {**SAID, "tool_calls": 5}], "tool_calls are a list of objects"),
        (PLAIN, [USER, {**SAID, "thinking": "Hm."}], "leaves out thinking of message 2"),
        (PLAIN, [USER, {**SAID, "reasoning": {"a": "b"}}], "reasoning_content of a message is"),
        (PLAIN, [USER, {**SAID, "prefix": True}], "prefix of a message is not served"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    template: str, messages: list[Any], said: str, tmp_path: Path
) -> None:
    tokenizer = kind("smollm2")
    try:
        with pytest.raises(KvsearchError, match=f"line 1: field messages: .*{said}"):
            asked(tokenizer, tmp_path, template, {"messages": messages})
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": [{"name": "f"}]}, "field tools: the chat template leaves out field tools"),
        ({"tools": "f"}, "field tools: give a list of objects"),
        ({"chat_template_kwargs": "no"}, "field chat_template_kwargs: give an object"),
    ],
)
def test_arguments_of_a_template(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    tokenizer = kind("smollm2")
    try:
        with pytest.raises(KvsearchError, match=said):
            asked(tokenizer, tmp_path, R1, {"messages": [USER, SAID], **more})
    finally:
        tokenizer.chat_template = None
