"""What a rendering becomes on a host."""

from __future__ import annotations

import json

from ddtree_deploy.launch.render import render
from ddtree_deploy.serve.files import installable, unit_of
from tests.launch import examples

PYTHON = "/opt/venv/bin/python"


def test_a_unit_is_installed_as_it_was_rendered() -> None:
    for service in examples.services().values():
        rendering = render(service, python=PYTHON)
        item = installable(rendering, systemd=True)
        assert item.unit == rendering.unit.name == unit_of(service)
        assert set(item.files) == {rendering.unit, rendering.environment_file}
        assert all(file.install_path != rendering.secrets_path for file in item.files)


def test_the_supervisor_keeps_to_the_units_limits() -> None:
    rendering = render(next(iter(examples.services().values())), python=PYTHON)
    unit = dict(line.split("=", 1) for line in rendering.unit.text.splitlines() if "=" in line)
    (config,) = [file for file in installable(rendering, systemd=False).files if file.name.endswith(".json")]
    value = json.loads(config.text)
    assert [value[key] for key in ("restart_s", "burst", "interval_s", "stop_s")] == [
        int(unit[key]) for key in ("RestartSec", "StartLimitBurst", "StartLimitIntervalSec", "TimeoutStopSec")
    ]


def test_versions_tell_installs_apart() -> None:
    rendering = render(next(iter(examples.services().values())), python=PYTHON)
    unit, script = installable(rendering, systemd=True), installable(rendering, systemd=False)
    assert unit.version == installable(rendering, systemd=True).version
    assert unit.version != script.version
