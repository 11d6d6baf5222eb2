"""Request fields of other servers: aliases, unsupported fields, and fields without effect."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeVar

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

T = TypeVar("T")
logger = logging.getLogger(__name__)
_MAX_NAMED = 100
_MAX_NAME_CHARS = 40
_MAX_LOOKED_AT = 1000


@dataclass(frozen=True, slots=True)
class As:
    """An alias of the field `name`. A name `a.b` is the key b in the object a.

    nothing: Values that are ignored like null.
    """

    name: str
    nothing: tuple[Any, ...] = ()


class Off(tuple[Any, ...]):
    """The allowed values of an unsupported field, in addition to null. These values have no effect."""

    __slots__ = ()

    def __new__(cls, *values: Any) -> Self:
        """Collect the values."""
        return super().__new__(cls, values)


class OffPrompt(Off):
    """`Off` for a field that would change the prompt."""

    __slots__ = ()


Table = dict[str, As | Off | str]  # a string is the reason why the field has no effect

_WHO = "identifies the client: this server uses the API key"
_CACHE = "hint for a prompt cache: this server caches every prefix, and no token depends on it"
_PLACE = "chooses place, speed or price: there is only one server"
_KEPT = "belongs to a stored answer: this server stores none"
_MEDIA = "configures the reading of images and sound: this server reads text only"
_DRAFTS = "hint for speculation: no token depends on it"
_ID = "names the request: this server uses the header X-Request-Id"
_TIMES = "requests timings with the answer"
_FULL = "chooses what to drop if the context is full: this server ends the answer"
_LOADED = "time to keep a model loaded: it always stays loaded"


def each(value: T, *names: str) -> dict[str, T]:
    """Map each name to `value`."""
    return dict.fromkeys(names, value)


def _of(switch: str, *names: str) -> Table:
    """Return a table of fields that have an effect only with the unsupported field `switch`."""
    return each(f"belongs to {switch}, which is refused unless it is off", *names)


OPENAI: Table = {
    **each(_CACHE, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    **each(_KEPT, "metadata", "store"),
    **each(_PLACE, "service_tier"),
    **each(_WHO, "safety_identifier", "user"),
    "max_tool_calls": "limit of calls to the server's own tools: this server has none",
}
VLLM: Table = {
    "guided_choice": As("structured_outputs.choice"),  # vLLM had guided_* up to 0.11
    "guided_grammar": As("structured_outputs.grammar"),
    "guided_json": As("structured_outputs.json"),
    "guided_regex": As("structured_outputs.regex"),
    **each(Off(), "guided_whitespace_pattern", "repetition_detection"),
    **each(Off([]), "bad_words", "logits_processors", "logprob_token_ids"),
    **each(Off({}), "ec_transfer_params", "kv_transfer_params", "vllm_xargs"),
    **each(Off(False), "early_stopping", "return_token_offsets", "use_beam_search", "watermarking"),
    **each(Off(True), "spaces_between_special_tokens"),
    **each(Off(1.0), "length_penalty"),
    **each(Off(0), "routed_experts_prompt_start"),
    **each(OffPrompt(-1), "thinking_token_budget"),
    **each(_ID, "request_id"),
    **each(_MEDIA, "media_io_kwargs", "mm_payload", "mm_processor_kwargs", "return_mm_kwargs"),
    **each(_WHO, "session_id"),
    "guided_decoding_backend": "chooses the library that compiles a grammar",
    "stream_interval": "collects tokens before they are sent: this server sends each immediately",
}
_SAMPLERS = "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature"
LLAMA_CPP: Table = {
    "grammar": As("structured_outputs.grammar", ("",)),
    "json_schema": As("structured_outputs.json"),  # also in SGLang
    "n_cmpl": As("n"),
    "n_predict": As("max_tokens"),
    "n_probs": As("logprobs", (0,)),
    "repeat_penalty": As("repetition_penalty"),
    **each(Off([]), "grammar_triggers", "lora", "preserved_tokens", "response_fields"),
    "samplers": Off([], _SAMPLERS.split()),
    **each(Off(False), "grammar_lazy", "post_sampling_probs", "reasoning_in_content", "thinking_forced_open"),
    **each(Off(False), "return_tokens"),
    **each(Off(True), "parse_tool_calls"),
    **each(Off(0), "dry_multiplier", "dynatemp_range", "mirostat", "n_indent", "xtc_probability"),
    **each(Off(0, 1), "min_keep"),
    **each(Off(0, -1), "t_max_predict_ms", "top_n_sigma"),
    **each(Off(-1), "adaptive_target"),
    **each(Off("auto", "deepseek"), "reasoning_format"),
    **each(OffPrompt([]), "image_data"),
    **each(OffPrompt(-1), "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens"),
    **_of("adaptive_target", "adaptive_decay"),
    **_of("dry_multiplier", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
    **_of("dynatemp_range", "dynatemp_exponent"),
    **_of("mirostat", "mirostat_eta", "mirostat_tau"),
    **_of("xtc_probability", "xtc_threshold"),
    **each(_CACHE, "cache_prompt", "n_cache_reuse"),
    **each(_DRAFTS, "speculative.n_max", "speculative.n_min", "speculative.p_min"),
    **each(_FULL, "n_discard", "n_keep"),
    **each(_PLACE, "id_slot"),
    **each(_TIMES, "return_progress", "timings_per_token"),
    "backend_sampling": "chooses the device that samples tokens",
    "sse_ping_interval": "interval of comments in a silent stream: an option of the server sets it",
}
PENALTY_RANGE: dict[str, Off] = {"repeat_last_n": Off(-1), "penalize_nl": Off(True)}
SGLANG: Table = {
    "ebnf": As("structured_outputs.grammar"),
    "regex": As("structured_outputs.regex"),
    **each(Off(), "custom_logit_processor"),
    **each(Off([]), "lora_path", "stop_regex"),
    **each(Off({}), "custom_params", "session_params"),
    **each(Off(False), "no_stop_trim", "return_cached_tokens_details", "return_hidden_states", "return_meta_info"),
    **each(Off(False), "return_prompt_token_ids", "return_routed_experts"),
    **each(Off(True), "separate_reasoning", "stream_reasoning"),
    **each(OffPrompt(), "input_ids", "task"),
    **_of("return_routed_experts", "routed_experts_start_len"),
    **each(_CACHE, "extra_key"),
    **each(_DRAFTS, "ngram_corpus_id"),
    **each(_ID, "rid"),
    **each(_KEPT, "custom_labels"),
    **each(_MEDIA, "images_config", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video"),
    **each(_PLACE, "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"),
    **each(_PLACE, "disagg_prefill_dp_rank", "routed_dp_rank"),
}
TGI: Table = {
    "max_new_tokens": As("max_tokens"),
    **each(Off(), "adapter_id"),
    **each(Off(False), "watermark"),
    **each(Off(True), "do_sample"),
    **each(OffPrompt(), "guideline", "truncate"),
    **each(OffPrompt(""), "tool_prompt"),
}
OLLAMA: Table = {
    "num_predict": As("max_tokens"),
    **each(Off(""), "format"),
    **each(OffPrompt(), "think"),
    **each(OffPrompt([]), "context", "images"),
    **each(OffPrompt({}), "options"),
    **each(OffPrompt(False), "raw"),
    **each(OffPrompt(""), "system", "template"),
    **each(_LOADED, "keep_alive"),
    "num_ctx": "context length: --max-model-len sets it",
}
# Gateways, LM Studio, mlx-lm and DashScope.
GATEWAYS: Table = {
    "enable_thinking": As("chat_template_kwargs.enable_thinking"),
    **each(Off(), "adapters", "repetition_context_size"),
    **each(Off(False), "enable_search"),
    **each(Off(0), "top_a"),
    **each(OffPrompt(), "thinking"),
    **each(OffPrompt([]), "plugins", "transforms"),
    **each(OffPrompt({}), "reasoning"),
    **each(OffPrompt(-1), "thinking_budget"),
    **each(_DRAFTS, "draft_model", "num_draft_tokens"),
    **each(_LOADED, "ttl"),
    **each(_PLACE, "models", "provider", "route"),
    "usage": "requests token counts: streams use stream_options, other answers always have them",
}
# text-generation-webui, KoboldCpp, TabbyAPI and aphrodite.
SAMPLERS: Table = {
    **each(Off([]), "banned_strings", "sampler_order", "sampler_priority"),
    **each(Off([], ""), "banned_tokens", "custom_token_bans"),
    **each(Off(""), "grammar_string", "negative_prompt"),
    **each(Off(False), "ban_eos_token", "dynamic_temperature", "temperature_last"),
    **each(Off(0), "dynatemp_max", "dynatemp_min", "epsilon_cutoff", "eta_cutoff", "mirostat_mode"),
    **each(Off(0), "no_repeat_ngram_size", "penalty_alpha", "skew", "smoothing_factor"),
    **each(Off(0, -1), "nsigma", "repetition_penalty_range"),
    **each(Off(1), "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_return_sequences"),
    **each(Off(1), "rep_pen", "tfs", "tfs_z", "typical"),
    **each(OffPrompt(True), "add_bos_token"),
    **_of("dynamic_temperature", "dynatemp_high", "dynatemp_low"),
    **_of("rep_pen", "rep_pen_range"),
    **_of("smoothing_factor", "smoothing_curve"),
}
ANTHROPIC: Table = {
    **each(_CACHE, "cache_control"),
    **each(_PLACE, "billing_policy", "fallback_credit_token", "inference_geo", "service_tier", "speed"),
    **each(_WHO, "metadata", "user_profile_id", "workspace_id"),
    "betas": "names of optional features, which have their own fields",
    "context_management": "removes old turns to save tokens: this server reads all of them",
    "diagnostics": "requests the reasons of cache misses",
}
_OTHERS: tuple[Table, ...] = (VLLM, LLAMA_CPP, SGLANG, TGI, OLLAMA, GATEWAYS, SAMPLERS)


def _joined(kind: type[Any], *tables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for table in tables for name, value in table.items() if isinstance(value, kind)}


ALIASES: dict[str, As] = _joined(As, *_OTHERS)
UNSUPPORTED: dict[str, tuple[Any, ...]] = _joined(Off, *_OTHERS)
_TOKEN_FIELDS = {
    **each(Off(False), "return_token_ids", "return_tokens_as_token_ids"),
    "truncate_prompt_tokens": OffPrompt(),
    "truncation_side": OffPrompt("left", "right"),
}
UNSUPPORTED_OR_ALIAS: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    **_TOKEN_FIELDS,
    **PENALTY_RANGE,
    **{name: Off(*value.nothing) for name, value in ALIASES.items()},
}
HARMLESS: dict[str, str] = _joined(str, OPENAI, *_OTHERS)
# Routes that generate no answer refuse the fields OF_PROMPTS and ignore the fields OF_ANSWERS.
OF_PROMPTS: dict[str, tuple[Any, ...]] = _joined(OffPrompt, UNSUPPORTED_OR_ALIAS)
OF_ANSWERS = HARMLESS.keys() | (UNSUPPORTED_OR_ALIAS.keys() - OF_PROMPTS.keys())
ANTHROPIC_HARMLESS: dict[str, str] = _joined(str, ANTHROPIC)


class ExtraFields:
    """Checks undeclared fields."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def check(
        self,
        extra: Mapping[str, Any] | None,
        unsupported: Mapping[str, tuple[Any, ...]],
        harmless: Container[str] = (),
        *,
        level: int = logging.INFO,
    ) -> None:
        """Raise `RequestError` for an unsupported field that would change the answer.

        unsupported: Maps each unsupported field to the values that do not change the answer. These values and null
            are accepted.
        harmless: Fields to ignore. Fields that are neither unsupported nor harmless are ignored, too, but logged
            once per process at `level`.
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
            last = "; further ones are not logged" if len(self._named) == _MAX_NAMED else ""
            logger.log(level, "unknown fields of a request are ignored: %r%s", ", ".join(new), last)

    def warn_once(self, name: str, message: str) -> None:
        """Log one warning per `name`."""
        if name not in self._named and len(self._named) < _MAX_NAMED:
            self._named.add(name)
            logger.warning(message)


def refuse(given: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `RequestError` if an unsupported field has a value that is not allowed."""
    for name, neutral in unsupported.items():
        value = given.get(name)
        if value is not None and not any(value == each for each in neutral):
            allowed = f", or give {' or '.join(map(json.dumps, neutral))}" if neutral else ""
            raise RequestError(f"{name} is not supported by this server: leave it out{allowed}", parameter=name)
