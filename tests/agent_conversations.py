"""Plays the conversations of `tests/hybrid_conversations`, rendered and read as in the server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import SamplingParams, StructuredOutputsParams
from octavo.server.answers.answer_form import AnswerForm, AnswerReader, AnswerStyle
from octavo.server.answers.tools import read_chat_tools
from octavo.server.api.conversation import read_messages

if TYPE_CHECKING:
    from collections.abc import Generator

    from octavo import LLM
    from octavo.outputs import RequestOutput

    Asking = Generator["Ask", RequestOutput, None]

FOLDER = Path(__file__).parent / "hybrid_conversations"
MODEL = FOLDER / "model"
TEMPERATURES = (0.0, 1.0)
MOST_ANSWERS = 3  # in a turn
MOST_TOKENS = 96


@dataclass(frozen=True)
class Ask:
    """A request of a conversation."""

    prompt: dict[str, Any]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """An answered request. calls: (name, arguments) in the first output. num_known: See `num_known_tokens`."""

    turn: int
    num_prompt_tokens: int
    token_ids: list[list[int]]
    calls: list[tuple[str, str]]
    content: str
    num_known: int
    num_cached: int


class Player:
    """One conversation at one temperature. The first of n outputs continues it."""

    def __init__(self, llm: LLM, script: dict[str, Any], tools: dict[str, Any], temperature: float) -> None:
        self.inputs = llm.llm_engine.input_processor
        self.style = AnswerStyle.find("auto", "auto", self.inputs)
        self.script = script
        self.tools = [tools[name] for name in script["tools"]]
        self.temperature = temperature
        self.answers: list[Answer] = []
        self.computed: list[tuple[int, list[int]]] = []

    def play(self) -> Asking:
        """Yield the requests of all turns, and of the branch's turns."""
        system = self.script.get("system")
        messages = [{"role": "system", "content": system}] if system else []
        branch, past = self.script.get("branch"), messages
        for index, turn in enumerate(self.script["turns"]):
            messages = yield from self.play_turn(index, turn, messages)
            if branch and index + 1 == branch["after"]:
                past = messages
        for index, turn in enumerate(branch["turns"] if branch else ()):
            past = yield from self.play_turn(branch["after"] + index, turn, past)

    def play_turn(self, index: int, turn: dict[str, Any], messages: list[Any]) -> Generator[Ask, RequestOutput, list]:
        """Yield the requests of a turn: each answer's calls get the next results. Return the messages after it."""
        messages, results = [*messages, {"role": "user", "content": turn["user"]}], iter(turn["results"])
        for number in range(MOST_ANSWERS):
            toolbox = read_chat_tools(self.tools, None if number else turn.get("choice"), None, self.style.tools)
            shown, tools = toolbox.template_input(read_messages(messages), self.style.tools)
            prompt = self.inputs.chat_prompt(shown, tools=tools, add_generation_prompt=True)
            form = AnswerForm.of(self.style, toolbox, prompt["prompt"], is_whole=True)
            output = yield Ask(prompt, form.applied_to(self.params(turn, seed=100 * index + number)))
            message = self.read(index, output, form)
            messages.append(message)
            for call in message.get("tool_calls", ()):
                result = next(results, "no result")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if "tool_calls" not in message:
                break
        return messages

    def params(self, turn: dict[str, Any], seed: int) -> SamplingParams:
        """Return the sampling parameters of a request."""
        structure = StructuredOutputsParams(json=json.dumps(turn["format"])) if "format" in turn else None
        return SamplingParams(
            temperature=self.temperature,
            seed=seed,
            n=turn.get("n", 1),
            max_tokens=MOST_TOKENS,
            structured_outputs=structure,
        )

    def read(self, turn: int, output: RequestOutput, form: AnswerForm) -> dict[str, Any]:
        """Record an answer. Return the message of its first output."""
        parts = AnswerReader(form).read(output.outputs[0])
        texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
        names = [part.text for part in parts if part.kind == "call"]
        arguments = [
            "".join(part.text for part in parts if part.kind == "arguments" and part.call == index)
            for index in range(len(names))
        ]
        calls = [*zip(names, arguments, strict=True)]
        prompt, token_ids = output.prompt_token_ids, [each.token_ids for each in output.outputs]
        known = num_known_tokens(prompt, self.computed)
        answer = Answer(turn, len(prompt), token_ids, calls, texts["content"], known, output.num_cached_tokens)
        self.answers.append(answer)
        self.computed += [(len(prompt), prompt + each[:-1]) for each in token_ids]
        message = {"role": "assistant", "content": texts["content"], "reasoning_content": texts["reasoning"]}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": text}}
                for index, (name, text) in enumerate(calls)
            ]
        return message


def num_known_tokens(prompt: list[int], computed: list[tuple[int, list[int]]]) -> int:
    """Return how many tokens before a prompt's last one an earlier request had, at most.

    Recurrent states are saved in prompts, and at the end of answers. So an answer counts only as a whole.

    computed: For each earlier sequence, its number of prompt tokens, and its computed tokens.
    """
    most = 0
    for num_prompt_tokens, token_ids in computed:
        pairs = zip(prompt[:-1], token_ids, strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        most = max(most, num_shared if num_shared == len(token_ids) else min(num_shared, num_prompt_tokens))
    return most


def read_scripts() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the conversations, and the tools by name."""
    content = json.loads((FOLDER / "conversations.json").read_text(encoding="utf-8"))
    return content["conversations"], content["tools"]


def play_all(llm: LLM, *, together: bool) -> dict[tuple[str, float], list[Answer]]:
    """Play all conversations at all temperatures, at once or one after the other. Return the answers of each."""
    scripts, tools = read_scripts()
    waiting = [Player(llm, script, tools, temperature) for temperature in TEMPERATURES for script in scripts]
    players = {(player.script["name"], player.temperature): player for player in waiting}
    engine, running = llm.llm_engine, dict[str, tuple[Player, "Asking"]]()

    def ask(player: Player, asking: Asking, output: RequestOutput | None) -> None:
        """Add the next request of a conversation, if it has not ended."""
        try:
            request = asking.send(output)
        except StopIteration:
            return
        name = f"{player.script['name']} {player.temperature} {len(player.answers)}"
        running[name] = player, asking
        engine.add_request(name, request.prompt, request.params)

    while waiting or running:
        while waiting and (together or not running):
            player = waiting.pop(0)
            ask(player, player.play(), None)
        for output in engine.step():
            if output.finished:
                ask(*running.pop(output.request_id), output)
    return {name: player.answers for name, player in players.items()}
