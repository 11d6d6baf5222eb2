"""`python -m octavo.dynamo` without the package ai-dynamo."""

from __future__ import annotations

import subprocess
import sys


def test_missing_package_is_named():
    code = "import sys, runpy; sys.modules['dynamo'] = None; runpy.run_module('octavo.dynamo', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("pip install 'octavo[server]' ai-dynamo\n")
    assert "Traceback" not in done.stderr
