"""The forms of calls in the chat templates of real models, and a forced call in each form."""

from __future__ import annotations

import json
import logging
from functools import cache
from itertools import takewhile

import jsonschema
import pytest

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.input_processor import InputProcessor
from octavo.errors import RequestError
from octavo.server.answers.answer_form import AnswerForm, AnswerStyle
from octavo.server.answers.parts import joined
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tools import read_chat_tools

logger = logging.getLogger(__name__)
MAX_MODEL_LEN = 4096
NUM_SEQS = 8
MAX_TOKENS = 300
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "São Paulo", "東京"], "description": "The city"},
        "days": {"type": "integer", "enum": [1, 20, 300], "description": "How many"},
        "is_long": {"type": "boolean", "description": "Whether all is told"},
    },
    "required": ["city", "days", "is_long"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Tells {name}", "parameters": parameters}}
    for name, parameters in (("get_weather", PARAMETERS), ("now", NOTHING))
]
ONE_IN_HISTORY = {"gigachat3"}  # its templates write the first call only
# Each template's form of calls, and of reasoning. None: unknown, or the template has none.
FORMS = {
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "Apriel-1.6-15b-Thinker-fixed": ("jamba", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("cohere_command3", "cohere_command3"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command3", "cohere_command3"),
    "GLM-4.6": ("glm45", "think"),
    "GLM-4.7-Flash": ("glm47", "think"),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", None),
    "HuggingFaceTB-SmolLM3-3B": ("generic", "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "think"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2-8B-A1B": ("lfm2", None),
    "LFM2.5-8B-A1B": ("lfm2", "think"),
    "LFM2.5-Instruct": ("lfm2", "think"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": ("minimax", None),
    "MiniMax-M2": ("minimax_m2", "think"),
    "MiniMax-M3": ("minimax_m3", "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "Reka-Edge": ("hermes", "think"),
    "Spark2.5": ("glm47", "think"),
    "StepFun3.5-Flash": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "think"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek_v4", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("functools", None),
    "google-gemma-2-2b-it": ("generic", None),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm45", "think"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "think"),
    "llama-cpp-rwkv-world": ("generic", "think"),
    "meetkai-functionary-medium-v3.1": ("functionary_v3_1", None),
    "meetkai-functionary-medium-v3.2": ("functionary_v3_2", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": ("generic", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "muse-glimmer": ("muse_glimmer", "muse_glimmer"),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "think"),
    "poolside-Laguna-S-2.1": ("glm47", "think"),
    "poolside-Laguna-XS-2.1": ("glm45", "think"),
    "poolside-Laguna-XS.2": ("glm45", "think"),
    "tencent-Hy3": ("hy_v3", "hy_v3"),
    "unsloth-Apriel-1.5": ("jamba", "apriel"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "upstage-Solar-Open-100B": ("solar_open", "solar_open"),
}

_NO_TOOLS = "the template tells the model of no tools"
# Templates that cannot be tested, with the reason.
CANNOT = {
    "HuggingFaceTB-SmolLM3-3B": "the template takes tools under names of its own: xml_tools and python_tools",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": _NO_TOOLS,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": _NO_TOOLS,
    "deepseek-ai-DeepSeek-V3.1": _NO_TOOLS,
    "fireworks-ai-llama-3-firefunction-v2": "the template wants variables of its own: functions and datetime",
    "google-gemma-2-2b-it": _NO_TOOLS,
    "llama-cpp-deepseek-r1": "the template makes JSON of a generator, and so refuses tools in transformers as well",
    "llama-cpp-rwkv-world": _NO_TOOLS,
    "microsoft-Phi-3.5-mini-instruct": _NO_TOOLS,
}


@pytest.fixture(scope="module")
def engine(real_model):
    """Return a tiny random model with Qwen3's vocabulary."""
    engine = LLMEngine(
        ModelConfig(model=str(real_model("qwen3")), max_model_len=MAX_MODEL_LEN),
        cache_config=CacheConfig(num_gpu_blocks=NUM_SEQS * MAX_MODEL_LEN // 16),
        scheduler_config=SchedulerConfig(max_num_seqs=NUM_SEQS),
    )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def inputs_with(engine, real_templates):
    """Return a function: name of a template -> the model's inputs with this template."""
    inputs = engine.input_processor

    @cache
    def make(name):
        template = ChatTemplate(real_templates[name], {"bos_token": "<s>", "eos_token": "</s>"})
        return InputProcessor(inputs.tokenizer, inputs.model_info, 0, template)

    return make


def style_of(inputs, reasoning="auto"):
    return AnswerStyle.find("auto", reasoning, inputs)


def told(parts):
    """Return the content, and the calls with their arguments."""
    calls = [(part.text, "".join(p.text for p in parts if p.kind == "arguments" and p.call == part.call))
             for part in parts if part.kind == "call"]  # fmt: skip
    return "".join(part.text for part in parts if part.kind == "content"), calls


def test_tool_and_reasoning_formats_are_detected_for_every_template(real_templates, inputs_with):
    found = {}
    for name in real_templates:
        style = style_of(inputs_with(name))
        found[name] = (style.tools and style.tools.name, style.reasoning and style.reasoning.name)
        logger.info("%s: %s%s", name, style.summary, f"; {CANNOT[name]}" if name in CANNOT else "")
        assert style.shows_tools or name in CANNOT, name
    assert found == FORMS
    unknown = {name for name, (calls, _) in found.items() if calls in {None, "generic"}}
    assert unknown <= CANNOT.keys()


CALLS = [("get_weather", {"city": "São Paulo", "days": 20, "is_long": True}), ("now", {})]
WRITTEN_NOTHING = {"ibm-granite-granite-3.3-2B-Instruct", "LFM2-8B-A1B", "LFM2.5-Instruct"}
NO_CALLS_BEFORE = "append"  # on a list, by Kimi's templates; this sandbox and transformers' one refuse it


def test_tool_calls_rendered_by_templates_are_parsed(real_templates, inputs_with):
    """Two calls if the template takes them, otherwise one; read as one piece and letter by letter."""
    unread = {}
    for name in real_templates:
        inputs = inputs_with(name)
        tools = style_of(inputs).tools
        if tools is None or tools.name == "generic":
            continue
        takes_one = tools.takes_one or tools.name in ONE_IN_HISTORY  # further calls would be separate turns
        for calls in (CALLS[:1],) if takes_one else (CALLS, CALLS[:1]):
            try:
                text = written(inputs, calls)
            except RequestError as error:
                text, refusal = None, str(error)
                continue
            break
        if text is None or name in WRITTEN_NOTHING:
            assert name in {*CANNOT, *WRITTEN_NOTHING} or NO_CALLS_BEFORE in refusal, name
            continue
        functions = [Function("get_weather", PARAMETERS), Function("now", NOTHING)]
        for pieces in ([text], text):
            parser = tools.parser(functions)
            parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
            read = [(called, json.loads(arguments)) for called, arguments in told(parts)[1]]
            if read != calls:
                unread[name] = (text, parts)
    assert not unread, unread


def written(inputs, calls):
    """Return the text that a template writes for an answer with tool calls."""
    listed = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": None, "tool_calls": listed}
    behind = inputs.chat_text([*MESSAGES, answer], tools=TOOLS, add_generation_prompt=False)
    before, prompt = (inputs.chat_text(MESSAGES, tools=TOOLS, add_generation_prompt=begins) for begins in (False, True))
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, behind, strict=False)))
    return behind.removeprefix(prompt) if behind.startswith(prompt) else behind[num_common:]


def test_required_tool_call_is_valid_with_every_template(real_templates, engine, inputs_with, sampled):
    """The model has not learned any form: only the grammar enforces it. Another test covers reasoning."""
    prompts, params, forms, names = [], [], [], []
    for name in sampled([name for name, (calls, _) in FORMS.items() if calls is not None]):
        inputs = inputs_with(name)
        style = style_of(inputs, "none")
        toolbox = read_chat_tools(TOOLS, "required", False, style.tools)
        try:
            messages, given = toolbox.template_input(MESSAGES, style.tools)
            prompt = inputs.chat_prompt(messages, tools=given)
        except RequestError:
            assert name in CANNOT
            continue
        form = AnswerForm.of(style, toolbox, prompt["prompt"])
        wanted = form.applied_to(SamplingParams(temperature=1.0, seed=len(names), max_tokens=MAX_TOKENS))
        prompts.append(prompt)
        params.append(wanted)
        forms.append(form)
        names.append(name)
    wrong = {}
    for name, form, output in zip(names, forms, engine.generate_batch(prompts, params).values(), strict=True):
        completion = output.outputs[0]
        parser = form.parser()
        parts = joined(parser.feed(completion.text) + parser.finish(is_cut=completion.finish_reason == "length"))
        content, calls = told(parts)
        if content.strip() or not calls or not all(fits(called, arguments) for called, arguments in calls):
            wrong[name] = (completion.finish_reason, completion.text)
    assert not wrong, wrong


def fits(name, arguments):
    try:
        jsonschema.validate(json.loads(arguments), PARAMETERS if name == "get_weather" else NOTHING)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
