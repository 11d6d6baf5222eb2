"""Fakes for what needs a model: a tokenizer of bytes, a chat template, and an executor that recites a text.

With them the real core, engine and server run without weights and give known answers. Modules that only text needs are
imported late, so that processes with only the core start faster.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.config import CacheConfig, ModelInfo, SchedulerConfig
from octavo.core.scheduler import Scheduler
from octavo.data.capacity import EngineCapacity
from octavo.data.events import FanOut
from octavo.data.metrics import EngineMetrics
from octavo.data.model_output import ModelOutput, TokenLogprobs
from octavo.data.recent_events import RecentEvents
from octavo.engine.engine_core import EngineCore
from octavo.errors import ExecutionError
from octavo.runtime.text_work import progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.data.scheduler_output import NewRequestData, SchedulerOutput
    from octavo.engine.llm_engine import Engine

EOS = 256
VOCAB_SIZE = 257
TEXT = "The quick brown fox — ein schneller Fuchs, 狐 — jumps över the lazy dog. "
SHIFT = 7  # each further choice of a request starts so many bytes later in the text


class ByteTokenizer:
    """One token per byte of UTF-8, and EOS."""

    longest_token_chars = 5
    has_byte_runs = False

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        token_ids = list(text.encode())
        progress(len(token_ids))
        return token_ids

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode(text)[-num_tokens:]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = ByteDetokenizer(skip_special_tokens)
        return detokenizer.add(token_ids) + detokenizer.finish()

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def token_id(self, _text: str) -> int | None:
        return None

    def token(self, token_id: int) -> str:
        return f"<{token_id}>"

    def decode_token(self, token_id: int) -> str:
        return "<eos>" if token_id == EOS else bytes([token_id]).decode(errors="replace")

    def piece(self, token_id: int, *, skip_special_tokens: bool = False) -> str | bytes:
        if token_id == EOS:
            return "" if skip_special_tokens else "<eos>"
        return chr(token_id) if token_id < 0x80 else bytes([token_id])

    def incremental_detokenizer(self, prompt_token_ids: list[int], *, skip_special_tokens: bool) -> ByteDetokenizer:
        return ByteDetokenizer(skip_special_tokens)


class ByteDetokenizer:
    """Holds back the bytes of an unfinished character."""

    num_prompt_bytes = 0

    def __init__(self, skip_special_tokens: bool) -> None:
        self._skip_special_tokens = skip_special_tokens
        self._held = b""

    @property
    def held(self) -> bytes:
        return self._held

    def add(self, token_ids: list[int]) -> str:
        text = ""
        for token_id in token_ids:
            if token_id == EOS:
                text += self.finish() + ("" if self._skip_special_tokens else "<eos>")
                continue
            self._held += bytes([token_id])
            try:
                text += self._held.decode()
            except UnicodeDecodeError as error:
                if error.reason != "unexpected end of data":
                    text += self.finish()
                continue
            self._held = b""
        return text

    def finish(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text


class FakeChatTemplate:
    """`<role>content` for each message, then the assistant's tag; other data comes first.

    marks: text that the template claims to contain, from which the server derives the form of calls and reasoning.
    behind: text after the assistant's tag.
    """

    def __init__(self, marks: str = "", behind: str = "") -> None:
        self.templates = {"default": marks}
        self._behind = behind
        self.tools: Any = None
        self.options: dict[str, Any] = {}  # of the last prompt

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        from octavo.engine.chat_template import template_role

        self.tools, self.options = options.get("tools"), options
        text = "" if self.tools is None else f"<tools>{json.dumps(self.tools)}\n"
        for message in messages:
            calls = message.get("tool_calls")
            content = message["content"] or ""
            if not isinstance(content, str):
                content = "\n".join(part["text"] for part in content)
            text += f"<{template_role(message['role'])}>{content}{json.dumps(calls) if calls else ''}\n"
        return text + "<assistant>" + self._behind if options.get("add_generation_prompt", True) else text


def answer_token(num_prompt_tokens: int, sample_index: int, num_output_tokens: int) -> int:
    """Return the next token: one round of the text from a place set by the prompt's length and the choice, then EOS."""
    data = TEXT.encode()
    if num_output_tokens % (len(data) + 1) == len(data):
        return EOS
    return data[(num_prompt_tokens + SHIFT * sample_index + num_output_tokens) % len(data)]


def answer_text(num_prompt_tokens: int, sample_index: int = 0, num_tokens: int | None = None) -> str:
    """Return the answer to a request without EOS, cut after `num_tokens`."""
    num_tokens = len(TEXT.encode()) if num_tokens is None else num_tokens
    tokens = [answer_token(num_prompt_tokens, sample_index, index) for index in range(num_tokens)]
    detokenizer = ByteDetokenizer(skip_special_tokens=True)
    return detokenizer.add(tokens) + detokenizer.finish()


@dataclass
class _Row:
    data: NewRequestData
    token_ids: list[int]
    num_computed_tokens: int


class FakeExecutor:
    """Recites `TEXT`. Checks its inputs as a worker would have to.

    step_s: seconds of a step. answer: recited instead of `TEXT`, always from its beginning. guesses: whether each draft
    after a step's token is right; default no drafts. `fail_next` makes the next step that computes a token fail (after
    an ended request the engine does a step that computes none, at a time that a test cannot know), `die` kills the
    engine's thread. `gate`, while cleared, delays the next step.
    """

    def __init__(self, step_s: float = 0.0, answer: str | None = None, guesses: tuple[bool, ...] = ()) -> None:
        self.step_s = step_s
        self.answer = answer
        self.guesses = guesses
        self.fail_next = False
        self.die = False
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.num_computing_steps = 0  # steps with tokens to compute
        self.is_shut_down = False
        self._rows: dict[str, _Row] = {}
        self._result: ModelOutput | None = None
        self._num_tokens = 0

    def prepare(self, _params: Any, _tenant: str) -> None:
        return None

    def submit(self, scheduled: SchedulerOutput) -> None:
        self.num_steps += 1
        for request_id in scheduled.finished_req_ids | scheduled.preempted_req_ids:
            self._rows.pop(request_id, None)
        for data in scheduled.scheduled_new_reqs:
            self._rows[data.request_id] = _Row(data, list(data.token_ids), data.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._rows[request_id].num_computed_tokens = num_computed
        self._result = ModelOutput(scheduled.step, {})
        self._num_tokens = sum(scheduled.num_scheduled_tokens.values())
        self.num_computing_steps += self._num_tokens > 0
        for request_id, count in scheduled.num_scheduled_tokens.items():
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            self._advance(request_id, self._rows[request_id], count - len(drafts), drafts, self._result)

    def _advance(self, request_id: str, row: _Row, count: int, drafts: list[int], result: ModelOutput) -> None:
        start, end = row.num_computed_tokens, row.num_computed_tokens + count
        if end > len(row.token_ids):
            raise AssertionError("more was scheduled than there is")
        params, num_prompt = row.data.sampling_params, row.data.num_prompt_tokens
        if params.prompt_logprobs is not None:
            scored = row.token_ids[start + 1 : min(end + 1, num_prompt)]
            result.prompt_logprobs[request_id] = [_logprobs(token, params.prompt_logprobs) for token in scored]
        if end == len(row.token_ids):
            ahead = [
                self._token(num_prompt, row.data.sample_index, len(row.token_ids) - num_prompt + index)
                for index in range(len(drafts) + len(self.guesses) + 1)
            ]
            num_right = next((i for i, draft in enumerate(drafts) if draft != ahead[i]), len(drafts))
            sampled = result.sampled_token_ids[request_id] = ahead[: num_right + 1]
            row.token_ids += sampled
            if params.logprobs is not None:
                result.logprobs[request_id] = [_logprobs(token, params.logprobs) for token in sampled]
            if self.guesses:
                behind = zip(ahead[num_right + 1 :], self.guesses, strict=False)
                result.draft_token_ids[request_id] = [token if is_right else token ^ 1 for token, is_right in behind]

    def _token(self, num_prompt_tokens: int, sample_index: int, num_output_tokens: int) -> int:
        if self.answer is None:
            return answer_token(num_prompt_tokens, sample_index, num_output_tokens)
        answer = [*self.answer.encode(), EOS]
        return answer[min(num_output_tokens, len(answer) - 1)]

    def collect(self) -> ModelOutput:
        if not self.gate.wait(timeout=30):
            raise TimeoutError("nobody opened the gate")
        if self.step_s:
            time.sleep(self.step_s)
        if self.die:
            raise RuntimeError("secret/path/of/the/worker broke")
        if self.fail_next and self._num_tokens:
            self.fail_next = False
            raise ExecutionError("secret/path/of/the/kernel broke")
        if self._result is None:
            raise AssertionError("nothing was submitted")
        return self._result

    def abandon(self) -> None:
        self._result = None

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down = True


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Return log probabilities: the token itself is the most probable one, then the next ones in the vocabulary."""
    best = [(token_id + step) % VOCAB_SIZE for step in range(num_top)]
    return TokenLogprobs([token_id, *best], [-0.25, *(-0.25 - step for step in range(num_top))], rank=1)


def make_core(
    executor: FakeExecutor | None = None,
    *,
    num_blocks: int = 256,
    block_size: int = 16,
    max_model_len: int = 2048,
    role: str = "both",
    kv_transfer_port: int | None = None,
    kv_format: dict[str, str] | None = None,
    **scheduler_options: Any,
) -> EngineCore:
    """Return the real core with a fake executor."""
    metrics, recent = EngineMetrics(), RecentEvents(2000)
    cache_config = CacheConfig(block_size=block_size)
    scheduler = Scheduler(
        SchedulerConfig(**scheduler_options),
        cache_config,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        clock=time.monotonic,
        sink=FanOut([metrics, recent]),
    )
    return EngineCore(
        scheduler,
        executor or FakeExecutor(),
        metrics,
        recent,
        EngineCapacity.of(
            scheduler.config,
            cache_config,
            num_blocks=num_blocks,
            role=role,
            kv_transfer_port=kv_transfer_port,
            kv_format=kv_format,
        ),
    )


def make_engine(
    executor: FakeExecutor | None = None,
    *,
    max_model_len: int = 2048,
    generation_defaults: Mapping[str, Any] | None = None,
    model_info: Mapping[str, Any] | None = None,
    chat_template: FakeChatTemplate | None = None,
    **core_options: Any,
) -> Engine:
    """Return the real engine with a fake executor and tokenizer. core_options: of `make_core`."""
    from octavo.engine.input_processor import InputProcessor
    from octavo.engine.llm_engine import Engine
    from octavo.engine.local_core import LocalCore
    from octavo.engine.output_processor import OutputProcessor

    tokenizer = ByteTokenizer()
    info = ModelInfo(
        name="fake",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        generation_defaults=dict(generation_defaults or {}),
        **(model_info or {}),
    )
    return Engine(
        LocalCore(make_core(executor, max_model_len=max_model_len, **core_options)),
        InputProcessor(tokenizer, info, 0, chat_template or FakeChatTemplate()),
        OutputProcessor(tokenizer, time.monotonic),
        time.monotonic,
    )
