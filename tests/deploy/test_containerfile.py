"""The steps of the container file work in an empty folder, and the result serves."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from container_steps import Sandbox, argument_of, read_stages, torch_index

from octavo.http.tenants import Tenant, add_key
from octavo.router.launcher import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 120
KEYS = "/etc/octavo/keys.toml"


def test_every_instruction_is_understood() -> None:
    build, image = read_stages()
    assert {each.name for each in build} == {"FROM", "ARG", "RUN", "COPY"}
    settings = ["USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"]
    assert [each.name for each in image] == ["FROM", "RUN", "RUN", "COPY", *settings]
    assert build[0].argument == f"{image[0].argument} AS build"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The first stage, up to the wheel."""
    folder = tmp_path_factory.mktemp("container")
    sandbox = Sandbox(folder / "root", {"TORCH_INDEX": torch_index(folder)})
    try:
        sandbox.execute([each for each in read_stages()[0] if "pip install" not in each.argument])
        yield sandbox
    finally:
        shutil.rmtree(folder)  # gigabytes


@pytest.fixture(scope="module")
def image(built: Sandbox) -> Sandbox:
    """The second stage."""
    build, last = read_stages()
    built.execute([each for each in build if each.name == "ARG" or "pip install" in each.argument])
    built.execute(last)
    return built


@pytest.mark.slow
def test_first_stage_builds_one_wheel_with_kernels(built: Sandbox) -> None:
    [wheel] = (built.root / "wheels").iterdir()
    assert re.fullmatch(r"octavo-\S+\.whl", wheel.name)
    names = built.run(f"/opt/octavo/bin/python -m zipfile --list {wheel}")
    assert "octavo/_kernels." in names
    assert built.calls == ["apt-get update", "apt-get install -y --no-install-recommends g++ make"]


@pytest.mark.slow
def test_image_answers_serves_and_ends_at_sigterm(image: Sandbox) -> None:
    assert image.calls[-3:-1] == ["apt-get update", "apt-get install -y --no-install-recommends libibverbs1"]
    assert image.calls[-1] == "useradd --uid 10001 --create-home octavo"
    assert {each.name for each in image.root.iterdir()} == {"opt"}
    entry, command = json.loads(argument_of("ENTRYPOINT")), json.loads(argument_of("CMD"))
    assert "torch" not in image.run([*entry, "--version"])
    assert image.run(["/opt/octavo/bin/python", "-c", "import mooncake, octavo; print(octavo.__file__)"]).startswith(
        image.path("/opt/octavo")
    )
    answer = image.run([*entry, "generate", "--prompt", "What is 12 + 30?", "--temperature", "0"])
    assert "12 + 30 = 42" in answer
    (image.root / "etc" / "octavo").mkdir(parents=True)
    add_key(image.root / "etc" / "octavo" / "keys.toml", Tenant(name="a"))
    assert KEYS in command
    [port] = free_ports(1)
    words = [image.path(each) for each in [*entry, *command, "--port", str(port)]]
    with subprocess.Popen(words, cwd=image.root, env=image.environment(), stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_for_health(image, server, port)
            server.terminate()
            assert server.wait(START_S) == 0
        finally:
            server.kill()


def wait_for_health(image: Sandbox, server: subprocess.Popen[str], port: int) -> None:
    """Run the image's health check until it succeeds."""
    check = json.loads(argument_of("HEALTHCHECK").partition(" CMD ")[2])
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            image.run([each.replace(":8000/", f":{port}/") for each in check])
        except RuntimeError:
            time.sleep(0.5)
        else:
            return
    server.kill()
    raise TimeoutError(f"{shlex.join(map(str, server.args))} is not healthy:\n{server.communicate()[1]}")  # type: ignore[arg-type]
