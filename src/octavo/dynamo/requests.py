"""Translates requests and outputs between Dynamo's dictionaries and octavo's types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.outputs import CompletionOutput, Logprob, RequestOutput

_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
_REPORTING = ("logprobs", "prompt_logprobs")
_STRUCTURES = ("json", "regex", "choice", "grammar")
_UNSUPPORTED = ("use_beam_search", "length_penalty", "max_thinking_tokens", "structural_tag", "whitespace_pattern")
_FINISH_REASONS = {"abort": "cancelled"}


def sampling_params(request: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a `GenerateRequest`. Raises `RequestError`.

    Dynamo itself detokenizes, and searches for stop strings. defaults: Parameters that the request may omit.
    """
    sampling, stopping, reporting = (
        request.get(name) or {} for name in ("sampling_options", "stop_conditions", "output_options")
    )
    guided = sampling.get("guided_decoding") or {}
    for name in _UNSUPPORTED:
        if any(given.get(name) for given in (sampling, stopping, guided)):
            raise RequestError(f"{name} is not supported: remove it", parameter=name)
    if (sampling.get("best_of") or 1) > (sampling.get("n") or 1):
        raise RequestError("best_of above n is not supported: remove it", parameter="best_of")
    structure = _given(guided, _STRUCTURES)
    given = {**_given(sampling, _SAMPLING), **_given(stopping, _STOPPING), **_given(reporting, _REPORTING)}
    return SamplingParams(
        **{"max_tokens": None, **defaults, **given},
        stop_token_ids=[*(stopping.get("stop_token_ids") or ()), *(stopping.get("stop_token_ids_hidden") or ())],
        structured_outputs=StructuredOutputsParams(**structure) if structure else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _given(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if values.get(name) is not None}


class Chunks:
    """Makes the `GenerateChunk`s of one request."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._ended: set[int] = set()

    def of(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Return a chunk for each choice with new tokens or a new end. The last chunk of the request has the usage."""
        changed = [
            each for each in output.outputs if each.index not in self._ended and (each.token_ids or each.finished)
        ]
        chunks = [_chunk(completion) for completion in changed]
        self._ended |= {each.index for each in changed if each.finished}
        self._num_tokens += sum(len(each.token_ids) for each in changed)
        if output.finished:
            num_prompt = len(output.prompt_token_ids)
            chunks[-1]["completion_usage"] = {
                "prompt_tokens": num_prompt,
                "completion_tokens": self._num_tokens,
                "total_tokens": num_prompt + self._num_tokens,
                "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
            }
            if output.prompt_logprobs is not None:
                chunks[-1]["engine_data"] = {"prompt_logprobs": list(map(_by_token_id, output.prompt_logprobs))}
        return chunks


def _chunk(completion: CompletionOutput) -> dict[str, Any]:
    chunk: dict[str, Any] = {"index": completion.index, "token_ids": completion.token_ids}
    if completion.logprobs:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        chunk["log_probs"] = [found[token_id].logprob for token_id, found in pairs]
        chunk["top_logprobs"] = [
            [
                {"rank": each.rank, "token_id": token_id, "token": each.decoded_token, "logprob": each.logprob}
                for token_id, each in found.items()
            ]
            for found in completion.logprobs
        ]
    if completion.finish_reason is not None:
        chunk["finish_reason"] = _FINISH_REASONS.get(completion.finish_reason, completion.finish_reason)
    return chunk


def _by_token_id(found: Mapping[int, Logprob] | None) -> dict[str, dict[str, Any]] | None:
    if found is None:
        return None
    return {
        str(token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
        for token_id, each in found.items()
    }
