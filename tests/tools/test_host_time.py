"""tools/host_time.py launches the kernels of a forward pass without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TOOL = Path(__file__).parents[2] / "tools" / "host_time.py"


@pytest.mark.turn(20)
def test_launches_of_a_prompt_grow_with_the_layers_and_a_decode_step_is_one_graph():
    launches = {}
    for layers in ("1", "2"):
        result = subprocess.run(
            [sys.executable, TOOL, "--layers", layers, "--repeats", "2"],
            env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        rows = re.findall(r"^\|.*\| (\d+) \| [\d.]+ \|$", result.stdout, re.MULTILINE)
        launches[layers] = [int(number) for number in rows]
    (prompt_of_one, decode_of_one), (prompt, decode) = launches["1"], launches["2"]
    # 2 norms and 4 products of a layer, rotary embedding, attention and gate; 2 products are split, and then added
    assert prompt - prompt_of_one == 11
    assert decode == decode_of_one == 1  # the copy of the graph's inputs
