"""One quoting function for each place a value can stand in, for systemd 252 and later and for POSIX shells.

systemd reads each place by other rules: words of ``ExecStart=`` undergo C unescaping, specifiers (``%``) and
variables (``$``, inside quotes too); ``Environment=`` has specifiers but no variables; a path or a plain
value is taken as it stands, quotes included; an environment file has quoting of its own. A value that a
place cannot hold is refused with ``DD601``, never altered. Messages never repeat the value of a variable.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import unicodedata

from ddtree_deploy.errors import DeployError

_BARE_WORD = re.compile(r"[A-Za-z0-9_@/.,:=+-]+")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENV_FILE_SPECIAL = re.compile(r'(["\\$`])')
_GLOB = frozenset("*?[]{}\\")
_NOT_IN_PROGRAM = frozenset("\"'\\$\t")


def is_env_name(name: str) -> bool:
    """Whether a POSIX shell and systemd both take ``name`` as the name of an environment variable."""
    return _ENV_NAME.fullmatch(name) is not None


def fault(value: str) -> str | None:
    """Why no launch file can hold ``value``, or None.

    Control characters but tab; lone surrogates; Unicode's noncharacters, which systemd holds for broken UTF-8
    and then ignores the whole setting.
    """
    for char in value:
        if char in "\n\r":
            return "it holds a line break"
        if char == "\0":
            return "it holds a NUL character"
        if char != "\t" and unicodedata.category(char) == "Cc":
            return f"it holds the control character U+{ord(char):04X}"
        if 0xD800 <= ord(char) <= 0xDFFF:
            return "it is not valid UTF-8"
        if 0xFDD0 <= ord(char) <= 0xFDEF or ord(char) & 0xFFFE == 0xFFFE:
            return f"it holds the noncharacter U+{ord(char):04X}"
    return None


def path_fault(value: str) -> str | None:
    """Why ``value`` is not the absolute, normalised path that a unit needs, or None."""
    why = fault(value)
    if why is None and (not value.startswith("/") or value.startswith("//") or posixpath.normpath(value) != value):
        why = "it is not an absolute path, or has a //, . or .. part or a / at its end"
    return why


def exec_word(value: str) -> str:
    """One argument of ``ExecStart=``, such that systemd hands exactly ``value`` to the program.

    Not for the first word: see :func:`exec_program`.
    """
    _refuse_if("an argument", fault(value))
    if _BARE_WORD.fullmatch(value):
        return value
    return f'"{_c_escape(value).replace("$", "$$")}"'


def exec_program(value: str) -> str:
    """The first word of ``ExecStart=``: an absolute, normalised path.

    systemd takes leading ``@ - : + !`` as prefixes even inside quotes, simplifies the path, and refuses
    quotes and backslashes in it; ``$`` is a variable in ``argv[0]`` but not in the path: no form fits both.
    """
    what = f"the program {value!a}"
    _refuse_if(what, path_fault(value))
    if _NOT_IN_PROGRAM & set(value):
        raise _refused(what, "systemd takes no quote, backslash, tab or dollar sign in a program's path")
    return value if _BARE_WORD.fullmatch(value) else f'"{_c_escape(value)}"'


def environment_assignment(name: str, value: str) -> str:
    """One quoted ``NAME=value`` of ``Environment=``."""
    _check_variable(name, value)
    return f'"{name}={_c_escape(value)}"'


def environment_file_line(name: str, value: str) -> str:
    """One ``NAME="value"`` line, read alike by systemd's ``EnvironmentFile=`` and by a POSIX shell."""
    _check_variable(name, value)
    escaped = _ENV_FILE_SPECIAL.sub(r"\\\1", value)
    return f'{name}="{escaped}"'


def environment_file_path(value: str) -> str:
    """The path of ``EnvironmentFile=``: unquoted, since quotes would be part of it; wildcards are refused."""
    what = f"the environment file {value!a}"
    _refuse_if(what, path_fault(value))
    if _GLOB & set(value):
        raise _refused(what, "systemd expands wildcards, braces and backslashes there")
    return unit_value(value)


def unit_path(value: str) -> str:
    """An absolute path as a plain value, for ``WorkingDirectory=``."""
    _refuse_if(f"the path {value!a}", path_fault(value))
    return unit_value(value)


def unit_value(value: str) -> str:
    """The rest of a unit line, taken as it stands: ``Description=``, ``User=``."""
    what = f"the value {value!a}"
    _refuse_if(what, fault(value))
    if not value:
        raise _refused(what, "an empty value resets the setting")
    if value != value.strip():
        raise _refused(what, "systemd drops white space at its ends")
    if value.endswith("\\"):
        raise _refused(what, "a backslash at its end continues the line")
    return value.replace("%", "%%")


def comment(value: str) -> str:
    """Text of a ``#`` line in a unit, an environment file or a shell script."""
    _refuse_if("a comment", fault(value))
    if value.endswith("\\"):
        raise _refused("a comment", "a backslash at its end may continue the line")
    return value


def shell_word(value: str) -> str:
    """One word of a POSIX shell command."""
    _refuse_if("an argument", fault(value))
    return shlex.quote(value)


def shell_assignment(name: str, value: str) -> str:
    """``NAME=value`` of a POSIX shell."""
    _check_variable(name, value)
    return f"{name}={shlex.quote(value)}"


def shell_require(name: str) -> str:
    """A POSIX shell command that ends the script if ``name`` is unset or empty, and passes it on otherwise."""
    _check_variable(name, "")
    return f': "${{{name}:?must be in the environment}}" && export {name}'


def sbatch_word(value: str) -> str:
    """The value of an ``#SBATCH`` option, which Slurm splits and expands by rules of its own: plain words alone."""
    _refuse_if("an option of sbatch", fault(value))
    if not _BARE_WORD.fullmatch(value):
        raise _refused(f"the option {value!a} of sbatch", "only letters, digits and _ @ / . , : = + - go there")
    return value


def yaml_string(value: str) -> str:
    """A double-quoted YAML scalar. What is not printable, and what YAML holds for a line break, is escaped."""
    _refuse_if("a string", fault(value))
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'


def _c_escape(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    return escaped.replace("%", "%%")


def _check_variable(name: str, value: str) -> None:
    if not is_env_name(name):
        raise _refused(f"the variable name {name!a}", "letters, digits and _ only, and no digit first")
    _refuse_if(f"the variable {name}", fault(value))


def _refuse_if(what: str, why: str | None) -> None:
    if why is not None:
        raise _refused(what, why)


def _refused(what: str, why: str) -> DeployError:
    return DeployError("DD601", f"cannot write {what}: {why}")
