"""`--config FILE`: options from a YAML file; those of the command line take precedence.

Keys are the long spellings of options with underscores: `report_text` for `--report-text`,
`no_bench` for `--no-bench`; or their names in Python, as study.json has them, which is read as such
a file. Both the check and the file that `kvsearch init` writes are made from the command's own
options.
"""

from pathlib import Path
from typing import Any

import click
import yaml
from click.core import ParameterSource

from kvsearch.errors import KvsearchError, nearest, quoted
from kvsearch.options.to_click import OUTPUT, PLACE, F, Option, Parsed
from kvsearch.yaml_file import kind, read_mapping

_OUTSIDE = ("config", "debug", "help")


def config_option(f: F) -> F:
    """Options from a file."""
    return click.option(
        "--config",
        cls=Option,
        group="Budget and model",
        type=PLACE,
        metavar="FILE.yaml",
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="take options from this file; `kvsearch init` writes one",
    )(f)


def spellings(command: click.Command) -> dict[str, tuple[click.Option, bool]]:
    """Key of a file -> the option it sets, and whether it sets the opposite."""
    found: dict[str, tuple[click.Option, bool]] = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in _OUTSIDE:
            longest = [option.name or "", *(o for o in option.opts if o[:2] == "--")]
            found |= {_key(name): (option, False) for name in longest}
            found |= {_key(name): (option, True) for name in option.secondary_opts}
    return found


def read(path: Path, command: click.Command) -> dict[str, Any]:
    """Parameters of `command` from a file.

    Raises:
        KvsearchError: an unknown key, a value of the wrong kind, or two keys for one option.
    """
    known, found, keys = spellings(command), dict[str, Any](), dict[str, str]()
    given = read_mapping(path, "configuration", KvsearchError)
    if "schema" in given and isinstance(given.get("options"), dict):  # study.json of a run
        given = given["options"]
    for key, value in given.items():
        if not isinstance(key, str) or key not in known:
            hint = nearest(str(key)[:80], known)
            raise KvsearchError(f"{path}: unknown key {quoted(key)}{hint}")
        option, opposite = known[key]
        name = option.name or key
        if name in keys:
            raise KvsearchError(f"{path}: {keys[name]} and {key} set the same option; keep one")
        keys[name] = key
        if value is not None:
            checked = _checked(f"{path}: {key}", option, value)
            found[name] = not checked if opposite else checked
    return found


class Configured(click.Command):
    """A command with `config_option`, and help under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every option, in order."""
        found: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            heading = param.group if isinstance(param, Option) else OUTPUT
            if (record := param.get_help_record(ctx)) is not None:
                found.setdefault(heading, []).append(record)
        for heading, records in found.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As usual; of two options that exclude each other, the command line's one remains."""
        rest = super().parse_args(ctx, args)
        mine = [p for p in self.params if isinstance(p, Option)]
        for pair in [(p.instead, p.name or "") for p in mine if p.instead is not None]:
            sources = [ctx.get_parameter_source(name) for name in pair]
            if set(sources) == {ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP}:
                name = pair[sources.index(ParameterSource.DEFAULT_MAP)]
                ctx.params[name] = () if isinstance(ctx.params[name], tuple) else None
        return rest


def template(command: click.Command, name: str) -> str:
    """A file with every option of `command`, its help and its default.

    Args:
        command: whose options these are.
        name: of the file, for its first line.
    """
    defaults = command.make_context(command.name or "", []).params
    lines = [
        f"# kvsearch {command.name} --config {name}",
        "# Every option with its default; paths are relative to where the command runs. Options on",
        "# the command line go before this file. Lines with # have no default of their own.",
    ]
    for option in command.params:
        if not isinstance(option, click.Option) or option.name not in defaults:
            continue
        value, key = defaults[option.name], _key(option.opts[0])
        lines += ["", f"# {' '.join((option.help or '').split())}"]
        if value in (None, ()):
            blank = option.metavar or option.type.name.upper()
            lines.append(f"# {key}: {f'[{blank}]' if option.multiple else blank}")
        else:
            text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n")
            lines.append(f"{key}: {text.removesuffix('...').rstrip()}")
    return "\n".join(lines) + "\n"


def _load(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        context.default_map = read(path, context.command)


def _key(spelling: str) -> str:
    return spelling.removeprefix("--").replace("-", "_")


def _checked(where: str, option: click.Option, value: Any) -> Any:
    """The value, if it is of the option's kind; a message names `where`."""
    if option.multiple:
        items = value if isinstance(value, list) else [value]
        return [_scalar(f"{where}.{i}", option, v) for i, v in enumerate(items)]
    return _scalar(where, option, value)


def _scalar(where: str, option: click.Option, value: Any) -> Any:
    wanted: tuple[type, ...]
    if isinstance(option.type, click.types.BoolParamType):
        wanted, words = (bool,), "true or false"
    elif isinstance(option.type, Parsed):
        wanted, words = option.type.word.types, option.type.word.words
        wanted += (str,) if value == option.type.word.besides else ()
    elif isinstance(option.type, click.types.IntParamType):
        wanted, words = (int,), "a whole number"
    elif isinstance(option.type, click.types.FloatParamType):
        wanted, words = (int, float), "a number"
    else:
        wanted, words = (str,), "text"
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        got = repr(value) if isinstance(value, int | float) else kind(value)
        raise KvsearchError(f"{where}: expected {words}, got {got:.80}")
    if isinstance(value, str) and "\0" in value:
        raise KvsearchError(f"{where}: a zero byte is in no name, got {quoted(value)}")
    if isinstance(option.type, click.Choice) and value not in option.type.choices:
        hint = nearest(str(value)[:80], option.type.choices)
        raise KvsearchError(f"{where}: unknown value {quoted(value)}{hint}")
    return value
