"""Install packages into this environment with uv, which takes seconds where pip takes a minute.

    python tools/fast_install.py --no-build-isolation --editable '.[dev]'      # the arguments are those of pip install

uv does not read pip's configuration, so its indexes, folders of wheels and certificates are passed on. If uv is missing
or fails, pip installs the packages, and reports what is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec

# pip's option -> uv's variable, and what separates several values there.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def uv_variables(configuration: str) -> dict[str, str]:
    """Return uv's environment variables for what `pip config list` printed: a line `section.option='value'` each.

    As in pip, a later line wins. Several values of an option are separated by blanks, or by escaped newlines.
    """
    variables = {}
    for line in configuration.splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in VARIABLES and value:
            variable, separator = VARIABLES[option]
            variables[variable] = separator.join(value.strip("'\"").replace("\\n", " ").split())
    return variables


def main(given: list[str]) -> int:
    """Install; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, arguments = parser.parse_known_args(given)
    if find_spec("uv") is not None:
        configuration = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
        environment = {"UV_INDEX_STRATEGY": "unsafe-best-match", **uv_variables(configuration), **os.environ}
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, *arguments]
        if subprocess.run(command, env=environment, check=False).returncode == 0:
            return 0
        print("uv has failed; installing with pip", flush=True)
    return subprocess.run([*PIP, "install", "--no-compile", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
