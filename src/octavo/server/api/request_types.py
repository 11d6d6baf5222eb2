"""Types of request fields for the OpenAPI document. The routes check most values, so that errors name the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict

from octavo.data.request_options import MAX_CACHE_SALT_CHARS
from octavo.sampling_params import LIMITS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from octavo.server.answers.tools import MAX_TOOLS, NAME_PATTERN

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

T = TypeVar("T")
Object = dict[str, Any]
Some = Annotated[list[T], Field(min_length=1)]
Tools = Annotated[list[T], Field(max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class Shown:
    """An annotation. The OpenAPI document shows `kind` instead of the annotated type."""

    kind: Any

    def __get_pydantic_json_schema__(self, _checked: CoreSchema, handler: GetJsonSchemaHandler) -> Object:
        return handler(TypeAdapter(self.kind).core_schema)


def within(name: str, *more: int) -> Shown:
    """Return an annotation that shows the limits of the field `name` of `SamplingParams`.

    more: Allowed values outside the limits.
    """
    limits = LIMITS[name]
    low = Field(gt=limits.low) if limits.is_open else Field(ge=limits.low)
    number = Annotated[int if limits.is_whole else float, low, Field(le=limits.high)]  # type: ignore[valid-type]
    return Shown(number | Literal[more] if more else number)


TokenId = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Prompts = Text | Some[Text] | Some[TokenId] | Some[Some[TokenId]]
StopText = Annotated[str, Field(max_length=MAX_STOP_STRING_CHARS)]
StopTexts = Annotated[list[Annotated[StopText, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)]
LogitBias = Annotated[
    dict[str, float],
    BeforeValidator(lambda given: {} if given == [] else given),  # llama.cpp's default is []
    WithJsonSchema({
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }),
]  # fmt: skip
MaxTokens = Annotated[int, within("max_tokens", -1)]
OutputTokens = Annotated[int, within("max_tokens")]
NumLogprobs = Annotated[int, within("logprobs")]
NumChoices = Annotated[int, within("n")]
Temperature = Annotated[float, within("temperature")]
TopP = Annotated[float, within("top_p")]
TopK = Annotated[int, within("top_k", -1)]
RepetitionPenalty = Annotated[float, within("repetition_penalty")]
CacheSalt = Annotated[str, Shown(Annotated[Text, Field(max_length=MAX_CACHE_SALT_CHARS)])]
FunctionName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
StructuredOutputs = TypedDict(
    "StructuredOutputs",
    {"json": Object | str, "json_object": bool, "regex": str, "choice": list[str], "grammar": str, "starts_after": str},
    total=False,
)
ResponseFormat = TypedDict(
    "ResponseFormat", {"type": Literal["text", "json_object", "json_schema"], "json_schema": NotRequired[Object]}
)

# --- chat completions
TextPart = TypedDict("TextPart", {"type": Literal["text"], "text": str})
Content = str | list[TextPart]
CalledFunction = TypedDict("CalledFunction", {"name": str, "arguments": str})
ChatCall = TypedDict(
    "ChatCall", {"id": NotRequired[str], "type": NotRequired[Literal["function"]], "function": CalledFunction}
)
UserMessage = TypedDict(
    "UserMessage", {"role": Literal["system", "developer", "user"], "content": Content, "name": NotRequired[str]}
)
AssistantMessage = TypedDict(
    "AssistantMessage",
    {
        "role": Literal["assistant"],
        "content": NotRequired[Content | None],
        "tool_calls": NotRequired[list[ChatCall]],
        "reasoning_content": NotRequired[str],
        "reasoning": NotRequired[str],
    },
)
ToolMessage = TypedDict("ToolMessage", {"role": Literal["tool"], "content": Content, "tool_call_id": str})
ChatMessages = Some[UserMessage | AssistantMessage | ToolMessage]
Function = TypedDict(
    "Function",
    {
        "name": FunctionName,
        "description": NotRequired[str],
        "parameters": NotRequired[Object],
        "strict": NotRequired[bool | None],
    },
)
ChatTool = TypedDict("ChatTool", {"type": Literal["function"], "function": Function})
Named = TypedDict("Named", {"name": str})
NamedChatTool = TypedDict("NamedChatTool", {"type": Literal["function"], "function": Named})
AllowedChatTools = TypedDict("AllowedChatTools", {"mode": Literal["auto", "required"], "tools": Some[NamedChatTool]})
AllowedChatChoice = TypedDict(
    "AllowedChatChoice", {"type": Literal["allowed_tools"], "allowed_tools": NotRequired[AllowedChatTools]}
)
Mode = Literal["none", "auto", "required"]
ChatChoice = Mode | NamedChatTool | AllowedChatChoice

Prediction = TypedDict("Prediction", {"type": Literal["content"], "content": Content})

# --- /api/chat
OllamaFunction = TypedDict("OllamaFunction", {"name": str, "arguments": NotRequired[Object]})
OllamaCall = TypedDict("OllamaCall", {"id": NotRequired[str | None], "function": OllamaFunction})
OllamaMessage = TypedDict(
    "OllamaMessage",
    {
        "role": str,
        "content": NotRequired[str | None],
        "thinking": NotRequired[str],
        "tool_calls": NotRequired[list[OllamaCall]],
        "tool_name": NotRequired[str],
        "tool_call_id": NotRequired[str],
    },
)

# --- /v1/messages
ToolUse = TypedDict("ToolUse", {"type": Literal["tool_use"], "id": str, "name": str, "input": Object})
ToolResult = TypedDict(
    "ToolResult", {"type": Literal["tool_result"], "tool_use_id": str, "content": NotRequired[Content]}
)
Thinking = TypedDict("Thinking", {"type": Literal["thinking"], "thinking": str, "signature": NotRequired[str]})
UserTurn = TypedDict("UserTurn", {"role": Literal["user"], "content": str | list[TextPart | ToolResult]})
AssistantTurn = TypedDict(
    "AssistantTurn", {"role": Literal["assistant"], "content": str | list[TextPart | ToolUse | Thinking]}
)
Turns = Some[UserTurn | AssistantTurn]
AnthropicTool = TypedDict(
    "AnthropicTool", {"name": FunctionName, "description": NotRequired[str], "input_schema": Object}
)
AnthropicChoice = TypedDict(
    "AnthropicChoice", {"type": Literal["auto", "any", "tool", "none"], "name": NotRequired[str]}
)
ThinkingConfig = TypedDict("ThinkingConfig", {"type": Literal["enabled", "disabled", "adaptive"]})
OutputFormat = TypedDict("OutputFormat", {"type": Literal["json_schema"], "schema": Object})
OutputConfig = TypedDict("OutputConfig", {"effort": str | None, "format": OutputFormat}, total=False)

# --- /v1/responses
InputText = TypedDict("InputText", {"type": Literal["input_text", "output_text"], "text": str})
InputContent = str | list[InputText]
MessageItem = TypedDict(
    "MessageItem",
    {
        "type": NotRequired[Literal["message"]],
        "role": Literal["user", "assistant", "system", "developer"],
        "content": InputContent,
    },
)
CallItem = TypedDict(
    "CallItem", {"type": Literal["function_call"], "name": str, "arguments": str, "call_id": NotRequired[str]}
)
CallOutputItem = TypedDict(
    "CallOutputItem", {"type": Literal["function_call_output"], "output": InputContent, "call_id": NotRequired[str]}
)
ReasoningText = TypedDict("ReasoningText", {"type": str, "text": str}, total=False)
ReasoningItem = TypedDict("ReasoningItem", {"type": Literal["reasoning"], "content": NotRequired[list[ReasoningText]]})
Items = str | Some[MessageItem | CallItem | CallOutputItem | ReasoningItem]


class ResponsesTool(Function):
    """A function tool."""

    type: NotRequired[Literal["function"]]


NamedTool = TypedDict("NamedTool", {"type": Literal["function"], "name": str})
AllowedTools = TypedDict(
    "AllowedTools",
    {"type": NotRequired[Literal["allowed_tools"]], "mode": Literal["auto", "required"], "tools": Some[NamedTool]},
)
ResponsesChoice = Mode | NamedTool | AllowedTools
TextFormat = TypedDict("TextFormat", {"type": Literal["text", "json_object", "json_schema"]})
TextConfig = TypedDict("TextConfig", {"format": TextFormat}, total=False)
Reasoning = TypedDict("Reasoning", {"effort": str | None}, total=False)

# --- answers
TokenCount = TypedDict("TokenCount", {"input_tokens": int})
Version = TypedDict("Version", {"version": str})
Model = TypedDict("Model", {"id": str, "object": Literal["model"], "created": int, "max_model_len": int})
ModelList = TypedDict("ModelList", {"object": Literal["list"], "data": list[Model]})
OllamaModels = TypedDict("OllamaModels", {"models": list[Object]})
