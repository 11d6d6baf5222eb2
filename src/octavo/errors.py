"""Errors that octavo raises on purpose. `octavo.http.errors` has further errors, for servers only.

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

`assert` is for octavo's own bugs only. An error that a user can cause is one of these or of `octavo.http.errors`.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(OctavoError):
    """An option is invalid. The message names the option, its value, the limit and what to do.

    Raised before anything is allocated.
    """


class ModelError(OctavoError):
    """A checkpoint is missing, broken, or of an unknown kind. The message names the file and its problem."""


class RequestError(OctavoError):
    """One request cannot be served as it was sent. parameter: public name of the invalid field."""

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
        """Raise the error if a prompt is so long that the output does not fit.

        is_all: False if `num_tokens` are counted so far. least_output_tokens: as in `SamplingParams`.
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
    """Too many requests are open or waiting. The client may retry in about `retry_after_s` seconds."""

    def __init__(self, message: str, *, parameter: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, parameter=parameter)
        self.retry_after_s = retry_after_s


class SlowReaderError(RequestError):
    """The output was not read in time, so the request was aborted."""


class EngineError(OctavoError):
    """The engine failed."""


class ExecutionError(EngineError):
    """A step failed in the worker."""


class RequestFailedError(EngineError):
    """Work for one request failed, because of a bug in octavo or in a library. The message names its id."""


class FingerprintError(EngineError):
    """The engine computed a table differently the second time, or other numbers than at an earlier start."""


class DeadlineError(EngineError):
    """The request's deadline passed before it finished."""


class EngineDeadError(EngineError):
    """The engine has stopped. If it is restarted, it is ready in about `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRestartingError(EngineDeadError):
    """The engine's process has ended, with all its requests, and is being restarted."""
