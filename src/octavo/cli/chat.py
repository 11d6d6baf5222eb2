"""`octavo chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.command import command
from octavo.cli.engine_options import EngineOptions
from octavo.cli.sampling_options import SamplingOptions
from octavo.errors import ExecutionError, ModelError, RequestError

if TYPE_CHECKING:
    from octavo.engine.llm_engine import Engine
    from octavo.sampling_params import SamplingParams

HELP = """/reset  forget the conversation
/help   show this
/exit   end the chat (so does Ctrl-D)
Ctrl-C  stop the answer"""

System = Annotated[
    str | None,
    typer.Option(help="System message: instructions before the conversation. Default: none.", show_default=False),
]


# Without filters, answers of small models become incoherent.
GENTLE_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
REAL_MODELS = (
    "This is the built-in model, a small one. A real one, from a GGUF file or the hub: octavo chat ./model.gguf, "
    "octavo chat Qwen/Qwen2.5-0.5B-Instruct"
)


@command(
    "octavo chat                             the built-in model; nothing is downloaded",
    "octavo chat ./model.gguf                a GGUF file, as of llama.cpp and Ollama",
    'octavo chat Qwen/Qwen2.5-0.5B-Instruct --system "Answer in one sentence." --temperature 0.7',
    "printf 'What is 2 + 3?\\nAnd twice that?\\n' | octavo chat  one turn per line",
)
def chat(engine: EngineOptions, sampling: SamplingOptions, system: System = None) -> None:
    """Chat with a model in the terminal.

    If the model's files set none of these options, this command uses --temperature 0.8, --top-k 40, --top-p 0.95 and
    --min-p 0.05.
    """
    from octavo.sampling_params import RequestOutputKind

    built = engine.build()
    if not built.input_processor.has_chat_template:
        raise ModelError(
            f"{engine.served_name} has no chat template; give one with --chat-template, or use octavo generate --raw"
        )
    unnamed = None if engine.generation_config == "vllm" else GENTLE_SAMPLING
    params = sampling.params(built.input_processor, RequestOutputKind.DELTA, unnamed=unnamed)
    conversation = Conversation(built, params, system)
    interactive = sys.stdin.isatty()
    if interactive:
        typer.secho(f"{engine.served_name} - /help shows what you can type", dim=True)
        if engine.chosen_model is None:
            typer.secho(REAL_MODELS, dim=True)
    while (line := _read_line(interactive=interactive)) is not None:
        if line.strip() in {"/exit", "/quit"}:
            return
        _obey_or_answer(conversation, line)


def _obey_or_answer(conversation: Conversation, line: str) -> None:
    word = line.strip()
    if not word:
        return
    if word == "/reset":
        conversation.reset()
        typer.secho("the conversation is forgotten", dim=True, err=True)
    elif word == "/help":
        typer.secho(HELP, dim=True, err=True)
    elif word.startswith("/") and " " not in word and word[1:].isalpha():
        typer.secho(f"unknown command {word}; /help lists the commands", fg="red", err=True)
    else:
        try:
            conversation.answer(line)
        except RequestError as error:
            typer.secho(f"error: {error} (/reset starts a new conversation)", fg="red", err=True)
        except ExecutionError as error:
            typer.secho(f"error: {error}", fg="red", err=True)


def _read_line(*, interactive: bool) -> str | None:
    if not interactive:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text: {error}", parameter="prompt") from None
        return line.removesuffix("\n") if line else None
    import readline  # noqa: F401 - gives input() a history and line editing

    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            typer.secho("\n(/exit or Ctrl-D ends the chat)", dim=True)
        except UnicodeDecodeError as error:
            typer.secho(f"error: the line is not UTF-8 text: {error}", fg="red", err=True)
        except EOFError:
            typer.echo()
            return None


class Conversation:
    """The messages of a conversation, including stopped answers. Failed turns are not kept."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._beginning)

    def reset(self) -> None:
        """Keep only the system message."""
        self.messages = list(self._beginning)

    def answer(self, text: str) -> None:
        """Print the answer to `text`. Add `text` and the answer to the messages.

        Raises `RequestError` and `ExecutionError`.
        """
        from octavo.cli.streaming import stream_answer

        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._engine.input_processor.chat_prompt(messages)
        try:
            answer, finish_reason = stream_answer(
                self._engine, prompt, self._params, lambda piece: typer.echo(piece, nl=False)
            )
        except ExecutionError:
            typer.echo()  # after a partial answer
            raise
        typer.echo()
        if finish_reason == "length":
            typer.secho("(the answer was cut off: it reached max-tokens or the context length)", dim=True, err=True)
        elif finish_reason == "abort":
            typer.secho("(stopped)", dim=True, err=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
