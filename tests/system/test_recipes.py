"""Recipes of docs/production.md, run as they are written, on the built-in model."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from serving_process import serve

PAGE = Path(__file__).parents[2] / "docs" / "production.md"
PROMPT = {"prompt": "Once upon a time there was a tree. " * 12, "max_tokens": 8, "temperature": 0.0}


def command_of(title):
    """Return the words of the one command below a title."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    [block] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return block.split()


def loaded_tokens(server):
    return float(re.search(r"octavo:kv_load_tokens_total\{.*?\} (\S+)", server.http.get("/metrics").text)[1])


def ask(server):
    return server.http.post("/v1/completions", json=PROMPT).raise_for_status().json()["choices"][0]["text"]


def wait_until(condition, what):
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            pytest.fail(what)
        time.sleep(0.02)


def test_a_warm_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, verb, *options = command_of("A warm disk")
    assert (program, verb) == ("octavo", "serve")
    with serve(*options) as server:
        text = ask(server)
        wait_until(lambda: list((tmp_path / "kv").glob("*.kv")), "nothing was saved")
        assert loaded_tokens(server) == 0
    with serve(*options) as server:
        assert ask(server) == text
        wait_until(lambda: loaded_tokens(server) == 192, "nothing was loaded")  # figures come behind the answer
