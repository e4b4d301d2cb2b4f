"""Messages of a chat as a record has them, in the form that chat templates take."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvsearch.errors import TextError, quoted

Message = dict[str, Any]

SHOWN = ("reasoning_content", "thinking", "tool_calls")  # the template writes them, or none are
TAKEN = (*SHOWN, "tool_call_id", "name")  # beside role and content
REFUSED = ("function_call", "audio", "refusal", "prefix")  # what else a message may say
OTHERS = ("ai", "assistant", "bot", "chatbot", "gpt", "human", "model", "user")  # who talk


def messages_of(row: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """The messages of a record, and what its template is called with.

    Content in parts is joined by line ends. The arguments of the template
    are those of `chat_template_kwargs`, such as `enable_thinking`, and the `tools`.

    Raises:
        TextError: a message is none, or has what no template is given here, which is named.
    """
    given = row["messages"]
    if not isinstance(given, list) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in given
    ):
        raise TextError(f"{where}: field messages: give a list of objects with role and content")
    for m in given:
        if m["role"] not in ("assistant", "user") and m["role"].lower() in OTHERS:
            raise TextError(
                f"{where}: field messages: whether role {quoted(m['role'])} asks or answers is not "
                "told: call it user or assistant"
            )
    found = tuple(_message(m, where) for m in given)
    if not any(m["role"] == "user" for m in found):
        raise TextError(f"{where}: field messages: no message of role user")
    arguments = row.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise TextError(
            f"{where}: field chat_template_kwargs: give an object, such as "
            f'{{"enable_thinking": false}}, got {quoted(arguments)}'
        )
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise TextError(f"{where}: field tools: give a list of objects, got {quoted(tools)}")
    return found, {**arguments, **({"tools": tools} if tools else {})}


def _message(given: Mapping[str, Any], where: str) -> Message:
    for name in REFUSED:
        if given.get(name):
            raise TextError(
                f"{where}: field messages: {name} of a message is not served; leave it out"
            )
    more = {name: given[name] for name in TAKEN if given.get(name)}
    if given.get("reasoning"):  # as some servers call it
        more.setdefault("reasoning_content", given["reasoning"])
    for name in ("reasoning_content", "thinking"):
        if not isinstance(more.get(name, ""), str):
            raise TextError(
                f"{where}: field messages: {name} of a message is a text, got {quoted(more[name])}"
            )
    if "tool_calls" in more:
        if not isinstance(more["tool_calls"], list):
            raise TextError(f"{where}: field messages: tool_calls are a list of objects")
        more["tool_calls"] = [_call(call, where) for call in more["tool_calls"]]
    content = given.get("content")
    if content is None and "tool_calls" in more:
        content = ""
    elif isinstance(content, list):
        content = _joined(content, where)
    if not isinstance(content, str):
        raise TextError(
            f"{where}: field messages: the content of a message is a text or a list of parts of "
            f"type text, got {quoted(content)}"
        )
    if given["role"] == "assistant" and not content.strip() and not any(n in more for n in SHOWN):
        raise TextError(
            f"{where}: field messages: an answer of the assistant is empty; leave it out, or where "
            "it is the last to compare with what the full cache answers"
        )
    return {"role": given["role"], "content": content, **more}


def _joined(parts: Sequence[Any], where: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(text, str):
            raise TextError(
                f"{where}: field messages: content of type {quoted(kind)} is not served, only text"
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, where: str) -> Any:
    """A call of a tool; templates take its arguments as an object, servers write a text."""
    if not isinstance(call, Mapping):
        raise TextError(f"{where}: field messages: tool_calls are a list of objects")
    own = call.get("function")
    if not isinstance(own, Mapping) or not isinstance(own.get("arguments"), str):
        return dict(call)
    try:
        return {**call, "function": {**own, "arguments": json.loads(own["arguments"])}}
    except ValueError:
        return dict(call)
