"""Fields of other servers' clients: each stands in a table as taken, refused by name, or known to change nothing.

A table has the fields of one API that octavo does not spell so itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

logger = logging.getLogger(__name__)
_MAX_NAMED = 100  # unknown fields that a process names: clients choose the names
_MAX_NAME_CHARS = 40
_MAX_LOOKED_AT = 1000  # of one request's: the event loop waits


@dataclass(frozen=True, slots=True)
class As:
    """Another name of a field, or of a part of one (`structured_outputs.json`). nothing: what asks for nothing."""

    name: str
    nothing: tuple[Any, ...] = ()


class Off(tuple[Any, ...]):
    """Changes the answer, and is refused, unless it has one of these values, or is null."""

    __slots__ = ()

    def __new__(cls, *values: Any) -> Self:
        """Collect the values that change nothing."""
        return super().__new__(cls, values)


Table = dict[str, As | Off | str]  # a text says why a field changes nothing, whatever its value

_WHO = "says who asks: here a key does"
_CACHE = "advice to a prompt cache: here every prefix is cached, and no token depends on it"
_PLACE = "says where, how fast or at what price: there is one server"
_KEPT = "is kept with a stored answer: nothing is stored"
_MEDIA = "says how to read pictures and sound: here there are none"
_DRAFTS = "advice to speculation: no token depends on it"
_ID = "names the request: here the header X-Request-Id does"
_TIMES = "asks for times beside the answer"
_FULL = "says what to drop where the context is full: here an answer ends there"


def _of(switch: str) -> str:
    return f"belongs to {switch}, which is refused unless it is off"


OPENAI: Table = {
    "max_tool_calls": "a limit of calls to the server's own tools: here there are none",
    "metadata": _KEPT,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "safety_identifier": _WHO,
    "service_tier": _PLACE,
    "store": _KEPT,
    "user": _WHO,
}
VLLM: Table = {
    "bad_words": Off([]),
    "early_stopping": Off(False),
    "ec_transfer_params": Off({}),
    "guided_choice": As("structured_outputs.choice"),  # up to 0.11
    "guided_decoding_backend": "says which library compiles a grammar",
    "guided_grammar": As("structured_outputs.grammar"),
    "guided_json": As("structured_outputs.json"),
    "guided_regex": As("structured_outputs.regex"),
    "guided_whitespace_pattern": Off(),
    "kv_transfer_params": Off({}),
    "length_penalty": Off(1.0),
    "logits_processors": Off([]),
    "logprob_token_ids": Off([]),
    "media_io_kwargs": _MEDIA,
    "mm_payload": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "repetition_detection": Off(),
    "request_id": _ID,
    "return_mm_kwargs": _MEDIA,
    "return_token_offsets": Off(False),
    "routed_experts_prompt_start": Off(0),
    "session_id": _WHO,
    "spaces_between_special_tokens": Off(True),
    "stream_interval": "collects tokens before they are told: each is told at once",
    "thinking_token_budget": Off(-1),
    "use_beam_search": Off(False),
    "vllm_xargs": Off({}),
    "watermarking": Off(False),
}
LLAMA_CPP: Table = {
    "adaptive_decay": _of("adaptive_target"),
    "adaptive_target": Off(-1),
    "backend_sampling": "says which device chooses tokens",
    "cache_prompt": _CACHE,
    "dry_allowed_length": _of("dry_multiplier"),
    "dry_base": _of("dry_multiplier"),
    "dry_multiplier": Off(0),
    "dry_penalty_last_n": _of("dry_multiplier"),
    "dry_sequence_breakers": _of("dry_multiplier"),
    "dynatemp_exponent": _of("dynatemp_range"),
    "dynatemp_range": Off(0),
    "grammar": As("structured_outputs.grammar", ("",)),
    "grammar_lazy": Off(False),
    "grammar_triggers": Off([]),
    "id_slot": _PLACE,
    "image_data": Off([]),
    "json_schema": As("structured_outputs.json"),  # SGLang's, too
    "lora": Off([]),
    "min_keep": Off(0, 1),
    "mirostat": Off(0),
    "mirostat_eta": _of("mirostat"),
    "mirostat_tau": _of("mirostat"),
    "n_cache_reuse": _CACHE,
    "n_cmpl": As("n"),
    "n_discard": _FULL,
    "n_indent": Off(0),
    "n_keep": _FULL,
    "n_predict": As("max_tokens"),
    "n_probs": As("logprobs", (0,)),
    "parse_tool_calls": Off(True),
    "post_sampling_probs": Off(False),
    "preserved_tokens": Off([]),
    "reasoning_budget": Off(-1),
    "reasoning_budget_tokens": Off(-1),
    "reasoning_format": Off("auto", "deepseek"),
    "reasoning_in_content": Off(False),
    "repeat_penalty": As("repetition_penalty"),
    "response_fields": Off([]),
    "return_progress": _TIMES,
    "return_tokens": Off(False),  # in a field of llama.cpp's own routes
    "samplers": Off([]),
    "speculative.n_max": _DRAFTS,
    "speculative.n_min": _DRAFTS,
    "speculative.p_min": _DRAFTS,
    "sse_ping_interval": "says how often a silent stream sends a comment: the server's option does",
    "t_max_predict_ms": Off(0, -1),
    "thinking_budget_tokens": Off(-1),
    "thinking_forced_open": Off(False),
    "timings_per_token": _TIMES,
    "top_n_sigma": Off(0, -1),
    "xtc_probability": Off(0),
    "xtc_threshold": _of("xtc_probability"),
}
# What llama.cpp's penalties look at; without a penalty it is the same whatever they say. Here they look at all tokens.
PENALTY_RANGE: dict[str, Off] = {"repeat_last_n": Off(-1), "penalize_nl": Off(True)}
SGLANG: Table = {
    "bootstrap_host": _PLACE,
    "bootstrap_port": _PLACE,
    "bootstrap_room": _PLACE,
    "custom_labels": _KEPT,
    "custom_logit_processor": Off(),
    "custom_params": Off({}),
    "data_parallel_rank": _PLACE,
    "disagg_prefill_dp_rank": _PLACE,
    "ebnf": As("structured_outputs.grammar"),
    "extra_key": _CACHE,
    "images_config": _MEDIA,
    "input_ids": Off(),
    "lora_path": Off([]),
    "max_dynamic_patch": _MEDIA,
    "min_dynamic_patch": _MEDIA,
    "ngram_corpus_id": _DRAFTS,
    "no_stop_trim": Off(False),
    "regex": As("structured_outputs.regex"),
    "return_cached_tokens_details": Off(False),
    "return_hidden_states": Off(False),
    "return_meta_info": Off(False),
    "return_prompt_token_ids": Off(False),
    "return_routed_experts": Off(False),
    "rid": _ID,
    "routed_dp_rank": _PLACE,
    "routed_experts_start_len": _of("return_routed_experts"),
    "separate_reasoning": Off(True),
    "session_params": Off({}),
    "stop_regex": Off([]),
    "stream_reasoning": Off(True),
    "task": Off(),
    "use_audio_in_video": _MEDIA,
}
TGI: Table = {
    "adapter_id": Off(),
    "do_sample": Off(True),
    "guideline": Off(),
    "max_new_tokens": As("max_tokens"),
    "tool_prompt": Off(""),
    "truncate": Off(),
    "watermark": Off(False),
}
OLLAMA: Table = {
    "context": Off([]),
    "format": Off(""),
    "images": Off([]),
    "keep_alive": "says how long to keep a model loaded: it stays",
    "num_ctx": "asks for room: --max-model-len gives it",
    "num_predict": As("max_tokens"),
    "options": Off({}),
    "raw": Off(False),
    "system": Off(""),
    "template": Off(""),
    "think": Off(),
}
# OpenRouter and other gateways, DashScope, LM Studio, mlx-lm.
GATEWAYS: Table = {
    "adapters": Off(),
    "draft_model": _DRAFTS,
    "enable_search": Off(False),
    "enable_thinking": As("chat_template_kwargs.enable_thinking"),
    "models": _PLACE,
    "num_draft_tokens": _DRAFTS,
    "plugins": Off([]),
    "provider": _PLACE,
    "reasoning": Off({}),
    "repetition_context_size": Off(),
    "route": _PLACE,
    "thinking": Off(),
    "thinking_budget": Off(-1),
    "top_a": Off(0),
    "transforms": Off([]),
    "ttl": "says how long to keep a model loaded: it stays",
    "usage": "asks for counts: stream_options does in a stream, and else they are there",
}
# text-generation-webui, KoboldCpp, TabbyAPI and aphrodite, as their front ends send them.
SAMPLERS: Table = {
    "add_bos_token": Off(True),
    "ban_eos_token": Off(False),
    "banned_strings": Off([]),
    "banned_tokens": Off([], ""),
    "custom_token_bans": Off([], ""),
    "dynamic_temperature": Off(False),
    "dynatemp_high": _of("dynamic_temperature"),
    "dynatemp_low": _of("dynamic_temperature"),
    "dynatemp_max": Off(0),
    "dynatemp_min": Off(0),
    "encoder_repetition_penalty": Off(1),
    "epsilon_cutoff": Off(0),
    "eta_cutoff": Off(0),
    "grammar_string": Off(""),
    "guidance_scale": Off(1),
    "mirostat_mode": Off(0),
    "negative_prompt": Off(""),
    "no_repeat_ngram_size": Off(0),
    "nsigma": Off(0, -1),
    "num_beams": Off(1),
    "num_return_sequences": Off(1),
    "penalty_alpha": Off(0),
    "repetition_penalty_range": Off(0, -1),
    "rep_pen": Off(1),
    "rep_pen_range": _of("rep_pen"),
    "sampler_order": Off([]),
    "sampler_priority": Off([]),
    "skew": Off(0),
    "smoothing_curve": _of("smoothing_factor"),
    "smoothing_factor": Off(0),
    "temperature_last": Off(False),
    "tfs": Off(1),
    "tfs_z": Off(1),
    "typical": Off(1),
}
ANTHROPIC: Table = {
    "billing_policy": _PLACE,
    "betas": "names of what may be asked for: what is asked for stands in fields of its own",
    "cache_control": _CACHE,
    "context_management": "takes old turns out to save tokens: all of them are read",
    "diagnostics": "asks why a cache was missed",
    "fallback_credit_token": _PLACE,
    "inference_geo": _PLACE,
    "metadata": _WHO,
    "service_tier": _PLACE,
    "speed": _PLACE,
    "user_profile_id": _WHO,
    "workspace_id": _WHO,
}
_OTHERS: tuple[Table, ...] = (VLLM, LLAMA_CPP, SGLANG, TGI, OLLAMA, GATEWAYS, SAMPLERS)


def _joined(kind: type[Any], *tables: Table) -> dict[str, Any]:
    return {name: told for table in tables for name, told in table.items() if isinstance(told, kind)}


ALIASES: dict[str, As] = _joined(As, *_OTHERS)
UNSUPPORTED: dict[str, tuple[Any, ...]] = _joined(Off, *_OTHERS)
# vLLM's that chat completions and completions have.
_TOKEN_FIELDS = {
    "return_token_ids": Off(False),
    "return_tokens_as_token_ids": Off(False),
    "truncate_prompt_tokens": Off(),
    "truncation_side": Off("left", "right"),
}
# For the routes that take none of those names.
UNSUPPORTED_OR_ALIAS: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    **_TOKEN_FIELDS,
    **PENALTY_RANGE,
    **{name: Off(*told.nothing) for name, told in ALIASES.items()},
}
HARMLESS: dict[str, str] = _joined(str, OPENAI, *_OTHERS)
# For the routes that only read a prompt: of all those names the ones that say what it is.
OF_PROMPTS: dict[str, tuple[Any, ...]] = {
    name: UNSUPPORTED_OR_ALIAS[name]
    for name in (
        "add_bos_token",
        "context",
        "guideline",
        "image_data",
        "images",
        "input_ids",
        "options",
        "plugins",
        "raw",
        "reasoning",
        "reasoning_budget",
        "reasoning_budget_tokens",
        "system",
        "task",
        "template",
        "think",
        "thinking",
        "thinking_budget",
        "thinking_budget_tokens",
        "thinking_token_budget",
        "tool_prompt",
        "transforms",
        "truncate",
        "truncate_prompt_tokens",
        "truncation_side",
    )
}
# And what changes nothing there: no token is chosen.
OF_ANSWERS = HARMLESS.keys() | (UNSUPPORTED_OR_ALIAS.keys() - OF_PROMPTS.keys())
ANTHROPIC_HARMLESS: dict[str, str] = _joined(str, ANTHROPIC)


class ExtraFields:
    """Looks at the fields that routes do not know, and names each in the log once, as far as there is room."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def check(
        self, extra: Mapping[str, Any] | None, unsupported: Mapping[str, tuple[Any, ...]], harmless: Container[str] = ()
    ) -> None:
        """Look at those of a request; those that are not harmless either are ignored and logged.

        Raises `RequestError` for one that would change the answer (unsupported: name -> the values that change
        nothing, besides null).
        """
        if not extra:
            return
        refuse(extra, unsupported)
        new = []
        for name in islice(extra, _MAX_LOOKED_AT):
            if len(self._named) == _MAX_NAMED:
                break
            shown = name[:_MAX_NAME_CHARS]
            if name not in unsupported and name not in harmless and shown not in self._named:
                self._named.add(shown)
                new.append(shown)
        if new:
            last = "; no more will be named" if len(self._named) == _MAX_NAMED else ""
            logger.info("unknown fields of a request are ignored: %r%s", ", ".join(new), last)


def refuse(given: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `RequestError` for the first field that would change the answer."""
    for name, neutral in unsupported.items():
        value = given.get(name)
        if value is not None and not any(value == each for each in neutral):
            raise RequestError(f"{name} is not supported by this server", parameter=name)
