from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest

import octavo
from octavo.data.request import Request
from octavo.data.request_options import RequestOptions
from octavo.engine import ipc
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

SOURCE = Path(octavo.__file__).parent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("priority", value) for value in (2**63, -(2**64), 0.5, None)),
        *(("cache_salt", value) for value in ("", "x" * 1025, 5, "\ud800")),
        *(("tenant", value) for value in (5, None)),
        *(("tenant_weight", value) for value in (0, -1.0, math.inf, math.nan, True, None)),
        *(("timeout_s", value) for value in (0, -1.0, math.nan, math.inf, "soon", True)),
        *(("cache_points", value) for value in (None, 5, "12", {3: 4}, (1.0,), (3, -1), (True,), (None,), ("5",))),
    ],
)
def test_invalid_request_option_is_refused_with_field_name(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        RequestOptions(**{field: value})
    assert caught.value.parameter == field


def test_request_options_convert_numpy_numbers():
    options = RequestOptions(priority=np.int8(3), timeout_s=np.float32(9), tenant_weight=np.float64(2))
    assert [type(value) for value in (options.priority, options.timeout_s, options.tenant_weight)] == [
        int,
        float,
        float,
    ]


@pytest.mark.parametrize("points", [(), [], (7, 0, 7), [7, 0, 7], (np.int64(7), 0, np.uint8(7))])
def test_cache_points_become_tuple_of_integers(points):
    options = RequestOptions(cache_points=points)
    assert options.cache_points == ((7, 0, 7) if points else ())
    assert {type(point) for point in options.cache_points} <= {int}
    assert type(options.cache_points) is tuple
    assert Request("r", [1], SamplingParams(), options=options).cache_points == options.cache_points


def test_refused_cache_points_are_named_in_message():
    with pytest.raises(RequestError, match=r"a tuple of integers of at least 0, got \(3, -1\)"):
        RequestOptions(cache_points=(3, -1))


def test_keyword_fields_override_request_options():
    options = RequestOptions(priority=1, tenant="a")
    request = Request("r", [1], SamplingParams(), options=options, priority=2)
    assert (request.priority, request.tenant) == (2, "a")
    with pytest.raises(TypeError, match="nonsense"):
        Request("r", [1], SamplingParams(), nonsense=1)


def test_request_options_survive_ipc_encoding():
    options = RequestOptions(
        priority=-3, cache_salt="salt", tenant="a", tenant_weight=2.5, timeout_s=1.5, cache_points=(4, 9)
    )
    request = Request("r", [1, 2], SamplingParams(), options=options, deadline=7.0)
    (read,) = ipc.decode_to_engine(ipc.encode(ipc.Add.of("r", [request]))).to_requests()
    assert read.options == options
    assert (read.priority, read.cache_salt, read.tenant, read.deadline) == (-3, "salt", "a", 7.0)


def test_no_function_repeats_request_option_fields():
    """The options are passed as one object; `OptionFields` is the only list of keyword arguments."""
    repeated = {
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for room in ("engine", "server", "data")
        for path in (SOURCE / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} & {"cache_salt", "tenant_weight"}
    }
    assert repeated == set()
