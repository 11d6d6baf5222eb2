"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field

from octavo.data.request_options import RequestOptions
from octavo.engine.embedding import embedding
from octavo.errors import RequestError
from octavo.runtime.ids import new_id
from octavo.sampling_params import SamplingParams
from octavo.server.answers.answering import answer_complete
from octavo.server.answers.jobs import Job
from octavo.server.answers.usage import PromptTokensDetails, Receipt  # noqa: TC001
from octavo.server.api.extra_fields import OF_ANSWERS, OF_PROMPTS, UNSUPPORTED, Off, each
from octavo.server.api.openai.completions import read_prompts, truncated
from octavo.server.api.openai.requests import Body, Priority, TruncationFields
from octavo.server.api.request_types import CacheSalt, Prompts, Shown
from octavo.server.api.truncation import WHOLE, Truncation
from octavo.server.bodies import look_at
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.outputs import RequestOutput
    from octavo.server.answers.jobs import WholeReply
    from octavo.server.answers.usage import Usage
    from octavo.server.service import Service

MAX_INPUTS = 2048  # as in OpenAI's API
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in OF_PROMPTS.items() if name not in TruncationFields.model_fields},
    **{name: UNSUPPORTED[name] for name in ("adapter_id", "adapters", "lora", "lora_path")},
    **each(Off(), "content", "input_type", "messages", "output_dimension", "prompt_name"),
    **each(Off(False), "late_chunking", "truncation"),
    **each(Off(True), "add_special_tokens", "normalize", "use_activation"),
    "embd_normalize": Off(2),
    "embed_dtype": Off("float32"),
    "embedding_types": Off(["float"]),
    "endianness": Off("native", "little"),
    "instruction": Off(""),
    "output_dtype": Off("float"),
    "truncation_direction": Off("Right"),
}


class EmbeddingRequest(Body, TruncationFields):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Annotated[Any, Shown(Prompts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Shown(Annotated[int, Field(ge=1)])] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None

    def check(self, max_model_len: int) -> None:
        """Check truncate_prompt_tokens. Raises `RequestError`."""
        self.check_truncation()
        if (self.truncate_prompt_tokens or 0) > max_model_len:
            message = f"truncate_prompt_tokens must be at most {max_model_len}, this model's maximum context length"
            raise RequestError(message, parameter="truncate_prompt_tokens")


class Embedding(Struct):
    """A vector, as numbers or as little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    receipt: Receipt | UnsetType = UNSET


class EmbeddingList(Struct):
    """Vectors in input order."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


@endpoint(body=EmbeddingRequest, answer=EmbeddingList)
async def create_embeddings(service: Service, http_request: Request, request: EmbeddingRequest) -> Response:
    """Compute text embeddings."""
    model = service.check_model(request.model)
    service.extra_fields.check(request.model_extra, _UNSUPPORTED, OF_ANSWERS)
    request.check(service.model_info.max_model_len)
    prompts = await look_at(http_request, lambda: read_prompts(request.input, "input", MAX_INPUTS))
    return await embed_prompts(
        service,
        http_request,
        prompts,
        partial(EmbeddingReply, request),
        truncation=Truncation.of(request, 0, service.model_info.max_model_len),
        dimensions=request.dimensions,
        model=model,
        options=RequestOptions(priority=request.priority or 0, cache_salt=request.cache_salt),
        client_names={"prompt": "input"},
    )


async def embed_prompts(
    service: Service,
    http_request: Request,
    prompts: list[Any],
    make_reply: Callable[[Job], WholeReply],
    *,
    truncation: Truncation = WHOLE,
    dimensions: int | None = None,
    **options: Any,
) -> Response:
    """Compute embeddings. Raises `RequestError` if `dimensions` is not between 1 and the hidden size.

    options: Further fields of the `Job`.
    """
    size = service.model_info.hidden_size
    if dimensions is not None and not 0 < dimensions <= size:
        raise RequestError(f"dimensions must be 1 to {size}, this model's", parameter="dimensions")
    pooling = service.model_info.choose_pooling(None if service.config.pooling == "auto" else service.config.pooling)
    params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, detokenize=False)
    with service.enter(http_request, len(prompts), at_least=1) as place:
        job = Job(
            request_id=f"embd-{new_id()}",
            prompts=await truncated(service, http_request, place, prompts, truncation),
            params=params,
            place=place,
            deadline=http_request.state.deadline,
            **options,
        )
        return await answer_complete(service, http_request, job, make_reply(job))


class EmbeddingReply:
    """Formats embeddings."""

    def __init__(self, request: EmbeddingRequest, job: Job) -> None:
        self._job = job
        self._request = request

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> EmbeddingList:
        """Return all vectors."""
        data = [Embedding(index, self._encode(output)) for index, output in enumerate(outputs)]
        counts = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details, usage.receipt)
        return EmbeddingList(data, self._job.model, counts)

    def _encode(self, output: RequestOutput) -> list[float] | str:
        vector = embedding(output, num_dimensions=self._request.dimensions)
        if self._request.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers
