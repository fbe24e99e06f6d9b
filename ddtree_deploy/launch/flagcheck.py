"""Arguments held against the parser of an installed engine: what it would refuse, and what it warns of. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ddtree_deploy.launch import flags
from ddtree_deploy.launch.legality import Finding
from ddtree_deploy.launch.parser import ANY, MANY, NONE, ONE, EngineParser, Flag
from ddtree_deploy.wording import did_you_mean

_CONVERTERS = {"int": int, "float": float}
_CHOICES_SHOWN = 12


def check_arguments(parser: EngineParser, arguments: Iterable[Sequence[str]]) -> list[Finding]:
    """What the parser says of each argument: flags of ours with their values, and whole lists of extra words."""
    found: list[Finding] = []
    for words in arguments:
        for name, values in _split(words):
            found += _check(parser, name, values)
    return found


def _split(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The flags among words, each with what follows it; a word in front of any flag is a flag of no name."""
    name = ""
    values: list[str] = []
    started = False
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if started:
                yield name, values
            name, equals, value = word.partition("=")
            values = [value] if equals else []
            started = True
        else:
            values.append(word)
            started = True
    if started:
        yield name, values


def _check(parser: EngineParser, name: str, values: list[str]) -> Iterator[Finding]:
    flag = parser.by_name.get(name)
    if flag is None:
        full = parser.abbreviated(name) if name else ()
        if len(full) == 1:
            yield Finding(False, f"{name} abbreviates {full[0]}: write it in full, or a later version may refuse it")
            flag = parser.by_name[full[0]]
        else:
            yield Finding(True, _unknown(parser, name, values, full))
            return
    if flag.deprecated:
        instead = f": use {flag.successor}" if flag.successor else ""
        yield Finding(False, f"{name} is deprecated in this engine{instead}")
    yield from _check_values(name, flag, values)


def _unknown(parser: EngineParser, name: str, values: list[str], full: tuple[str, ...]) -> str:
    if not name:
        return f"{values[0]!a} stands in front of every flag"
    if full:
        return f"{name} is ambiguous in this engine: it abbreviates {', '.join(sorted(full)[:4])}"
    other = flags.renamed(name)
    if other is not None:
        return f"this engine has no {name}: it is {other}"
    return f"this engine has no {name}{did_you_mean(name, parser.by_name)}"


def _check_values(name: str, flag: Flag, values: list[str]) -> Iterator[Finding]:
    if flag.takes == NONE and values:
        yield Finding(True, f"{name} takes no value, and {values[0]!a} follows it")
        return
    if flag.takes in (ONE, MANY) and not values:
        yield Finding(True, f"{name} needs a value")
        return
    if flag.takes not in (MANY, ANY) and len(values) > 1:
        yield Finding(True, f"{name} takes one value, and {values[1]!a} follows it")
    for value in values:
        convert = _CONVERTERS.get(flag.type or "")
        if convert is not None:
            try:
                convert(value)
            except ValueError:
                yield Finding(True, f"{name} takes {'an integer' if flag.type == 'int' else 'a number'}, not {value!a}")
                continue
        if flag.choices is not None and value not in flag.choices:
            some = ", ".join(flag.choices[:_CHOICES_SHOWN]) + (" ..." if len(flag.choices) > _CHOICES_SHOWN else "")
            close = did_you_mean(value, flag.choices)
            yield Finding(True, f"this engine's {name} does not take {value!a}{close} (it takes {some})")
