"""Code that chat completions and completions share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from octavo.data.request_options import RequestOptions
from octavo.http.apis import OPENAI
from octavo.server.answers.jobs import event

if TYPE_CHECKING:
    from octavo.http.errors import HttpError
    from octavo.server.answers.jobs import ChoiceUpdate, Job
    from octavo.server.answers.usage import Usage
    from octavo.server.api.openai.requests import SamplingFields

Choice = TypeVar("Choice", bound=msgspec.Struct)
Chunk = TypeVar("Chunk", bound=msgspec.Struct)


def openai_options(request: SamplingFields, prompt_field: str) -> dict[str, Any]:
    """Return a request's fields of the `Job`."""
    options = request.stream_options
    return {
        "stream": bool(request.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.include_usage and options.continuous_usage_stats),
        "options": RequestOptions(priority=request.priority or 0, cache_salt=request.cache_salt),
        "client_names": request.client_names(
            prompt=prompt_field,
            structured_outputs="structured_outputs" if request.response_format is None else "response_format",
        ),
    }


class OpenAIReply(Generic[Choice, Chunk]):
    """Base of streamed replies."""

    _done = b"data: [DONE]\n\n"

    def __init__(self, job: Job) -> None:
        self._job = job

    def update(self, update: ChoiceUpdate, usage: Usage | None) -> bytes:
        """Return the chunks of an update. usage: token counts for each chunk, or None.

        A choice's last chunk has the finish reason, so a client may stop reading there.
        """
        choices = [self._grown(update)]
        if update.completion.finished:
            choices.append(self._ended(update))
        chunks = [self._event([choice], usage) for choice in choices if choice is not None]
        if update.is_first:
            self._begin(chunks[0], update)
        return b"".join(map(event, chunks))

    def end(self, usage: Usage) -> bytes:
        """End the stream."""
        return event(self._event([], self._counted(usage))) + self._done if self._job.include_usage else self._done

    def error(self, error: HttpError) -> bytes:
        """Encode an error."""
        return OPENAI.event(error)

    def _grown(self, update: ChoiceUpdate) -> Choice | None:
        raise NotImplementedError

    def _ended(self, update: ChoiceUpdate) -> Choice:
        raise NotImplementedError

    def _event(self, choices: list[Choice], usage: Usage | None) -> Chunk:
        raise NotImplementedError

    def _begin(self, event: Chunk, update: ChoiceUpdate) -> None:
        """Add fields to a choice's first chunk."""

    def _counted(self, usage: Usage) -> Usage:
        return usage
