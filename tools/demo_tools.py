"""Write the conversations in which octavo's built-in model learns to call tools.

One to three tools are offered. They are drawn from kinds with varied names and parameters (`demo_tool_text`), or made
up of a verb and an object. A question needs one call, two calls or none; without a call the model answers itself, or
says that it has no tool. Calls are written in the format of Hermes and Qwen; results become a sentence. Held-out
examples are chosen as in `demo_data`: by the tool's signature, the value with the kind of tool, and the phrasing with
the tool's name.

Only the standard library is used. Run `python tools/demo_tools.py` to read a few samples.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import demo_data
from demo_data import Example, draw_name, draw_words, fill, invented_word, is_held_out, split
from demo_text import CITIES, COLOURS, OFF_TOPIC_ANSWER, SYSTEM_PROMPTS
from demo_tool_text import (
    ALIKE,
    ASK_FORMS,
    CONFIRMATIONS,
    DAYS,
    DETAILS,
    DONE,
    FAILED,
    FOODS,
    KINDS,
    LANGUAGES,
    MISSING,
    MONEY,
    MORE_FIELDS,
    NO_TOOL,
    NUMBER_WORDS,
    OBJECTS,
    REGIONS,
    RESULT,
    RESULT_FIELDS,
    ROOMS,
    SIGNS,
    SKIES,
    STATUSES,
    UNITS,
    VERBS,
    WEATHER_TEXTS,
    WIDE_PLACES,
    Parameter,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from demo_data import Message

Made = TypeVar("Made", bound=Example)
TOOL_TASKS = ("call", "two_calls", "no_call", "result")
Value = str | int
Values = dict[str, tuple[str, Value]]  # by slot: the spelling in the question, and the argument
SPARE = (("lang", "string"), ("limit", "integer"), ("verbose", "boolean"), ("format", "string"), ("timeout", "number"))
ARITHMETIC = {"add": "add", "subtract": "subtract", "multiply": "times", "divide": "divide"}  # to tasks of `demo_data`
PAIRED = tuple(name for name, kind in KINDS.items() if kind.both)
OWN_TASKS = {task: 1.3 for task in demo_data.CHECKABLE_TASKS if task != "context"}
OWN_TASKS |= {"chat": 3.0, "off_topic": 1.5, "story": 0.4}
NEAR_TOOLS = re.compile("weather|news|stock|Translate|football|film")


@dataclass(frozen=True)
class ToolParameter:
    """One parameter of an offered tool. slot: the kind of its value; "" if no question gives a value."""

    slot: str
    name: str
    type: str
    choices: tuple[str, ...] = ()
    required: bool = True

    @property
    def schema(self) -> dict[str, Any]:
        """Return its JSON schema."""
        return {"type": "string", "enum": [*self.choices]} if self.choices else {"type": self.type}


@dataclass(frozen=True)
class Tool:
    """A tool as offered in a conversation. about: verb and object of a made-up tool."""

    kind: str
    name: str
    parameters: tuple[ToolParameter, ...]
    about: tuple[str, str] = ("", "")

    @property
    def described(self) -> dict[str, Any]:
        """Return the tool in the format of clients."""
        parameters: dict[str, Any] = {"type": "object", "properties": {p.name: p.schema for p in self.parameters}}
        if required := [p.name for p in self.parameters if p.required]:
            parameters["required"] = required
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    @property
    def signature(self) -> str:
        """Its name and parameters in one line."""
        parts = (f"{p.name}:{'|'.join(p.choices) or p.type}:{p.required}" for p in self.parameters)
        return f"{self.name}({','.join(parts)})"

    def call(self, values: Values) -> str:
        """Return the text of a call. A required parameter without a value gets the first of its choices."""
        arguments: dict[str, Value] = {}
        for parameter in self.parameters:
            if parameter.slot in values:
                text, value = values[parameter.slot]
                arguments[parameter.name] = text if parameter.type == "string" else value
            elif parameter.required:
                arguments[parameter.name] = parameter.choices[0]
        written = json.dumps({"name": self.name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{written}\n</tool_call>"


@dataclass(frozen=True)
class Ask:
    """A question that needs a tool. values: those named in the question, by slot."""

    tool: Tool
    template: str
    question: str
    values: Values

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that decide if it is held out."""
        said = [text for slot, (text, _) in self.values.items() if slot not in {"unit", "state", "day"}]
        return (
            f"tool:{self.tool.signature}",
            f"ask:{self.template}:{self.tool.name}",
            *([f"value:{self.tool.kind}:{','.join(said)}"] if said else []),
        )


@dataclass(frozen=True)
class ToolExample(Example):
    """An exchange with tools. asks: the calls that are needed. call, results: earlier calls and their results."""

    offer: tuple[Tool, ...] = ()
    asks: tuple[Ask, ...] = ()
    call: str = ""
    results: tuple[str, ...] = ()

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools as clients describe them."""
        return [tool.described for tool in self.offer]

    def prompt(self) -> list[Message]:
        """The messages up to the answer."""
        messages = super().prompt()
        if self.call:
            messages.append({"role": "assistant", "content": self.call})
        return messages + [{"role": "tool", "content": result} for result in self.results]


def pieces(text: str) -> list[str]:
    """Return the parts of a literal between bars."""
    return text.strip().split("|")


def draw_place(rng: random.Random) -> str:
    """Return a city, sometimes with several words, made up, or followed by its region."""
    chance = rng.random()
    if chance < 0.45:
        place = rng.choice(split(CITIES))
    elif chance < 0.8:
        place = rng.choice(pieces(WIDE_PLACES))
    else:
        place = invented_word(rng).capitalize()
    return f"{place}, {rng.choice(pieces(REGIONS))}" if rng.random() < 0.15 else place


def draw_title(rng: random.Random) -> str:
    """Return one to three capitalized words."""
    return " ".join(word.capitalize() for word in draw_words(rng, rng.randint(1, 3), invented=0.3))


def draw_clock(rng: random.Random) -> str:
    """Return a time of day."""
    return f"{rng.randint(0, 23)}:{rng.randrange(0, 60, 5):02}"


def draw_id(rng: random.Random) -> str:
    """Return two to six digits, sometimes preceded by letters."""
    digits = str(rng.randrange(10, 10 ** rng.randint(2, 6)))
    head = rng.choice(("", "", "", "A", "B", "X", "ORD-", "order_", "AB-"))
    return head + digits


def draw_symbol(rng: random.Random) -> str:
    """Return a ticker symbol."""
    known = "AAPL MSFT GOOG AMZN TSLA NVDA IBM AMD INTC META"
    if rng.random() < 0.4:
        return rng.choice(split(known))
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))


def drawn_texts() -> dict[str, Callable[[random.Random], str]]:
    """Return the functions that draw values of text slots."""
    return {
        "place": draw_place,
        "city_from": draw_place,
        "city_to": draw_place,
        "city": draw_place,
        "location": draw_place,
        "word": lambda rng: draw_words(rng, 1, invented=0.3)[0],
        "text": lambda rng: " ".join(draw_words(rng, rng.randint(1, 4), invented=0.2)),
        "title": draw_title,
        "name": lambda rng: draw_name(rng) if rng.random() < 0.5 else draw_title(rng),
        "person": lambda rng: draw_name(rng) if rng.random() < 0.7 else f"{draw_name(rng)} {draw_name(rng)}",
        "owner": draw_name,
        "user": draw_name,
        "language": lambda rng: rng.choice(split(LANGUAGES)),
        "money_from": lambda rng: rng.choice(split(MONEY)),
        "money_to": lambda rng: rng.choice(split(MONEY)),
        "symbol": draw_symbol,
        "sign": lambda rng: rng.choice(split(SIGNS)),
        "room": lambda rng: rng.choice((*split(ROOMS)[:-2], "living room")),
        "food": lambda rng: rng.choice(split(FOODS)),
        "day": lambda rng: rng.choice(split(DAYS)),
        "date": lambda rng: rng.choice(split(DAYS)),
        "color": lambda rng: rng.choice(split(COLOURS)),
        "clock": draw_clock,
        "time": draw_clock,
        "order": draw_id,
        "id": draw_id,
    }


def draw_value(rng: random.Random, slot: str, type_: str) -> tuple[str, Value]:
    """Return a value: its spelling in a question, and an argument of the given type."""
    if slot in drawn_texts():
        text = drawn_texts()[slot](rng)
        if type_ == "integer":
            text = str(rng.randrange(10, 10 ** rng.randint(2, 6)))
        return text, int(text) if type_ == "integer" else text
    number = rng.randrange(1, 13) if rng.random() < 0.3 else rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4)))
    spelled = slot in "ab" and number <= 12 and rng.random() < 0.3 and type_ != "string"
    return split(NUMBER_WORDS)[number] if spelled else str(number), number


def named(rng: random.Random, name: str) -> str:
    """Return a name with underscores, or sometimes in camel case."""
    if rng.random() < 0.85:
        return name
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def draw_tool(rng: random.Random, kind: str) -> Tool:
    """Return a tool of one kind."""
    if kind == "made":
        return draw_made_tool(rng)
    asked = "".join(KINDS[kind].asks)
    parameters, style = [], rng.random()
    for parameter in KINDS[kind].parameters:
        if f"{{{parameter.slot}}}" in asked:
            parameters.append(declared(rng, parameter, rng.random() < 0.88, style))
        elif rng.random() < 0.55:
            parameters.append(declared(rng, parameter, rng.random() < 0.3, style))
    if rng.random() < 0.08:
        name, type_ = rng.choice(SPARE)
        parameters.append(ToolParameter("", name, type_, required=False))
    if rng.random() < 0.1:
        rng.shuffle(parameters)
    if len({parameter.name for parameter in parameters}) < len(parameters):
        return draw_tool(rng, kind)
    return Tool(kind, named(rng, rng.choice(split(KINDS[kind].names))), tuple(parameters))


def declared(rng: random.Random, parameter: Parameter, required: bool, style: float) -> ToolParameter:
    """Return one of the ways to declare a parameter. style: one number for a tool, so that its names fit together."""
    choices = split(rng.choice(parameter.choices)) if parameter.choices else ()
    names, type_ = split(parameter.names), rng.choice(split(parameter.types))
    name = names[int(style * len(names))] if rng.random() < 0.85 else rng.choice(names)
    return ToolParameter(parameter.slot, named(rng, name), type_, choices, required)


def draw_made_tool(rng: random.Random, verb: str = "", thing: str = "") -> Tool:
    """Return a made-up tool of a verb and an object, with up to two details."""
    verb, thing = verb or rng.choice(split(VERBS)), thing or rng.choice(split(OBJECTS))
    parameters = []
    for slot in rng.sample(sorted(DETAILS), rng.choice((0, 1, 1, 1, 2))):
        type_ = "integer" if slot in {"number", "count"} else "string"
        name = rng.choice((f"{thing}_{slot}", slot, slot, slot))
        parameters.append(ToolParameter(slot, name, "integer" if slot == "id" and rng.random() < 0.3 else type_))
    return Tool("made", named(rng, f"{verb}_{thing}"), tuple(parameters), (verb, thing))


def draw_offer(rng: random.Random, first: Tool) -> tuple[Tool, ...]:
    """Return one to three tools with dissimilar questions, including `first`."""
    offer = [first]
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 2))):
        kind = rng.choice(("made", *KINDS)) if rng.random() < 0.75 else "made"
        tool = draw_tool(rng, kind)
        if kind == first.kind == "made" and rng.random() < 0.5:
            tool = draw_made_tool(rng, *rng.choice(((first.about[0], ""), ("", first.about[1]))))
        if not any(collide(tool, other) for other in offer):
            offer.append(tool)
    rng.shuffle(offer)
    return tuple(offer)


def collide(one: Tool, other: Tool) -> bool:
    """Return True if two tools must not be offered together."""
    if one.name == other.name or (one.kind == other.kind == "made" and one.about == other.about):
        return True
    if "made" not in {one.kind, other.kind}:
        return one.kind == other.kind or any({one.kind, other.kind} == {*pair} for pair in ALIKE)
    made, known = (one, other) if one.kind == "made" else (other, one)
    return known.kind != "made" and made.about[1] in known.name.lower()


def ask_for(rng: random.Random, tool: Tool, templates: tuple[str, ...] = ()) -> Ask:
    """Return a question that needs the tool. templates: replace those of the kind."""
    if tool.kind == "made":
        return ask_for_made(rng, tool)
    kind = KINDS[tool.kind]
    template = rng.choice(templates or kind.asks)
    values = {p.slot: draw_spoken(rng, p) for p in tool.parameters if f"{{{p.slot}}}" in template}
    mentions = {p.slot: p.mentions for p in kind.parameters if p.mentions}
    said = ""
    for parameter in tool.parameters:
        must = parameter.required and not parameter.choices
        if parameter.slot in mentions and (must or rng.random() < 0.35):
            values[parameter.slot] = draw_spoken(rng, parameter)
            said += " " + rng.choice(mentions[parameter.slot])
    if said and template[-1] in ".?" and not said.endswith("."):
        template = template[:-1] + said + template[-1]
    else:
        template += said
    return Ask(tool, template, fill(rng, template, **{slot: text for slot, (text, _) in values.items()}), values)


def draw_spoken(rng: random.Random, parameter: ToolParameter) -> tuple[str, Value]:
    """Return a value of a parameter: its spelling in a question, and the argument."""
    if parameter.choices:
        text = rng.choice(parameter.choices)
        return text, text
    if parameter.slot in {"unit_from", "unit_to"}:
        text = rng.choice(rng.choice(pieces(UNITS)).split())
        return text, text
    return draw_value(rng, parameter.slot, parameter.type)


def ask_for_made(rng: random.Random, tool: Tool, *, lacking: bool = False) -> Ask:
    """Return a question that needs a made-up tool. lacking: leave out the required values."""
    verb, thing = tool.about
    values: Values = {}
    template = f"{verb} {rng.choice(('the', 'the', 'a', 'my'))} {thing}"
    for parameter in () if lacking else tool.parameters:
        values[parameter.slot] = draw_value(rng, parameter.slot, parameter.type)
        template += " " + rng.choice(DETAILS[parameter.slot]).replace("value", parameter.slot)
    form = rng.choice(ASK_FORMS)
    template = form.replace("{ask}", template)
    template = template[0].upper() + template[1:]
    return Ask(tool, template, fill(rng, template, **{slot: text for slot, (text, _) in values.items()}), values)


def result_texts() -> dict[str, Callable[[random.Random], str]]:
    """Return the functions that draw results with a single text."""
    return {
        "clock": draw_clock,
        "number": lambda rng: str(rng.randrange(10 ** rng.randint(1, 5))),
        "words": lambda rng: " ".join(draw_words(rng, rng.randint(1, 5), invented=0.2)),
        "day": lambda rng: rng.choice(split(DAYS)[:7]),
        "status": lambda rng: rng.choice(pieces(STATUSES)),
        "done": lambda rng: rng.choice(pieces(CONFIRMATIONS)),
    }


def draw_result(rng: random.Random, form: str) -> tuple[str, str, bool]:
    """Return a result: the tool's message, the same in words, and True if it has several fields."""
    fields: dict[str, Value]
    if form == "weather":
        degrees, sky = rng.randint(-15, 40), rng.choice(pieces(SKIES))
        if rng.random() < 0.55:
            text = rng.choice(pieces(WEATHER_TEXTS)).format(d=degrees, s=sky)
            return text, text, False
        fields = weather_fields(rng, degrees, sky)
    else:
        text = result_texts()[form](rng)
        if rng.random() < 0.55:
            return text, text, False
        fields = {rng.choice(split(RESULT_FIELDS)): int(text) if text.isdigit() and rng.random() < 0.7 else text}
        if form != "done" and rng.random() < 0.35:
            fields[rng.choice(split(MORE_FIELDS))] = rng.choice((rng.randrange(1000), draw_words(rng, 1)[0]))
    separators = (",", ":") if rng.random() < 0.2 else (", ", ": ")
    content = json.dumps(fields, separators=separators, ensure_ascii=False)
    if len(fields) == 1:
        return content, str(*fields.values()), False
    return content, ", ".join(f"{name} {value}" for name, value in fields.items()), True


def weather_fields(rng: random.Random, degrees: int, sky: str) -> dict[str, Value]:
    """Return the weather as an object."""
    number = rng.choice((degrees, degrees, str(degrees)))
    fields: dict[str, Value] = {rng.choice(("temperature", "temperature", "temp", "degrees")): number}
    if rng.random() < 0.4:
        fields["unit"] = rng.choice(("celsius", "fahrenheit", "C"))
    if rng.random() < 0.7 or len(fields) == 1:
        fields[rng.choice(("condition", "conditions", "weather", "sky", "forecast", "description"))] = sky
    return fields


def answered(rng: random.Random, example: ToolExample) -> ToolExample:
    """Return the exchange that follows an example's calls: their results, and the answer about them."""
    results, sentences = zip(*(say(rng, ask) for ask in example.asks), strict=True)
    return replace(example, task="result", answer=" ".join(sentences), call=example.answer, results=results)


def say(rng: random.Random, ask: Ask) -> tuple[str, str]:
    """Return a result of the call that a question needs, and the sentence for it."""
    if rng.random() < 0.04:
        words = " ".join(draw_words(rng, rng.randint(1, 4), invented=0.2))
        return rng.choice((json.dumps({"error": words}), f"Error: {words}")), FAILED.format(result=words)
    kind = KINDS.get(ask.tool.kind)
    form = rng.choice(kind.results if kind else ("number", "words", "status", "done"))
    content, words, several = draw_result(rng, form)
    fields = {slot: text for slot, (text, _) in ask.values.items()}
    if kind is None:
        return content, DONE if form == "done" else RESULT.format(result=words)
    says = kind.lists if several and form != "done" else kind.says
    return content, says.format(result=words, **fields)


def draw_first(rng: random.Random) -> Tool:
    """Return a tool to be called. Weather tools are more frequent than other kinds."""
    chance = rng.random()
    if chance < 0.27:
        return draw_made_tool(rng)
    return draw_tool(rng, "weather" if chance < 0.42 else rng.choice([*KINDS]))


def make_call(rng: random.Random, offer: tuple[Tool, ...] = ()) -> ToolExample:
    """Return an example that needs one call."""
    offer = offer or draw_offer(rng, draw_first(rng))
    ask = ask_for(rng, rng.choice(offer))
    return calling("call", ask.question, (ask,), offer)


def calling(task: str, question: str, asks: tuple[Ask, ...], offer: tuple[Tool, ...]) -> ToolExample:
    """Return an example with calls as its answer."""
    call = "\n".join(ask.tool.call(ask.values) for ask in asks)
    return ToolExample(task, question, call, tuple(key for ask in asks for key in ask.keys), (), offer, asks)


def make_two_calls(rng: random.Random, offer: tuple[Tool, ...] = ()) -> ToolExample:
    """Return an example that needs two calls: of one tool with two values, or of two tools."""
    while not takes_two(offer):
        offer = draw_offer(rng, draw_tool(rng, rng.choice(PAIRED)) if rng.random() < 0.6 else draw_first(rng))
    able = [tool for tool in offer if tool.kind in PAIRED]
    if able and (len(offer) == 1 or rng.random() < 0.6):
        tool = rng.choice(able)
        parameter = next(p for p in tool.parameters if p.slot == KINDS[tool.kind].parameters[0].slot)
        template, first, second = rng.choice(KINDS[tool.kind].both), *(draw_spoken(rng, parameter) for _ in "12")
        asks = tuple(Ask(tool, template, "", {parameter.slot: value}) for value in (first, second))
        return calling("two_calls", fill(rng, template, first=first[0], second=second[0]), asks, offer)
    asks = tuple(ask_for(rng, tool) for tool in rng.sample(offer, 2))
    question = " ".join(ask.question if ask.question[-1] in ".?" else f"{ask.question}." for ask in asks)
    return calling("two_calls", question, asks, offer)


def takes_two(offer: tuple[Tool, ...]) -> bool:
    """Return True if one question may need two calls of these tools."""
    return len(offer) > 1 or any(tool.kind in PAIRED for tool in offer)


def make_result(rng: random.Random) -> ToolExample:
    """Return an example with an answer about results of calls."""
    return answered(rng, (make_call if rng.random() < 0.8 else make_two_calls)(rng))


def make_no_call(rng: random.Random, offer: tuple[Tool, ...] = ()) -> ToolExample:
    """Return a question that needs no tool, has no suitable tool, or lacks a required value."""
    offer = offer or draw_offer(rng, draw_first(rng))
    chance = rng.random()
    if chance < 0.12 and (example := lacking_question(rng, offer)):
        return example
    other = draw_first(rng)
    if chance < 0.4 and other.kind not in ARITHMETIC and not any(collide(other, tool) for tool in offer):
        ask = ask_for(rng, other)
        keys = (f"none:{ask.template}:{','.join(sorted(tool.kind for tool in offer))}", *ask.keys[2:])
        return ToolExample("no_call", ask.question, NO_TOOL, keys, (), offer)
    return own_answer(rng, offer)


def lacking_question(rng: random.Random, offer: tuple[Tool, ...]) -> ToolExample | None:
    """Return a question that lacks a required value; None if no offered tool has a required value."""
    for tool in offer:
        needed = [p for p in tool.parameters if p.required and not p.choices]
        templates = KINDS[tool.kind].lacking if tool.kind in KINDS else ()
        if not needed or (tool.kind != "made" and not templates):
            continue
        ask = ask_for_made(rng, tool, lacking=True) if tool.kind == "made" else ask_for(rng, tool, templates)
        name = next((p.name for p in needed if p.slot not in ask.values), None)
        if name:
            keys = (f"lacking:{ask.template}:{tool.name}:{name}",)
            return ToolExample("no_call", ask.question, MISSING.format(name=name), keys, (), offer)
    return None


def own_answer(rng: random.Random, offer: tuple[Tool, ...]) -> ToolExample:
    """Return a question of `demo_data` for which no offered tool is suitable."""
    taken = {ARITHMETIC.get(tool.kind) for tool in offer}
    while True:
        task = rng.choices([*OWN_TASKS], [*OWN_TASKS.values()])[0]
        example = demo_data.sample(rng, task)
        if task not in taken and not (task == "off_topic" and NEAR_TOOLS.search(example.question)):
            keys = (f"own:{example.question}",)
            return ToolExample("no_call", example.question, example.answer, keys, example.history, offer)


def make_untold(rng: random.Random) -> Example:
    """Return a question that needs a tool, without offering one."""
    ask = ask_for(rng, draw_tool(rng, rng.choice([kind for kind in KINDS if kind not in ARITHMETIC])))
    return Example("untold", ask.question, OFF_TOPIC_ANSWER, ask.keys[2:])


def makers() -> dict[str, Callable[[random.Random], ToolExample]]:
    """Return the generator of each task."""
    return {"call": make_call, "two_calls": make_two_calls, "no_call": make_no_call, "result": make_result}


def sample(rng: random.Random, make: Callable[[random.Random], Made], held_out: bool = False) -> Made:
    """Draw an example from the training part or from the held-out part."""
    example = make(rng)
    while example.held_out != held_out:
        example = make(rng)
    return example


def questions(task: str, count: int, seed: int = 0) -> list[ToolExample]:
    """Return distinct held-out questions of one task, the same for the same seed."""
    rng = random.Random(f"questions:{seed}:{task}")
    found: dict[tuple[str, tuple[str, ...]], ToolExample] = {}
    while len(found) < count:
        example = sample(rng, makers()[task], held_out=True)
        found.setdefault((example.question, example.results), example)
    return list(found.values())


def again(rng: random.Random, example: ToolExample) -> ToolExample:
    """Return a short follow-up question for another value after an answer."""
    tool = example.asks[0].tool
    ask = ask_for(rng, tool, KINDS[tool.kind].again)
    return calling("call", ask.question, (ask,), example.offer)


def draw_training_offer(rng: random.Random) -> tuple[Tool, ...]:
    """Tools to offer of which none is held out."""
    while True:
        offer = draw_offer(rng, draw_first(rng))
        if not any(is_held_out(f"tool:{tool.signature}") for tool in offer):
            return offer


def following(rng: random.Random, offer: tuple[Tool, ...], last: ToolExample | None) -> ToolExample:
    """Return the next exchange of a conversation, with the same tools."""
    if last and last.results and len(last.asks) == 1 and rng.random() < 0.6:
        kind = KINDS.get(last.asks[0].tool.kind)
        if kind and kind.again:
            return again(rng, last)
    maker = rng.choices((make_call, make_two_calls, make_no_call), (5.0, 1.2, 3.2))[0]
    return (maker if takes_two(offer) or maker is make_no_call else make_call)(rng, offer)


def conversation(rng: random.Random, more: float = 0.4) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return a training conversation with tools, and these tools, without held-out parts."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    offer = draw_training_offer(rng)
    last: ToolExample | None = None
    while True:
        example = following(rng, offer, last)
        while example.held_out:
            example = following(rng, offer, last)
        last = answered(rng, example) if example.asks and rng.random() < 0.6 else example
        messages += [*last.prompt(), {"role": "assistant", "content": last.answer}]
        if rng.random() > more or last.task in {"call", "two_calls"}:
            return messages, [tool.described for tool in offer]


def main() -> None:
    """Print samples of each task."""
    parser = argparse.ArgumentParser(description="Print sample conversations with tools.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument("--count", type=int, default=3, help="samples per task (default 3)")
    parser.add_argument("--held-out", action="store_true", help="show held-out questions instead of training text")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for task, make in makers().items():
        print(f"[{task}]")
        for _ in range(args.count):
            example = sample(rng, make, args.held_out)
            print("      tools: " + " ".join(tool.signature for tool in example.offer))
            for message in [*example.prompt(), {"role": "assistant", "content": example.answer}]:
                print(f"  {message['role']:>9}: {message['content']}")


if __name__ == "__main__":
    main()
