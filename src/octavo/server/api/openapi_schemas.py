"""What the Python types of requests do not say about them, as JSON schemas: for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from octavo.sampling_params import MAX_COUNT, MAX_LOGPROBS, MAX_N, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, SEED_RANGE
from octavo.server.answers.tools import MAX_TOOLS

REF = "#/components/schemas/"

_WHOLE = {"type": "integer"}
_TEXT: dict[str, Any] = {"type": "string"}
_TEXT_OR_NULL: dict[str, Any] = {"type": ["string", "null"]}
_OBJECT: dict[str, Any] = {"type": "object"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {
    "anyOf": [
        {**_TEXT, "minLength": 1},
        {"type": "array", "items": {**_TEXT, "minLength": 1}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _number(low: float, high: float, kind: str = "number") -> dict[str, Any]:
    return {"type": kind, "minimum": low, "maximum": high}


def _text_or(parts: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_TEXT, _list(parts)]}


def _allowed(tool: dict[str, Any], **more: Any) -> dict[str, Any]:
    return _object(("mode", "tools"), mode={"enum": ["auto", "required"]}, tools=_list(tool, minItems=1), **more)


_TEXT_PART = _object(("type", "text"), type={"const": "text"}, text=_TEXT)
_FUNCTION_NAME = {**_TEXT, "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
_FUNCTION = _object(
    ("name",),
    name=_FUNCTION_NAME,
    description=_TEXT,
    parameters=_OBJECT,
    strict={"type": ["boolean", "null"]},
)
_CHAT_CALL = _object(
    ("function",),
    id=_TEXT,
    type={"const": "function"},
    function=_object(("name", "arguments"), name=_TEXT, arguments=_TEXT),
)
_CHAT_MESSAGE = {
    "oneOf": [
        _object(
            ("role", "content"),
            role={"enum": ["system", "developer", "user"]},
            content=_text_or(_TEXT_PART),
            name=_TEXT,
        ),
        _object(
            ("role",),
            role={"const": "assistant"},
            content={"anyOf": [_TEXT, _list(_TEXT_PART), {"type": "null"}]},
            tool_calls=_list(_CHAT_CALL),
            reasoning_content=_TEXT,
            reasoning=_TEXT,
        ),
        _object(
            ("role", "content", "tool_call_id"),
            role={"const": "tool"},
            content=_text_or(_TEXT_PART),
            tool_call_id=_TEXT,
        ),
    ]
}
_CHOICE: dict[str, Any] = {"enum": ["none", "auto", "required"]}
_CHAT_TOOL = _object(("type", "function"), type={"const": "function"}, function=_object(("name",), name=_TEXT))
_RESPONSES_TOOL = _object(("type", "name"), type={"const": "function"}, name=_TEXT)
_ALLOWED = {"type": {"const": "allowed_tools"}}
_CHAT_TOOLS = {
    "messages": _list(_CHAT_MESSAGE, minItems=1),
    "tools": _list(_object(("type", "function"), type={"const": "function"}, function=_FUNCTION), maxItems=MAX_TOOLS),
    "tool_choice": {
        "anyOf": [_CHOICE, _CHAT_TOOL, _object(("type",), **_ALLOWED, allowed_tools=_allowed(_CHAT_TOOL))],
    },
}
_TOKEN_LIMIT = {"anyOf": [_number(1, MAX_COUNT, "integer"), {"const": -1}]}
_SCHEMA = {"type": ["object", "string"]}
_SAMPLING = {
    "max_tokens": _TOKEN_LIMIT,
    "n": _number(1, MAX_N, "integer"),
    "seed": _number(*SEED_RANGE, "integer"),
    "stop": {
        "anyOf": [
            {**_TEXT, "maxLength": MAX_STOP_STRING_CHARS},
            _list({**_TEXT, "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}, maxItems=MAX_STOP_STRINGS),
        ]
    },
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _number(-1, MAX_COUNT, "integer"),
    "min_p": _number(0, 1),
    "typical_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
    "min_tokens": _number(0, MAX_COUNT, "integer"),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _number(-100, 100),
    },
    "stop_token_ids": _list({"type": "integer", "minimum": 0}),
    "allowed_token_ids": _TOKEN_IDS,
    "prompt_logprobs": _number(0, MAX_LOGPROBS, "integer"),
    "priority": _number(-(2**63), 2**63 - 1, "integer"),
    "cache_salt": {**_TEXT, "minLength": 1, "maxLength": 1024},
    "response_format": _object(("type",), type={"enum": ["text", "json_object", "json_schema"]}, json_schema=_OBJECT),
    "structured_outputs": _object(
        json=_SCHEMA,
        json_object={"type": "boolean"},
        regex=_TEXT,
        choice=_list(_TEXT),
        grammar=_TEXT,
        starts_after=_TEXT,
    ),
}
_OTHER_NAMES = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), _TOKEN_LIMIT),
    **dict.fromkeys(("json_schema", "guided_json"), _SCHEMA),
    "n_cmpl": _SAMPLING["n"],
    "n_probs": _number(0, MAX_LOGPROBS, "integer"),
    "repeat_penalty": _SAMPLING["repetition_penalty"],
    "truncate_prompt_tokens": {"anyOf": [{**_WHOLE, "minimum": 1}, {"const": -1}]},
}
_TOOL_USE = _object(("type", "id", "name", "input"), type={"const": "tool_use"}, id=_TEXT, name=_TEXT, input=_OBJECT)
_TOOL_RESULT = _object(
    ("type", "tool_use_id"), type={"const": "tool_result"}, tool_use_id=_TEXT, content=_text_or(_TEXT_PART)
)
_THINKING = _object(("type", "thinking"), type={"const": "thinking"}, thinking=_TEXT, signature=_TEXT)
_ANTHROPIC = {
    "messages": _list(
        {
            "oneOf": [
                _object(
                    ("role", "content"),
                    role={"const": "user"},
                    content=_text_or({"oneOf": [_TEXT_PART, _TOOL_RESULT]}),
                ),
                _object(
                    ("role", "content"),
                    role={"const": "assistant"},
                    content=_text_or({"oneOf": [_TEXT_PART, _TOOL_USE, _THINKING]}),
                ),
            ]
        },
        minItems=1,
    ),
    "system": _text_or(_TEXT_PART),
    "tools": _list(
        _object(
            ("name", "input_schema"), name=_FUNCTION["properties"]["name"], description=_TEXT, input_schema=_OBJECT
        ),
        maxItems=MAX_TOOLS,
    ),
    "tool_choice": _object(("type",), type={"enum": ["auto", "any", "tool", "none"]}, name=_TEXT),
    "thinking": _object(("type",), type={"enum": ["enabled", "disabled", "adaptive"]}),
    "output_config": _object(
        effort={"type": ["string", "null"]},
        format=_object(("type", "schema"), type={"const": "json_schema"}, schema=_OBJECT),
    ),
}
_INPUT_TEXT = _object(("type", "text"), type={"enum": ["input_text", "output_text"]}, text=_TEXT)
_ITEM = {
    "anyOf": [
        _object(
            ("role", "content"),
            type={"const": "message"},
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_text_or(_INPUT_TEXT),
        ),
        _object(
            ("type", "name", "arguments"), type={"const": "function_call"}, name=_TEXT, arguments=_TEXT, call_id=_TEXT
        ),
        _object(
            ("type", "output"), type={"const": "function_call_output"}, output=_text_or(_INPUT_TEXT), call_id=_TEXT
        ),
        _object(("type",), type={"const": "reasoning"}, content=_list(_object(type=_TEXT, text=_TEXT))),
    ]
}
# What the types of fields do not say: by schema, the properties and the names that must be there.
MORE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "ChatCompletionRequest": (
        ("messages",),
        {
            **_SAMPLING,
            **_CHAT_TOOLS,
            **_OTHER_NAMES,
            "max_completion_tokens": _TOKEN_LIMIT,
            "top_logprobs": _number(0, MAX_LOGPROBS, "integer"),
        },
    ),
    "CompletionRequest": (
        ("prompt",),
        {**_SAMPLING, **_OTHER_NAMES, "prompt": _PROMPTS, "logprobs": _number(0, MAX_LOGPROBS, "integer")},
    ),
    "ResponsesRequest": (
        ("input",),
        {
            "input": {"anyOf": [_TEXT, _list(_ITEM, minItems=1)]},
            "max_output_tokens": _number(1, MAX_COUNT, "integer"),
            "temperature": _SAMPLING["temperature"],
            "top_p": _SAMPLING["top_p"],
            "tools": _list(
                {**_FUNCTION, "properties": {**_FUNCTION["properties"], "type": {"const": "function"}}},
                maxItems=MAX_TOOLS,
            ),
            "tool_choice": {"anyOf": [_CHOICE, _RESPONSES_TOOL, _allowed(_RESPONSES_TOOL, **_ALLOWED)]},
            "text": _object(format=_object(("type",), type={"enum": ["text", "json_object", "json_schema"]})),
            "reasoning": _object(effort={"type": ["string", "null"]}),
            "top_logprobs": _number(0, MAX_LOGPROBS, "integer"),
            "cache_salt": _SAMPLING["cache_salt"],
        },
    ),
    "EmbeddingRequest": (
        ("input",),
        {"input": _PROMPTS, "dimensions": {**_WHOLE, "minimum": 1}, "cache_salt": _SAMPLING["cache_salt"]},
    ),
    "MessagesRequest": (
        ("model", "messages", "max_tokens"),
        {
            **_ANTHROPIC,
            "max_tokens": _number(1, MAX_COUNT, "integer"),
            "temperature": _SAMPLING["temperature"],
            "top_p": _SAMPLING["top_p"],
            "top_k": _SAMPLING["top_k"],
            "stop_sequences": _SAMPLING["stop"]["anyOf"][1],
            "cache_salt": _SAMPLING["cache_salt"],
        },
    ),
    "CountTokensRequest": (("model", "messages"), _ANTHROPIC),
    "TokenizeRequest": ((), {name: _CHAT_TOOLS[name] for name in ("messages", "tools")}),
    "DetokenizeRequest": (("tokens",), {"tokens": {**_TOKEN_IDS, "minItems": 0}}),
}
OWN_SCHEMAS: dict[str, Any] = {
    "Object": _OBJECT,
    "Text": _TEXT,
    "Event": _object(("data",), data=_TEXT, event=_TEXT),
    "Model": _object(("id", "object"), id=_TEXT, object={"const": "model"}, created=_WHOLE, max_model_len=_WHOLE),
    "ModelList": _object(("object", "data"), object={"const": "list"}, data=_list({"$ref": REF + "Model"})),
    "TokenCount": _object(("input_tokens",), input_tokens=_WHOLE),
    "GeneratedList": _list({"$ref": REF + "Generated"}),
    "Version": _object(("version",), version=_TEXT),
    "Error": _object(
        ("error",),
        error=_object(
            ("message", "type"),
            message=_TEXT,
            type=_TEXT,
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        ),
    ),
    "AnthropicError": _object(
        ("type", "error"), type={"const": "error"}, error=_object(("type", "message"), type=_TEXT, message=_TEXT)
    ),
    "TGIError": _object(("error", "error_type"), error=_TEXT, error_type=_TEXT),
}
