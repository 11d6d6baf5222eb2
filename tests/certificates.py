"""Certificates for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def make_certificate(folder: Path) -> tuple[str, str]:
    """Return the paths of a self-signed certificate for 127.0.0.1 and of its key; skips without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl that could make a certificate")
    files = {"-out": str(folder / "cert.pem"), "-keyout": str(folder / "key.pem")}
    kind = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=octavo-test")
    extension = ("-addext", "subjectAltName=IP:127.0.0.1")
    given = [part for pair in files.items() for part in pair]
    subprocess.run([openssl, "req", *kind, *extension, *given], check=True, capture_output=True)
    return files["-out"], files["-keyout"]
