"""Errors that octavo raises on purpose.

    OctavoError
    ├── ConfigError
    ├── ModelError
    ├── RequestError                 the engine continues
    │   ├── PromptTooLongError
    │   ├── QueueFullError
    │   └── SlowReaderError
    └── EngineError
        ├── ExecutionError           the step's requests end
        ├── RequestFailedError       only that request ends
        ├── FingerprintError
        ├── DeadlineError
        └── EngineDeadError
            └── EngineRestartingError

`octavo.http.errors` has more.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base error. rank: number of the rank (see `octavo.ranks`) that failed, or None for another reason."""

    def __init__(self, *args: object, rank: int | None = None) -> None:
        super().__init__(*args)
        self.rank = rank


class ConfigError(OctavoError):
    """An option is invalid. The message names the option, its value, the limit and what to do."""


class ModelError(OctavoError):
    """A checkpoint is missing, broken, or of an unknown kind. The message names the file."""


class RequestError(OctavoError):
    """A request cannot be served. parameter: public name of the invalid field."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLongError(RequestError):
    """The prompt exceeds the model's length, or could never fit the KV cache.

    Clients search the message for "prompt is too long: N tokens > M maximum" (Anthropic's) and "this model's maximum
    context length is" (OpenAI's).
    """

    @classmethod
    def check(cls, num_tokens: int, max_model_len: int, *, is_all: bool = True, least_output_tokens: int = 1) -> None:
        """Raise if prompt and `least_output_tokens` together exceed `max_model_len`.

        is_all: False if only a part of the prompt was counted.
        """
        most = max_model_len - least_output_tokens
        if num_tokens > most:
            rest, output = "" if is_all else " (counted so far)", ", and the output needs one" * least_output_tokens
            raise cls(
                f"prompt is too long: {num_tokens} tokens > {most} maximum{rest}; this model's maximum "
                f"context length is {max_model_len} tokens (max_model_len){output}",
                parameter="prompt",
            )


class QueueFullError(RequestError):
    """Too many requests are open or waiting. Retry in about `retry_after_s` seconds."""

    def __init__(self, message: str, *, parameter: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, parameter=parameter)
        self.retry_after_s = retry_after_s


class SlowReaderError(RequestError):
    """The request was aborted because its output was not read in time."""


class EngineError(OctavoError):
    """The engine failed."""


class ExecutionError(EngineError):
    """A step failed."""


class RequestFailedError(EngineError):
    """A bug in octavo or a library ended one request."""


class FingerprintError(EngineError):
    """A table differs when it is computed again, or checksums differ from those of an earlier start."""


class DeadlineError(EngineError):
    """Deadline passed."""


class EngineDeadError(EngineError):
    """The engine has stopped. A restarted engine is ready in about `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, rank: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.retry_after_s = retry_after_s


class EngineRestartingError(EngineDeadError):
    """The engine's process has ended and is being restarted. All its requests have ended."""
