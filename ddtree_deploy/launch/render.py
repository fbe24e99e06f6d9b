"""The files of a launch: systemd unit, environment file and shell script, rendered from a command. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from ddtree_deploy import resources
from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import quoting
from ddtree_deploy.launch.argv import Command, build_command
from ddtree_deploy.launch.known import Known
from ddtree_deploy.launch.service import Service

# Where compiled kernels and fetched classes go, as parts of the unit's cache folder.
_CACHES = (
    ("TRITON_CACHE_DIR", "triton"),
    ("FLASHINFER_WORKSPACE_BASE", "flashinfer"),
    ("TVM_FFI_CACHE_DIR", "tvm-ffi"),
    ("SGLANG_CACHE_DIR", "sglang"),
    ("HF_MODULES_CACHE", "hf-modules"),
)


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """A file to write: its name, the permissions it needs, and where the host expects it, if anywhere."""

    name: str
    mode: int
    text: str
    install_path: str | None


@dataclass(frozen=True, slots=True)
class Rendering:
    """All that ``launch`` makes of a service. ``notes`` are for stderr."""

    command: Command
    unit: RenderedFile
    environment_file: RenderedFile
    script: RenderedFile
    secrets_path: str | None

    @property
    def argv(self) -> tuple[str, ...]:
        """The argument vector that unit and script run."""
        return self.command.argv

    @property
    def env(self) -> dict[str, str]:
        """The environment that the environment file and the script set."""
        return {setting.name: setting.value for setting in self.command.environment}

    @property
    def shell_command(self) -> str:
        """The command for a POSIX shell, a flag a line. Ends with a newline."""
        lines = [joined(quoting.shell_word, self.command.program)]
        lines += [joined(quoting.shell_word, argument.words) for argument in self.command.arguments]
        return " \\\n    ".join(lines) + "\n"

    @property
    def files(self) -> tuple[RenderedFile, ...]:
        """The files to write, in the order in which they are shown."""
        return (self.environment_file, self.unit, self.script)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found, and what remains to be done by hand; what was not checked is ``command.unchecked``."""
        notes = list(self.command.notes)
        if self.secrets_path is not None:
            names = ", ".join(self.command.service.secrets)
            notes.append(f"before a start, {self.secrets_path} (mode 0600) on the host must set {names}")
        return tuple(notes)


def render(
    service: Service,
    tp: int | None = None,
    *,
    engine: str | None = None,
    python: str | None = None,
    known: Known | None = None,
) -> Rendering:
    """Render a service on one host at ``tp`` GPUs for an engine version, run by the interpreter ``python``.

    What is None comes from the service; ``known`` is what was read of engine and models. Raises
    :class:`~ddtree_deploy.errors.DeployError` ``DD601`` or ``DD602`` as
    :func:`~ddtree_deploy.launch.argv.build_command` does.
    """
    return render_command(build_command(service, tp=tp, engine=engine, python=python, known=known))


def header(command: Command) -> str:
    """The first comment of every file."""
    service = command.service
    nodes = f" over {service.nodes} nodes" if service.nodes > 1 else ""
    return (
        f"Rendered by ddtree-deploy: service {service.name}, sglang {command.engine}, tp {service.tp}{nodes}. "
        "Change the inventory, then render again."
    )


def unit_name(service: Service) -> str:
    """What the service is called on a host: its unit without the suffix, its job, its set of pods."""
    return f"sglang-{service.name}"


def render_command(command: Command) -> Rendering:
    """The files of a command on one host. Raises :class:`DeployError` ``DD601`` where it takes several."""
    service = command.service
    if service.nodes > 1:
        raise DeployError(
            "DD601",
            f"{service.name}: {service.nodes} nodes run under a scheduler, not as a unit of one host",
            "use --format slurm or --format k8s",
        )
    unit = unit_name(service)
    folder = service.environment_directory.rstrip("/")
    environment_path = f"{folder}/{service.name}.env"
    secrets_path = f"{folder}/{service.name}.secrets.env" if service.secrets else None
    program, *program_arguments = command.program
    shared = {
        "header": header(command),
        "program": program,
        "program_arguments": program_arguments,
        "arguments": [argument.words for argument in command.arguments],
        "settings": command.environment,
        "secrets": service.secrets,
        "secrets_file": secrets_path,
        "working_directory": service.working_directory,
    }
    unit_text = template("launch.service.j2").render(
        shared,
        description=f"SGLang service {service.name} ({service.algorithm}, tp {service.tp})"
        if service.speculative
        else f"SGLang service {service.name} (tp {service.tp})",
        user=service.user,
        group=service.group,
        unit_name=unit,
        cache_environment=[(name, f"/var/cache/{unit}/{part}") for name, part in _CACHES],
        environment_file=environment_path,
    )
    return Rendering(
        command=command,
        unit=RenderedFile(f"{unit}.service", 0o644, unit_text, f"/etc/systemd/system/{unit}.service"),
        environment_file=RenderedFile(
            f"{service.name}.env", 0o600, template("launch.env.j2").render(shared), environment_path
        ),
        script=RenderedFile(f"{service.name}.sh", 0o755, template("launch.sh.j2").render(shared), None),
        secrets_path=secrets_path,
    )


@functools.cache
def environment() -> Environment:
    """The jinja2 environment of the launch templates: every value passes a quoting filter of its context."""
    from ddtree_deploy.launch import schedulers

    templates = resources.templates_dir()
    jinja = Environment(
        loader=FunctionLoader(lambda name: (templates / name).read_text(encoding="utf-8")),
        autoescape=False,  # noqa: S701 - no HTML: the filters quote for systemd and the shell
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters = {
        "comment": quoting.comment,
        "unit_value": quoting.unit_value,
        "unit_path": quoting.unit_path,
        "environment_assignment": lambda pair: quoting.environment_assignment(*pair),
        "environment_file_path": quoting.environment_file_path,
        "environment_file_line": lambda pair: quoting.environment_file_line(*pair),
        "exec_program": quoting.exec_program,
        "exec_words": functools.partial(joined, quoting.exec_word),
        "shell_word": quoting.shell_word,
        "shell_words": functools.partial(joined, quoting.shell_word),
        "shell_assignment": lambda pair: quoting.shell_assignment(*pair),
        "shell_require": quoting.shell_require,
        **schedulers.FILTERS,
    }
    return jinja


def template(name: str) -> Template:
    """One of the launch templates."""
    return environment().get_template(name)


def joined(quote: Callable[[str], str], words: Iterable[str]) -> str:
    """The words, each quoted, with spaces between."""
    return " ".join(quote(word) for word in words)
