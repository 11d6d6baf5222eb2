"""Install the programs of others that tests run with octavo, each in an environment below build/peers.

    python tools/fetch_peers.py [smg dynamo ray_serve]    all without names

An environment also sees the packages of the environment that runs this script, so it has octavo and its dependencies.
An environment with the right packages is kept. Ray Serve LLM imports vLLM or SGLang for the types of requests and
answers. Of SGLang only the package itself is installed, without its dependencies for GPUs.
"""

from __future__ import annotations

import argparse
import shutil
import site
import subprocess
import venv
from pathlib import Path

PEERS_DIR = Path(__file__).parents[1] / "build/peers"
# Requirements, and requirements that are installed without dependencies.
PEERS = {
    "smg": (["smg==1.13.0"], []),
    "dynamo": ([], ["ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"]),
    "ray_serve": (
        # The ingress of Ray 2.60 answers 400 to all requests with fastapi 0.137 and later.
        ["ray[serve]==2.60.0", "fastapi==0.136.*", "pyarrow>=17", "python-multipart", "orjson", "pybase64", "pillow"],
        ["sglang==0.5.23", "ipython", "traitlets"],
    ),
}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    names = parser.parse_args().names or list(PEERS)
    for name in names:
        if name not in PEERS:
            parser.error(f"there is no peer {name}")
        fetch(name)


def fetch(name: str) -> None:
    """Make the environment of a peer, unless it is complete. Raises `CalledProcessError` if pip fails."""
    folder, (requirements, alone) = PEERS_DIR / name, PEERS[name]
    stamp, wanted = folder / "installed.txt", "\n".join([*requirements, *alone])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    (packages,) = folder.glob("lib/python*/site-packages")
    shared = site.getsitepackages()[0]
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n", encoding="utf-8")
    for words in (requirements, ["--no-deps", *alone] if alone else []):
        if words:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    print(f"{name}: {folder}")


if __name__ == "__main__":
    main()
