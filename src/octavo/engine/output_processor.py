"""Turn the core's tokens into request outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from octavo.engine.stop_strings import StopSearch, StopStrings
from octavo.engine.tokenizer_interface import NoDetokenizer, NoTokenizer, SomeSpecialTokens
from octavo.outputs import CompletionOutput, ErrorCode, PromptLogprobs, RequestMetrics, RequestOutput, logprobs_by_token
from octavo.runtime.faults import log_fault, request_failed
from octavo.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.data.model_output import TokenLogprobs
    from octavo.engine.tokenizer_interface import Detokenizer, DetokenizerFactory
    from octavo.outputs import EngineCoreOutput, Logprob
    from octavo.sampling_params import SamplingParams

Text = TypeVar("Text")
_NUM_TEXTS = 1 << 14


@dataclass(slots=True)
class _OutputState:
    """One stream. In DELTA mode, `logprobs` has only undelivered entries."""

    index: int
    detokenizer: Detokenizer | None = None
    stops: StopSearch | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_shown_chars: int = 0
    num_shown_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0


@dataclass(slots=True)
class _RequestState:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    streams: dict[str, _OutputState]
    metrics: RequestMetrics
    prompt_logprobs: PromptLogprobs | None
    stop_strings: StopStrings | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: ErrorCode | None = None
    pooled: bytes | None = None

    @property
    def finished(self) -> bool:
        for stream in self.streams.values():  # noqa: SIM110
            if stream.finish_reason is None:
                return False
        return True


@dataclass(frozen=True, slots=True)
class ProcessedOutputs:
    """A step's outputs, and streams that the core must end because of a stop string or an exception."""

    request_outputs: list[RequestOutput]
    streams_to_stop: list[str]
    streams_to_fail: list[str]


class TokenTexts(dict[int, Text], Generic[Text]):
    """A cache of tokens' texts."""

    def __init__(self, decode: Callable[[int], Text]) -> None:
        self._decode = decode

    def __missing__(self, token_id: int) -> Text:
        if len(self) >= _NUM_TEXTS:
            self.clear()
        text = self[token_id] = self._decode(token_id)
        return text


class OutputProcessor:
    """Turns tokens into outputs, and keeps the texts of unfinished requests.

    A stream is one of a request's n outputs.
    """

    def __init__(self, tokenizer: DetokenizerFactory | None, clock: Callable[[], float]) -> None:
        self.tokenizer = tokenizer or NoTokenizer()
        self._clock = clock
        self._states: dict[str, _RequestState] = {}
        self._owner: dict[str, str] = {}
        self._token_texts = TokenTexts(self.tokenizer.decode_token)
        self._token_pieces = TokenTexts(partial(self.tokenizer.piece, skip_special_tokens=False))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def add_request(
        self,
        request_id: str,
        stream_ids: list[str],
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float,
    ) -> None:
        """Register a new request."""
        streams = {}
        for index, stream_id in enumerate(stream_ids):
            streams[stream_id] = _OutputState(index, logprobs=None if params.logprobs is None else [])
            self._owner[stream_id] = request_id
        self._states[request_id] = _RequestState(
            request_id,
            prompt,
            prompt_token_ids,
            params,
            streams,
            RequestMetrics(arrival_time=arrival_time),
            None if params.prompt_logprobs is None else PromptLogprobs(self._token_texts),
        )

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence, or "" if the engine has no tokenizer."""
        detokenizer = self.tokenizer.incremental_detokenizer([], skip_special_tokens=skip_special_tokens)
        return detokenizer.add(token_ids) + detokenizer.finish()

    def piece(self, token_id: int) -> str | bytes:
        """Return a token's text, or its bytes if they may be part of a character."""
        return self._token_pieces[token_id]

    def tokenizer_of(self, params: SamplingParams) -> DetokenizerFactory:
        """Return a tokenizer that shows the special tokens in `shown_special_token_ids`."""
        shown = params.shown_special_token_ids
        return SomeSpecialTokens(self.tokenizer, shown) if shown else self.tokenizer

    def _detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> Detokenizer:
        if not params.detokenize:
            return NoDetokenizer()
        tokenizer = self.tokenizer_of(params)
        return tokenizer.incremental_detokenizer(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def stream_ids(self, request_id: str) -> list[str]:
        """Return the ids of a request's unfinished streams."""
        state = self._states.get(request_id)
        if state is None:
            return []
        return [stream_id for stream_id, stream in state.streams.items() if stream.finish_reason is None]

    def request_ids(self) -> list[str]:
        """Return the ids of unfinished requests."""
        return list(self._states)

    def forget_all(self) -> list[str]:
        """Drop all requests after the core died, and return their ids."""
        request_ids = list(self._states)
        self._states.clear()
        self._owner.clear()
        return request_ids

    def process(self, core_outputs: list[EngineCoreOutput]) -> ProcessedOutputs:
        """Turn a step's core outputs into request outputs. An exception ends only one request."""
        changed: dict[str, _RequestState] = {}
        to_stop: list[str] = []
        to_fail: list[str] = []
        now = self._clock()
        for core_output in core_outputs:
            request_id = self._owner.get(core_output.request_id)
            if request_id is None:
                continue  # has already ended
            state = changed[request_id] = self._states[request_id]
            try:
                if self._advance(state, state.streams[core_output.request_id], core_output, now):
                    to_stop.append(core_output.request_id)
            except BaseException as error:  # noqa: BLE001 - see octavo.runtime.faults
                to_fail += self._give_up(state, error)
        outputs: list[RequestOutput] = []
        for state in changed.values():
            try:
                outputs += self._emit(state, now)
            except BaseException as error:  # noqa: BLE001
                to_fail += self._give_up(state, error)
                outputs.append(self._failed_output(state))
        return ProcessedOutputs(outputs, to_stop, to_fail)

    def _give_up(self, state: _RequestState, error: BaseException) -> list[str]:
        log_fault(state.request_id, "its answer was made", error)
        state.error_code, state.error = ErrorCode.REQUEST_FAILED, request_failed(state.request_id)
        stream_ids = []
        for stream_id, stream in state.streams.items():
            self._owner.pop(stream_id, None)
            if stream.finish_reason is None:
                stream.finish_reason = "error"
                stream_ids.append(stream_id)
        return stream_ids

    def _failed_output(self, state: _RequestState) -> RequestOutput:
        self._states.pop(state.request_id, None)
        outputs = [CompletionOutput(each.index, "", [], finish_reason="error") for each in state.streams.values()]
        return RequestOutput(
            state.request_id,
            state.prompt,
            state.prompt_token_ids,
            outputs,
            finished=True,
            metrics=state.metrics,
            error=state.error,
            error_code=state.error_code,
        )

    def _advance(self, state: _RequestState, stream: _OutputState, news: EngineCoreOutput, now: float) -> bool:
        state.num_cached_tokens = max(state.num_cached_tokens, news.num_cached_tokens)
        stream.num_cached_tokens = max(stream.num_cached_tokens, news.num_cached_tokens)
        stream.num_computed_tokens = max(stream.num_computed_tokens, news.num_computed_tokens)
        stream.num_sampled_tokens += len(news.new_token_ids)
        if news.error is not None and state.error is None:
            state.error_code, state.error = ErrorCode.read(news.error)
            if state.error_code is ErrorCode.REQUEST_FAILED:
                state.error = request_failed(state.request_id)
        state.pooled = state.pooled or news.pooled
        if state.prompt_logprobs is not None and stream.index == 0:
            state.prompt_logprobs.entries += news.new_prompt_logprobs
        if state.metrics.first_scheduled_time is None:
            state.metrics.first_scheduled_time = news.admitted_time
        if news.new_token_ids and state.metrics.first_token_time is None:
            state.metrics.first_token_time = now
        num_before = len(stream.token_ids)
        stop_found = self._append(state, stream, news)
        if news.num_draft_tokens:
            state.metrics.num_draft_tokens += news.num_draft_tokens
            state.metrics.num_accepted_tokens += min(news.num_accepted_tokens, len(stream.token_ids) - num_before)
        if stop_found:
            self._owner.pop(news.request_id)
            return news.finish_reason is None
        if news.finish_reason is not None:
            stream.finish_reason, stream.stop_reason = news.finish_reason, news.stop_reason
            self._owner.pop(news.request_id)
        return False

    def _append(self, state: _RequestState, stream: _OutputState, news: EngineCoreOutput) -> bool:
        params, detokenizer = state.params, stream.detokenizer
        if detokenizer is None:
            detokenizer = self._begin(state, stream)
        for position, token_id in enumerate(news.new_token_ids):
            stream.token_ids.append(token_id)
            if stream.logprobs is not None:
                entry = news.new_logprobs[position]
                stream.logprobs.append(self._logprob_dict(entry))
                stream.cumulative_logprob += entry.logprobs[0]
            is_last = position == len(news.new_token_ids) - 1
            ended = news.finish_reason is not None and is_last
            hidden = ended and news.finish_reason == "stop" and not params.include_stop_str_in_output
            piece = "" if hidden else detokenizer.add([token_id])
            if ended:
                piece += detokenizer.finish()
            stream.text += piece
            if piece and stream.stops is not None:
                match = stream.stops.add(piece, counts=len(stream.token_ids) > params.min_tokens)
                if match is not None:
                    num_cut_off = 0 if params.include_stop_str_in_output else len(match.stop_string)
                    stream.text = stream.text[: len(stream.text) - match.num_chars_after - num_cut_off]
                    stream.finish_reason, stream.stop_reason = "stop", match.stop_string
                    state.metrics.num_wasted_tokens += len(news.new_token_ids) - 1 - position
                    return True
        if news.finish_reason is not None and not news.new_token_ids:
            stream.text += detokenizer.finish()
        return False

    def _begin(self, state: _RequestState, stream: _OutputState) -> Detokenizer:
        params = state.params
        if params.stop_strings:
            state.stop_strings = state.stop_strings or StopStrings(params.stop_strings)
            stream.stops = StopSearch(state.stop_strings)
        stream.detokenizer = self._detokenizer(state.prompt_token_ids, params)
        return stream.detokenizer

    def _logprob_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        return logprobs_by_token(entry, self._token_texts)

    def _emit(self, state: _RequestState, now: float) -> list[RequestOutput]:
        finished = state.finished
        if finished:
            state.metrics.finished_time = now
            _count_computed(state)
            del self._states[state.request_id]
        if state.params.output_kind is RequestOutputKind.FINAL_ONLY and not finished:
            return []
        delta = state.params.output_kind is RequestOutputKind.DELTA
        return [
            RequestOutput(
                request_id=state.request_id,
                prompt=state.prompt,
                prompt_token_ids=state.prompt_token_ids,
                outputs=[self._completion(stream, delta=delta) for stream in state.streams.values()],
                finished=finished,
                prompt_logprobs=state.prompt_logprobs,
                num_cached_tokens=state.num_cached_tokens,
                metrics=state.metrics,
                error=state.error,
                error_code=state.error_code,
                pooled=state.pooled,
            )
        ]

    @staticmethod
    def _completion(stream: _OutputState, *, delta: bool) -> CompletionOutput:
        end = len(stream.text)
        if stream.finish_reason is None and stream.stops is not None:
            end -= stream.stops.num_held_back_chars
        first_char, first_token = (stream.num_shown_chars, stream.num_shown_tokens) if delta else (0, 0)
        end = max(end, stream.num_shown_chars)
        stream.num_shown_chars, stream.num_shown_tokens = end, len(stream.token_ids)
        logprobs = stream.logprobs
        if logprobs is not None and delta:
            stream.logprobs = []
        elif logprobs is not None and stream.finish_reason is None:
            logprobs = [*logprobs]
        return CompletionOutput(
            index=stream.index,
            text=stream.text[first_char:end],
            token_ids=stream.token_ids[first_token:],
            cumulative_logprob=None if stream.logprobs is None else stream.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=stream.finish_reason,
            stop_reason=stream.stop_reason,
        )


def _count_computed(state: _RequestState) -> None:
    for stream in state.streams.values():
        needed = len(state.prompt_token_ids) + stream.num_sampled_tokens - 1 - stream.num_cached_tokens
        state.metrics.num_computed_tokens += stream.num_computed_tokens
        state.metrics.num_recomputed_tokens += max(stream.num_computed_tokens - needed, 0)
