"""How the chat templates of real models have calls written: which form each shows, and a forced call through it."""

from __future__ import annotations

import logging
from functools import cache

import jsonschema
import pytest
from answer_reading import read_answer

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.input_processor import InputProcessor
from octavo.errors import RequestError
from octavo.server.answers.answer_form import AnswerForm, AnswerStyle
from octavo.server.answers.parts import joined
from octavo.server.answers.tools import read_chat_tools
from octavo.startup.launch import ServedModel, make_processors

logger = logging.getLogger(__name__)
MAX_MODEL_LEN = 4096
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
FUNCTION = {"name": "get_weather", "description": "Tells the weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
THINK = "think"
# Each template's form of calls, and of reasoning; None for what it has none of.
FORMS = {}
# What cannot be done with a template, and why.
CANNOT = {}
"""
"""


@pytest.fixture(scope="module")
def engine(real_model):
    """A tiny random model with Qwen3's vocabulary."""
    engine = LLMEngine(
        ModelConfig(model=str(real_model("qwen3")), max_model_len=MAX_MODEL_LEN),
        cache_config=CacheConfig(num_gpu_blocks=MAX_MODEL_LEN // 16 + 8),
        scheduler_config=SchedulerConfig(max_num_seqs=1),
    )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def inputs_with(engine, real_templates):
    """Return a function: the name of a template -> the model's inputs under it."""
    inputs = engine.input_processor

    @cache
    def make(name):
        template = ChatTemplate(real_templates[name], {"bos_token": "<s>", "eos_token": "</s>"})
        return InputProcessor(inputs.tokenizer, inputs.model_info, 0, template)

    return make


def test_every_template_shows_its_form(real_templates, inputs_with):
    found = {}
    for name in real_templates:
        style = AnswerStyle.find("auto", "auto", inputs_with(name))
        found[name] = (style.tools and style.tools.name, style.reasoning and style.reasoning.name)
        logger.info("%s: calls as %s, reasoning as %s%s", name, *found[name], CANNOT.get(name, ""))
    assert found == FORMS
