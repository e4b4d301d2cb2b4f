"""The text of a kernel in PTX as lines that name their registers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

KINDS = {"pred": "p", "b16": "h", "b32": "w", "b64": "d"}  # bank of a register, by its type


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; the base is an operand, None where it is shared memory's start."""

    base: str | None
    offset: int


Operand = str | tuple[str, ...] | Address


@dataclass(frozen=True)
class Line:
    """One instruction.

    Attributes:
        name: with its types, as `ld.global.v4.b32`.
        operands: results first.
        guard: the predicate that it needs, with whether it has to be false.
        text: for errors.
    """

    name: str
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    text: str


@dataclass
class Program:
    """A kernel: its lines, where labels point, its parameters, and registers by bank."""

    name: str
    warps: int
    lines: list[Line] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    parameters: list[tuple[str, str]] = field(default_factory=list)  # type and name
    registers: dict[str, tuple[str, int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys("phwd", 0))

    def register(self, name: str, bank: str) -> None:
        """Give `name` a row of a bank."""
        self.registers[name] = bank, self.counts[bank]
        self.counts[bank] += 1


def parse(text: str) -> Program:
    """The one kernel of a module."""
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{(.*?)\n\}", text, re.S)
    assert head, text[:400]
    threads = re.search(r"\.reqntid (\d+)", head[3])
    assert threads, head[3]
    program = Program(head[1], int(threads[1]) // 32)
    for line in head[2].split("\n"):
        if found := re.search(r"\.param \.(\w+).* (\w+),?$", line.strip()):
            program.parameters.append((found[1], found[2]))
    read_body(program, re.sub(r"//.*|^\s*\.(?:loc|file)\b.*$", "", head[4], flags=re.M))
    return program


def read_body(program: Program, body: str) -> None:
    """Lines, labels and registers; names that an inline asm declares are its own."""
    scopes: list[dict[str, str]] = [{}]
    asms, label = 0, ""
    for piece in _pieces(body):
        if piece == "{":
            scopes.append(dict(scopes[-1]))
        elif piece == "}":
            scopes.pop()
        elif piece.endswith(":"):
            label = piece[:-1]
            program.labels[label] = len(program.lines)
        elif found := re.match(r"\.reg \.(\w+)\s+(.*)", piece, re.S):
            if many := re.match(r"(%\w+)<(\d+)>", found[2]):
                for i in range(int(many[2])):
                    program.register(f"{many[1]}{i}", KINDS[found[1]])
            else:
                asms += 1
                for name in re.split(r"[,\s]+", found[2].strip()):
                    scopes[-1][name] = f"{name}@{asms}"
                    program.register(f"{name}@{asms}", KINDS[found[1]])
        elif piece.startswith(".branchtargets"):
            program.tables[label] = re.findall(r"[$\w]+", piece.removeprefix(".branchtargets"))
        elif not piece.startswith(".pragma"):
            program.lines.append(_line(piece, scopes[-1]))


def _pieces(body: str) -> Iterator[str]:
    """Braces of scopes, labels with their colon, and statements."""
    at = 0
    while found := re.compile(r"\s*(\{|\}|[$\w]+:(?!:)|[^;]+;)").match(body, at):
        yield re.sub(r"\s+", " ", found[1].rstrip(";")).strip()
        at = found.end()


def _line(text: str, scope: dict[str, str]) -> Line:
    found = re.match(r"(?:@(!?)(%\w+) )?([\w.:]+) ?(.*)", text)
    assert found, text
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", found[4])
    guard = (found[2], found[1] == "!") if found[2] else None
    return Line(found[3], tuple(_operand(x, scope) for x in operands), guard, text)


def _operand(text: str, scope: dict[str, str]) -> Operand:
    if text[0] == "{":
        return tuple(scope.get(x, x) for x in re.split(r"[,\s]+", text.strip("{} ")))
    if text[0] == "[":
        found = re.match(r"\[\s*([%$\w]+)?\s*\+?\s*(-?\w+)?\s*\]", text)
        assert found, text
        base = None if found[1] == "global_smem" else found[1]
        return Address(base, int(found[2] or "0", 0))
    text = text.strip()
    return scope.get(text, text)
