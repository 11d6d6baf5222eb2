"""Errors that octavo raises on purpose. `octavo.http.errors` has further ones, of servers only.

    OctavoError
    ├── ConfigError      an option, or two together, that cannot be served; raised before anything is allocated
    ├── ModelError       a checkpoint that cannot be used: missing, broken, or of an unknown kind
    ├── RequestError     one request that cannot be served as asked; names the parameter; the engine goes on
    │   ├── PromptTooLongError   its prompt exceeds the model's length or could never fit the KV cache
    │   ├── QueueFullError       too many requests are open or wait; the same one may be served later
    │   └── SlowReaderError      nobody read what was generated for it
    └── EngineError      the engine could not do its work
        ├── ExecutionError   a step failed in the worker: the requests of that step end with it
        ├── RequestFailedError   what was done for one request alone failed: it ends, and names itself; the others go on
        ├── FingerprintError   the engine computes other numbers than an earlier start of the same one
        ├── DeadlineError    the request's time was over before it was done
        └── EngineDeadError  the engine has stopped; nothing can be added any more
            └── EngineRestartingError    its process ended, and another one is being started

`assert` guards octavo's own bugs only; what a user can cause is one of these or of `octavo.http.errors`.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(OctavoError):
    """An option cannot be served; says the option, its value, the limit and what to do."""


class ModelError(OctavoError):
    """A checkpoint cannot be used; says the file and what is wrong with it."""


class RequestError(OctavoError):
    """One request cannot be served as asked. `parameter` is the field to blame, by its public name."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLongError(RequestError):
    """The prompt exceeds the model's length, or could never fit the KV cache.

    Clients look for words: "prompt is too long: N tokens > M maximum" (Anthropic's) and "this model's maximum context
    length is" (OpenAI's).
    """

    @classmethod
    def check(cls, num_tokens: int, max_model_len: int, *, is_all: bool = True, least_output_tokens: int = 1) -> None:
        """Raise it for a prompt that leaves no room for the output.

        is_all: whether these are all of its tokens. least_output_tokens: as in `SamplingParams`.
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
    """Too much is open or waits already; the same request may be served in about `retry_after_s` seconds."""

    def __init__(self, message: str, *, parameter: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, parameter=parameter)
        self.retry_after_s = retry_after_s


class SlowReaderError(RequestError):
    """What was generated for a request was not read; it has been ended."""


class EngineError(OctavoError):
    """The engine could not do its work."""


class ExecutionError(EngineError):
    """A step failed in the worker."""


class RequestFailedError(EngineError):
    """Something failed that was done for one request alone, by a fault of octavo's or of a library's; names its id."""


class FingerprintError(EngineError):
    """A start computed a table otherwise the second time, or other numbers than an earlier start of the same engine."""


class DeadlineError(EngineError):
    """The request's time was over before it was done."""


class EngineDeadError(EngineError):
    """The engine has stopped; if it comes back, it will be in about `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRestartingError(EngineDeadError):
    """The engine's process ended with all its requests; it is being started again."""
