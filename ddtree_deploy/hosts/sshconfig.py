"""The ssh configuration that holds for a destination: what ``ssh -G`` says where OpenSSH is installed.

paramiko's own reader is the fallback. It ignores ``Include``, applies ``Match`` blocks whose words it does not
know and takes ``none`` for a host, so whatever it would get wrong is refused with its file and line.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import Destination, expand_home

NO_CONFIG = "none"
_TIMEOUT = 15.0  # seconds; `Match exec` may run a command of the user's
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
_DEFAULT_IDENTITIES = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
# Directives that paramiko's reader passes over, and the Match words that it decides as OpenSSH does. (It reads
# twice, so `host` and `user` would see what stands below them.)
_UNREAD = frozenset(("include", "tag"))
# Its handling of tokens, `~` and `none` is not OpenSSH's: they pass through it in disguise.
_SHOW = {0xE000: "%", 0xE001: "~", 0xE002: "none"}
_MATCH_WORDS = frozenset(("all", "originalhost", "localuser"))


@dataclass(frozen=True)
class SshConfig:
    """The options that decide how to reach a host and whom to believe; tokens and ``~`` are expanded.

    ``identity_files`` holds, in the order to offer, those that exist or whose ``.pub`` does. ``identity_agent``
    is the agent's socket, None for no agent. ``proxy_jump`` lists the hops in the order they are passed.
    ``connect_timeout`` is in seconds, None where none is set. KnownHostsCommand and host certificates have no
    part in it: a host that only they vouch for is unknown here.
    """

    original: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    user_known_hosts_files: tuple[Path, ...] = ()
    global_known_hosts_files: tuple[Path, ...] = ()
    revoked_host_keys: Path | None = None
    host_key_alias: str | None = None
    hash_known_hosts: bool = False
    proxy_jump: tuple[str, ...] = ()
    proxy_command: str | None = None
    connect_timeout: float | None = None
    address_family: str = "any"


def account_home() -> Path:
    """The home folder that ssh means: the account's, whatever $HOME says."""
    try:
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError):
        return Path.home()


def home_note() -> tuple[str, ...]:
    """A line that says where ssh's files are looked for, where $HOME says otherwise; else nothing."""
    home = account_home()
    return () if Path.home() == home else (f"as ssh does, ~/.ssh was taken as {home / '.ssh'}, whatever $HOME says",)


def _home_of_ssh(path: str) -> Path:
    """``path`` with a leading ``~`` or ``~user`` replaced as ssh does it."""
    if path == "~" or path.startswith("~/"):
        return account_home() / path[2:]
    return expand_home(path)


def effective_config(destination: Destination, config_file: str | None = None) -> SshConfig:
    """The configuration for ``destination``; ``config_file`` is read instead of the usual ones ("none": none).

    Raises DeployError DD305 when it cannot be read or asks for what is not supported here.
    """
    if shutil.which("ssh"):
        return _resolve(destination, _ask_openssh(destination, config_file))
    return _resolve(destination, _ask_paramiko(destination, config_file))


def _ask_openssh(destination: Destination, config_file: str | None) -> dict[str, list[str]]:
    command = ["ssh", "-G", "-T"]
    command += ["-F", config_file] if config_file else []
    command += ["-l", destination.user] if destination.user else []
    command += ["-p", str(destination.port)] if destination.port else []
    command += ["--", destination.host]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise DeployError("DD305", f"`ssh -G {destination.host}` gave no answer in {_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise DeployError("DD305", f"ssh could not be run: {error.strerror}") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DeployError(
            "DD305",
            f"ssh does not accept its configuration for {destination.host}: {said[0] if said else 'no reason given'}",
            details=said[1:],
        )
    options: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        word, _, value = line.partition(" ")
        options.setdefault(word.lower(), []).append(value)
    return options


def _ask_paramiko(destination: Destination, config_file: str | None) -> dict[str, list[str]]:
    import invoke
    import paramiko

    paramiko.config.invoke = invoke  # type: ignore[attr-defined]  # for `Match exec`: see the connect module
    if config_file is None:
        files = [path for path in (account_home() / ".ssh/config", SYSTEM_CONFIG) if path.is_file()]
    else:
        files = [] if config_file == NO_CONFIG else [Path(config_file)]
    # The first value of an option wins: the caller's stand before the files', the user's before the system's.
    text = f"User {destination.user}\n" if destination.user else ""
    text += f"Port {destination.port}\n" if destination.port else ""
    for path in files:
        try:
            content = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DeployError("DD305", f"{path} cannot be read: {error}") from None
        for number, problem in _misread(content):
            raise DeployError(
                "DD305",
                f"{path}:{number}: {problem} is not supported without OpenSSH's ssh",
                hint="install the OpenSSH client: its `ssh -G` is used where it exists",
            )
        text += content + "\nHost *\n"
    try:
        found = paramiko.SSHConfig.from_text(_hidden(text)).lookup(destination.host)
    except paramiko.ConfigParseError as error:
        raise DeployError("DD305", f"{files[0]}: {error}") from None
    options = {
        word: [each.translate(_SHOW) for each in (value if isinstance(value, list) else [value])]
        for word, value in found.items()
    }
    # As OpenSSH: the first of the two wins, also `ProxyCommand none`, but `ProxyJump none` only ends itself.
    if options.get("proxyjump") == [NO_CONFIG]:
        del options["proxyjump"]
    for later in [word for word in options if word in ("proxyjump", "proxycommand")][1:]:
        del options[later]
    options["hostname"] = [_expand(options["hostname"][0], {"%": "%", "h": destination.host}, environment=False)]
    options.setdefault("identityfile", [f"~/.ssh/{name}" for name in _DEFAULT_IDENTITIES])
    options.setdefault("userknownhostsfile", ["~/.ssh/known_hosts ~/.ssh/known_hosts2"])
    options.setdefault("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"])
    return options


def _hidden(text: str) -> str:
    return re.sub(r"(?i)(?<=[\s=])none(?=\s)", "\ue002", text).replace("%", "\ue000").replace("~", "\ue001")


def _misread(text: str) -> Iterator[tuple[int, str]]:
    """(line number, directive) of all that paramiko's reader would not take as OpenSSH does."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*([A-Za-z]\w*)\s*[=\s]\s*(.*)", line)
        if found is None:
            continue
        word, value = found[1].lower(), found[2].strip()
        if word in _UNREAD or (word == "canonicalizehostname" and value.lower() not in ("no", "false")):
            yield number, found[1]
        elif value.count('"') > 2:
            yield number, f"several quoted words in {found[1]}"
        elif re.search(r"(^|\s)#", value):
            yield number, "a comment behind a value"
        elif word == "host" and "[" in value:
            yield number, "a bracket in a Host pattern"
        elif word == "match":
            words = value.replace("=", " ").lower().split()
            criteria = [words[0]] if words[:1] == ["all"] else words[::2]
            unknown = [each for each in criteria if each.lstrip("!") not in _MATCH_WORDS]
            if unknown:
                yield number, f"Match {unknown[0]}"


def _resolve(destination: Destination, options: Mapping[str, Sequence[str]]) -> SshConfig:
    """The options as texts, turned into values. A word's first value counts, except for files that add up."""

    def one(word: str) -> str | None:
        values = options.get(word, ())
        value = re.sub(r'^"([^"]*)"$', r"\1", values[0].strip()) if values else ""
        return None if not value or value.lower() == "none" else value

    if (one("proxyusefdpass") or "no").lower() in ("yes", "true"):
        raise DeployError("DD305", f"{destination.host}: ProxyUseFdpass is not supported")
    hostname = one("hostname") or destination.host
    port = _number("Port", one("port") or "22")
    user = one("user") or getpass.getuser()
    alias = one("hostkeyalias")
    here = socket.gethostname()
    tokens = {
        "%": "%",
        "d": str(account_home()),
        "h": hostname,
        "i": str(os.getuid()),
        "k": alias or destination.host,
        "L": here.partition(".")[0],
        "l": here,
        "n": destination.host,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
    }

    names = [_home_of_ssh(_expand(value.strip('"'), tokens)) for value in options.get("identityfile", ())]
    identities = dict.fromkeys(path for path in names if path.is_file() or Path(f"{path}.pub").is_file())

    def list_of_files(word: str) -> tuple[Path, ...]:
        value = one(word)
        return tuple(_home_of_ssh(_expand(name, tokens)) for name in _split_files(value)) if value else ()

    jump = one("proxyjump")
    command = one("proxycommand")
    revoked = one("revokedhostkeys")
    timeout = one("connecttimeout")
    agent = one("identityagent") if "identityagent" in options else "SSH_AUTH_SOCK"
    return SshConfig(
        original=destination.host,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=tuple(identities),
        identities_only=(one("identitiesonly") or "no").lower() in ("yes", "true"),
        identity_agent=_agent_socket(agent, tokens),
        user_known_hosts_files=list_of_files("userknownhostsfile"),
        global_known_hosts_files=list_of_files("globalknownhostsfile"),
        revoked_host_keys=_home_of_ssh(_expand(revoked, tokens)) if revoked else None,
        host_key_alias=alias,
        hash_known_hosts=(one("hashknownhosts") or "no").lower() in ("yes", "true"),
        proxy_jump=tuple(hop.strip() for hop in jump.split(",")) if jump else (),
        proxy_command=_expand(command, tokens, environment=False) if command else None,
        connect_timeout=float(_number("ConnectTimeout", timeout)) if timeout and timeout != "0" else None,
        address_family=(one("addressfamily") or "any").lower(),
    )


def _number(word: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise DeployError("DD305", f"{word} is {value!r}, not a number")
    return int(value)


def _agent_socket(value: str | None, tokens: Mapping[str, str]) -> str | None:
    """The agent's socket that IdentityAgent names: a path, ``SSH_AUTH_SOCK`` or ``$VARIABLE``."""
    if value is None:
        return None
    if value == "SSH_AUTH_SOCK" or re.match(r"\$\w", value):
        return os.environ.get(value.lstrip("$")) or None
    return str(_home_of_ssh(_expand(value, tokens)))


def _expand(value: str, tokens: Mapping[str, str], *, environment: bool = True) -> str:
    """Replace ``%x`` and, but for ProxyCommand (a shell does it), ``${NAME}``."""

    def replacement(found: re.Match[str]) -> str:
        if found[1] is not None:
            if found[1] not in tokens:
                raise DeployError("DD305", f"%{found[1]} in {value!r} is not supported")
            return tokens[found[1]]
        if found[2] not in os.environ:
            raise DeployError("DD305", f"{value!r} names ${{{found[2]}}}, which is not set")
        return os.environ[found[2]]

    return re.sub(r"%(.)|\$\{(\w+)\}" if environment else r"%(.)|(?!)()", replacement, value)


def _split_files(value: str) -> list[str]:
    """The file names of a list. ``ssh -G`` prints them without quotes: a name with spaces is one that exists."""
    if '"' in value:
        try:
            return shlex.split(value)
        except ValueError:
            raise DeployError("DD305", f"quotes do not match in {value!r}") from None
    words = value.split(" ")
    names = []
    while words:
        joined = (" ".join(words[:end]) for end in range(1, len(words) + 1))
        name = next((each for each in joined if _home_of_ssh(each).is_file()), words[0])
        names.append(name)
        words = words[len(name.split(" ")) :]
    return [name for name in names if name]
