"""The fields of a record: their names in other tools, missing values, and fields that are not read.

A name is read where it can mean one thing only. A record is refused where part of what is asked, or
the answer, would be left out: a figure on the rest would look like one on the whole.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from tokenize import ERRORTOKEN, NAME, NUMBER, OP, STRING, TokenError, generate_tokens
from typing import Any

from kvsearch.errors import TextError, quoted

QUESTION = ("query", "input")  # beside `question`
ANSWER = (  # beside `answer` and `answers`
    "completion", "response", "output", "outputs", "target", "targets", "reference", "references",
    "ground_truth", "expected_answer", "expected_output", "gold_answer",
)  # fmt: skip
# Parts of what is asked, none of which may be left out.
ASKED = frozenset(
    "prompt context question questions query input instruction instructions system system_prompt "
    "passage document documents article story options choices choice_a choice_b choice_c choice_d "
    "functions".split()
)
# Names that cannot be those of a question or an answer; where one is missing, any other might be.
ABOUT = re.compile(
    r"id|.*_(ids?|len|length|tokens|idx|index|at|time|url|path|name)|idx|index|uid|uuid|guid|name|"
    r"title|url|link|source|dataset|config|subset|split|task|type|(sub_?)?(category|domain)|topic|"
    r"subject|difficulty|level|lang|language|locale|length|tokens|author|user|date|time|timestamp|"
    r"created|license|version|model|all_classes|meta|metadata|extra|extra_info|tags?|keywords|"
    r"file|path|filename|hash|sha256|messages|answer_prefix|answer_gap|chat_template_kwargs|tools"
)
NUMBERED = re.compile("answer|label|gold|truth|solution|expected")  # where a number may be one
LISTS = {"answer", "answers", "questions", "messages", "options", "choices", *ANSWER}
_LISTED = re.compile(r"""\[\s*(['"{\[\]\d.-]|array\(|np\.|nan\b|None\b|null\b)|\{\s*['"]""")


def fields(given: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """The fields of a record that are there, by the names of `docs/prompts.md`.

    Args:
        given: a record, or an object in `questions`.
        where: file and line, for messages.

    Returns:
        By name in small letters. What other tools call otherwise is in `question` and `answer`, and
        in `prompt` where `input` is all that is asked.

    Raises:
        TextError: two fields may be the same one.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        plain, value = _plain(name), _present(value)
        if plain in found and value is not None:
            raise TextError(f"{where}: field {plain} is given twice, as {quoted(name)} too")
        found |= {} if value is None else {plain: value}
    if not any(_said(found.get(n)) for n in ("context", "prompt", "messages")):
        _rename(found, "prompt", ("input",), where)
    if _said(found.get("context")) and not _said(found.get("questions")):
        _rename(found, "question", QUESTION, where)
    if "answers" in found and (_said(found["answers"]) or not _said(found.get("answer"))):
        found["answer"] = found.pop("answers")
    _rename(found, "answer", ANSWER, where)
    if "answer" in found:
        found["answer"] = _text_of(found["answer"])
    return found


def require_read(
    given: Mapping[Any, Any],
    found: Mapping[str, Any],
    texts: Iterable[str],
    missing: Iterable[str],
    where: str,
) -> None:
    """Raise where a field that may belong to what is asked would not count.

    Args:
        given: the record. A field `answer` with nothing in it says that there is none.
        found: what `fields` gave of it.
        texts: what is read.
        missing: `question` after a context, `answer`, or both, where nothing is read as that.
        where: file and line.

    Raises:
        TextError: one sentence with the field.
    """
    names, read = {_plain(name) for name in given}, "\n".join(texts)
    wanted = " and no ".join(x for x in missing if names.isdisjoint((x, f"{x}s")))
    for name, value in found.items():
        if name in ASKED and not all(text in read for text in _texts(value, numbers=True)):
            raise TextError(
                f"{where}: field {name} is not read beside the other fields, and its text is in "
                "none of them: write it into prompt, context or question, or leave it out"
            )
        number = NUMBERED.search(name) and isinstance(value, int | float)
        known = name in ASKED or name == "answer" or ABOUT.fullmatch(name.strip("_"))
        if wanted and not known and (number or any(_texts(value))):
            raise TextError(
                f"{where}: no {wanted} is given, and field {quoted(name)} is not read: give it the "
                "name of what it is, or leave it out"
            )


def cell(name: str, text: str | None) -> Any:
    """A cell of CSV: a text; a list in JSON, or as Python or NumPy write it; None if it is missing.

    An object is one where it has `text`, as SQuAD's answers do.

    Raises:
        ValueError: it looks like a list and cannot be read as one.
    """
    told = (text or "").strip()
    if text and _plain(name) == "answer_gap":
        return text
    if text is None or told.lower() in ("", "nan"):
        return None
    if _plain(name) not in LISTS or not _LISTED.match(told) or told[-1] not in "]}":
        return text
    for parse in (json.loads, lambda x: ast.literal_eval(_with_commas(x))):
        try:
            found = _present(parse(told))
        except (ValueError, SyntaxError, TokenError, MemoryError, RecursionError):
            continue
        if isinstance(found, dict):
            return found if "text" in found else text
        if all(isinstance(x, str | dict | list | None) for x in found):
            return found
    if told[0] == "{":
        return text
    raise ValueError(
        f"field {_plain(name)}: {quoted(text)} looks like a list and is none of texts; give the "
        "records as JSONL"
    )


def _with_commas(text: str) -> str:
    """A list as Python writes it, of one as NumPy does: with commas and without types."""
    words, before = list[str](), ""
    tokens = (t for t in generate_tokens(StringIO(text).readline) if t.string.strip())
    for token in tokens:
        word = token.string
        if token.type == ERRORTOKEN:  # such as a quotation mark that nothing closes
            raise SyntaxError(word)
        if word == "array":
            continue
        if word == "dtype":  # `, dtype=object`
            words.pop()
            next(tokens), next(tokens)
            continue
        starts = token.type in (STRING, NUMBER, NAME) or word in ("[", "{", "(")
        if starts and re.search(r"""[\w'"\]})]$""", before):
            words.append(",")
        words.append({"nan": "None", "null": "None"}.get(word, word))
        before = word if token.type in (STRING, NUMBER, NAME, OP) else before
    return " ".join(words)


def _plain(name: Any) -> str:
    return re.sub(r"[\s-]+", "_", str(name).strip().lower())


def _present(value: Any) -> Any:
    """A value in which all that is missing is None, as JSON and pandas have NaN for it."""
    if isinstance(value, list | tuple):
        return [_present(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _present(v) for k, v in value.items()}
    return None if value != value else value


def _said(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _rename(found: dict[str, Any], name: str, others: tuple[str, ...], where: str) -> None:
    """Give what one of the others holds its own name, where nothing has that name."""
    given = [other for other in others if _said(found.get(other))]
    if _said(found.get(name)) or not given:
        return
    if any(found[other] != found[given[0]] for other in given):
        raise TextError(
            f"{where}: fields {' and '.join(given)} may both be the {name}: call one of them {name}"
        )
    found[name] = found[given[0]]
    for other in given:
        del found[other]


def _text_of(answer: Any) -> Any:
    """An answer or several, as texts where they are objects with `text`, as SQuAD has them."""
    if isinstance(answer, list):
        return [_text_of(a) for a in answer]
    return answer["text"] if isinstance(answer, Mapping) and "text" in answer else answer


def _texts(value: Any, numbers: bool = False) -> Iterator[str]:
    """All texts in a value, and its numbers as texts if they are to be."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for v in value:
            yield from _texts(v, numbers)
    elif isinstance(value, str) and value.strip():
        yield value.strip()
    elif numbers and isinstance(value, int | float):
        yield str(value)
