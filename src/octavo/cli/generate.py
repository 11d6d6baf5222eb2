"""`octavo generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.command import command
from octavo.cli.engine_options import EngineOptions
from octavo.cli.sampling_options import SamplingOptions
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.engine.llm_engine import Engine
    from octavo.outputs import RequestOutput

Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="A prompt; may be repeated. Default: standard input.", show_default=False),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        readable=True,
        help="A file with one prompt per line. Default: none.",
        show_default=False,
    ),
]
System = Annotated[
    str | None, typer.Option(help="System message: instructions before each prompt. Default: none.", show_default=False)
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw", help="Continue the text as it is. Without this option a prompt is a user's message in a chat."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for each prompt.")]
Choices = Annotated[int, typer.Option("--n", help="Number of answers to each prompt.")]


@command(
    'octavo generate --prompt "What is 12 + 30?"',
    "echo 'Once upon a time' | octavo generate --raw --max-tokens 50",
    "octavo generate ./my-checkpoint --prompts-file questions.txt --json --temperature 0",
)
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompt: Prompts = None,
    prompts_file: PromptsFile = None,
    system: System = None,
    n: Choices = 1,
    raw: Raw = False,
    json_: Json = False,
) -> None:
    """Answer one prompt, or many prompts in one batch."""
    from octavo.sampling_params import RequestOutputKind

    texts = _read_prompts(prompt, prompts_file)
    built = engine.build()
    prompts = [text if raw else _as_chat(built, text, system) for text in texts]
    if len(prompts) == 1 and n == 1 and not json_:
        _stream(built, prompts[0], sampling)
        return
    from octavo.runtime.progress import RequestProgress

    params = sampling.params(built.input_processor, RequestOutputKind.FINAL_ONLY, n=n)
    with RequestProgress(len(prompts)) as on_output:
        outputs = built.generate_batch(prompts, params, on_output=on_output).values()
    for text, output in zip(texts, outputs, strict=True):
        _show(text, output, as_json=json_)
    if any(output.error is not None for output in outputs):
        raise typer.Exit(1)


def _read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    texts = list(prompts or [])
    try:
        if file is not None:
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not texts and file is None and not sys.stdin.isatty():
            text = sys.stdin.read().removesuffix("\n")
            texts = [text] if text else []
    except UnicodeDecodeError as error:
        raise RequestError(f"{file or 'standard input'} is not UTF-8 text: {error}", parameter="prompt") from None
    if not texts:
        raise typer.BadParameter(
            "no prompt was given: give --prompt TEXT, --prompts-file FILE, or text on standard input"
        )
    return texts


def _as_chat(engine: Engine, text: str, system: str | None) -> Any:
    if not engine.input_processor.has_chat_template:
        return text if system is None else f"{system}\n{text}"
    messages = [] if system is None else [{"role": "system", "content": system}]
    return engine.input_processor.chat_prompt([*messages, {"role": "user", "content": text}])


def _stream(engine: Engine, prompt: Any, sampling: SamplingOptions) -> None:
    from octavo.cli.streaming import stream_answer
    from octavo.sampling_params import RequestOutputKind

    params = sampling.params(engine.input_processor, RequestOutputKind.DELTA)
    _, finish_reason = stream_answer(engine, prompt, params, lambda piece: typer.echo(piece, nl=False))
    typer.echo()
    if finish_reason == "abort":
        raise typer.Exit(130)


def _show(text: str, output: RequestOutput, *, as_json: bool) -> None:
    if as_json:
        choices = [
            {"text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason}
            for choice in output.outputs
        ]
        typer.echo(json.dumps({"prompt": text, "outputs": choices, "error": output.error}, ensure_ascii=False))
        return
    typer.secho(f"> {text}", dim=True)
    for choice in output.outputs:
        typer.echo(choice.text)
    if output.error is not None:
        typer.secho(f"error: {output.error}", fg="red", err=True)
    typer.echo()
