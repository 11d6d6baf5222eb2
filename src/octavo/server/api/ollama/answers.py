"""Ollama's text generation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from octavo.data.request_options import RequestOptions
from octavo.engine.call_arguments import parse_arguments
from octavo.errors import RequestError
from octavo.http.apis import OLLAMA
from octavo.runtime.ids import new_id
from octavo.server.answers.answer_form import AnswerForm, AnswerReader
from octavo.server.answers.answering import answer
from octavo.server.answers.jobs import LINES, Job, json_response, line
from octavo.server.answers.tools import NO_TOOLS, read_chat_tools
from octavo.server.api.conversation import Conversation, answer_conversation, continuing
from octavo.server.api.ollama.messages import read_conversation
from octavo.server.api.ollama.replies import Answer, AnswerMessage, Call, FunctionToCall
from octavo.server.api.ollama.requests import ChatRequest, PromptRequest
from octavo.server.api.openai.logprobs import chat_logprobs
from octavo.server.bodies import look_at
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.http.errors import HttpError
    from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.answers.jobs import ChoiceUpdate
    from octavo.server.answers.usage import Usage
    from octavo.server.api.ollama.requests import AnswerRequest
    from octavo.server.service import Service


@endpoint(body=ChatRequest, answer=Answer, is_streamed=True)
async def chat(service: Service, http_request: Request, request: ChatRequest) -> Response:
    """Answer a conversation."""
    options = _job_options(service, request)
    if not request.messages:
        return _loaded(service, request, Answer(request.model, message=AnswerMessage()))
    given, tool_format = request.messages, service.answer_style.tools

    def read() -> tuple[SamplingParams, Conversation]:
        params, messages = request.params(service), read_conversation(given)
        toolbox = read_chat_tools(request.tools, None, None, tool_format)
        return params, Conversation(messages, toolbox, continuing(messages) | request.template_options(service))

    params, conversation = await look_at(http_request, read)
    reply = partial(OllamaReply, service, request, is_chat=True)
    return await answer_conversation(service, http_request, conversation, params, reply, id_prefix="chat-", **options)


@endpoint(body=PromptRequest, answer=Answer, is_streamed=True)
async def generate(service: Service, http_request: Request, request: PromptRequest) -> Response:
    """Answer a prompt.

    The chat template is not used if `raw` is true, or if the model has no chat template and the request has no
    `system`.
    """
    options = _job_options(service, request)
    if not request.prompt:
        return _loaded(service, request, Answer(request.model, response=""))
    if request.raw and (request.system or request.think):
        raise RequestError("raw uses the prompt as it is: leave system and think out", parameter="raw")
    params = await look_at(http_request, partial(request.params, service))
    reply = partial(OllamaReply, service, request, is_chat=False)
    if request.raw or not (request.system or service.engine.input_processor.has_chat_template):
        with service.enter(http_request, 1) as place:
            job = Job(
                request_id=f"gen-{new_id()}",
                prompts=[request.prompt],
                params=params,
                place=place,
                deadline=http_request.state.deadline,
                **options,
            )
            return await answer(service, http_request, job, reply(job, AnswerForm()))
    messages = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": request.prompt})
    conversation = Conversation(messages, NO_TOOLS, request.template_options(service), field="prompt")
    return await answer_conversation(service, http_request, conversation, params, reply, id_prefix="gen-", **options)


def _job_options(service: Service, request: AnswerRequest) -> dict[str, Any]:
    name, is_stream = request.settle(service), request.stream is not False
    client_names = {"structured_outputs": "tools" if request.format in (None, "") else "format"}
    return {
        "model": name,
        "stream": is_stream,
        "form": LINES,
        "options": RequestOptions(cache_salt=request.cache_salt),
        "client_names": client_names,
    }


def _loaded(service: Service, request: AnswerRequest, body: Answer) -> Response:
    """Answer a request without a prompt. The model stays loaded, unlike in Ollama."""
    service.check_ready()
    body.done, body.done_reason = True, "unload" if request.is_unloading else "load"
    return json_response(body)


class OllamaReply:
    """Writes an answer as lines of JSON. The last line has the token counts. A tool call is never split."""

    def __init__(self, service: Service, request: AnswerRequest, _job: Job, form: AnswerForm, *, is_chat: bool) -> None:
        self._piece = service.engine.output_processor.piece
        self._request, self._form, self._is_chat = request, form, is_chat
        self._reader = AnswerReader(replace(form, is_whole=True))
        self._called, self._arguments, self._num_calls = "", "", 0  # the unfinished call
        self._reason = ""
        self._metrics: RequestMetrics | None = None

    def update(self, update: ChoiceUpdate, _usage: Usage | None) -> bytes:
        """Return a line of JSON, or b"" while the parser waits for more text."""
        body = self._take(update.completion, update.output)
        has_message = body.message is not UNSET and body.message != AnswerMessage()
        return line(body) if has_message or body.response or body.thinking or body.logprobs else b""

    def end(self, usage: Usage) -> bytes:
        """Return the last line."""
        return line(self._ended(self._with_message(AnswerMessage()), usage))

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Answer:
        """Return the answer."""
        ((completion,),) = (output.outputs for output in outputs)
        return self._ended(self._take(completion, outputs[0]), usage)

    def error(self, error: HttpError) -> bytes:
        """Encode an error."""
        return OLLAMA.event(error)

    def _take(self, completion: CompletionOutput, output: RequestOutput) -> Answer:
        message = AnswerMessage()
        thinking, calls = "", list[Call]()
        for part in self._reader.read(completion):
            if part.kind == "arguments":
                self._arguments += part.text
                continue
            calls += self._end_call(message)
            match part.kind:
                case "content":
                    message.content += part.text
                case "reasoning":
                    thinking += part.text
                case "call":
                    self._called = part.text
        if completion.finished:
            calls += self._end_call(message)
            self._reason = "length" if completion.finish_reason == "length" else "stop"
            self._metrics = output.metrics
        message.thinking, message.tool_calls = thinking or UNSET, calls or UNSET
        body = self._with_message(message)
        logprobs = chat_logprobs(completion.logprobs, self._request.top_logprobs or 0, self._piece)
        if logprobs is not None:
            body.logprobs = logprobs.content
        return body

    def _end_call(self, message: AnswerMessage) -> list[Call]:
        """Return the ended tool call, if any.

        A call with invalid or incomplete arguments becomes content, because clients run every call.
        """
        name, text, self._called, self._arguments = self._called, self._arguments, "", ""
        if not name:
            return []
        arguments = parse_arguments(text) if text else None
        if arguments is None:
            message.content += name + text
            return []
        assert self._form.toolbox.format is not None
        function = FunctionToCall(self._num_calls, name, arguments)
        self._num_calls += 1
        return [Call(self._form.toolbox.format.new_call_id(), function)]

    def _with_message(self, message: AnswerMessage) -> Answer:
        if self._is_chat:
            return Answer(self._request.model, message=message)
        return Answer(self._request.model, response=message.content, thinking=message.thinking)

    def _ended(self, body: Answer, usage: Usage) -> Answer:
        body.done, body.done_reason = True, self._reason
        times = durations([] if self._metrics is None else [self._metrics])
        body.total_duration, body.prompt_eval_duration, body.eval_duration = times
        body.load_duration = 0
        body.prompt_eval_count, body.eval_count = usage.prompt_tokens, usage.completion_tokens
        body.cached_tokens, body.receipt = usage.prompt_tokens_details.cached_tokens, usage.receipt
        return body


def durations(metrics: Sequence[RequestMetrics]) -> tuple[int, int, int]:
    """Return the durations of the whole request, of prefill, and of decoding, in nanoseconds.

    Several requests count as one request. Requests that never started or never finished are ignored.
    """
    begun = [each for each in metrics if each.first_scheduled_time is not None and each.finished_time is not None]
    if not begun:
        return 0, 0, 0
    arrival, end = min(each.arrival_time for each in begun), max(each.finished_time or 0 for each in begun)
    start = min(each.first_scheduled_time or 0 for each in begun)
    first = min((each.first_token_time for each in begun if each.first_token_time is not None), default=end)
    return round(1e9 * (end - arrival)), round(1e9 * (first - start)), round(1e9 * (end - first))
