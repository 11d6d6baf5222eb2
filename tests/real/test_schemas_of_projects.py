"""A small real model fits its answers to schemas as users write them."""

from __future__ import annotations

import json

import jsonschema
import pytest
from public_schemas import SERVED

from octavo import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
NAMES = ["Anna", "Bob", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jo", "Kim", "Lea"]
ASKED = ["Describe a person called {} as JSON with name and age.", "Who is {}? Give the name and the age."]
OVERLAPS = "OpenAPI: overlapping oneOf"  # its options are read like those of anyOf


@pytest.fixture(scope="module")
def llm(real_model):
    return LLM(str(real_model("smollm2")), max_model_len=1024, max_num_seqs=16, kv_cache_memory_bytes=128 << 20)


def ask(llm, prompts, schemas, temperature, max_tokens):
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for seed, schema in enumerate(schemas)
    ]
    return [output.outputs[0] for output in llm.chat(messages, params, use_tqdm=False)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smollm2_objects_contain_only_declared_properties(llm, temperature):
    prompts = [asked.format(name) for asked in ASKED for name in NAMES]
    answers = ask(llm, prompts, [PERSON] * len(prompts), temperature, 200)
    for answer in answers:
        jsonschema.validate(json.loads(answer.text), {**PERSON, "additionalProperties": False})
    assert sum(len(answer.token_ids) for answer in answers) < 1000  # with an open object it would be twice as many


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smollm2_finished_answers_match_public_schemas(llm, temperature):
    """Every answer that the model ended is valid. Strings without a limit may use up all tokens."""
    prompts = [f"Write a short JSON example: {name.partition(': ')[2]}." for name in SERVED]
    answers = ask(llm, prompts, [each.schema for each in SERVED.values()], temperature, 120)
    num_ended = 0
    for (name, each), answer in zip(SERVED.items(), answers, strict=True):
        if answer.finish_reason == "stop":
            num_ended += 1
            value = json.loads(answer.text)
            assert name == OVERLAPS or jsonschema.Draft202012Validator(each.schema).is_valid(value), answer.text
    assert num_ended > len(SERVED) // 3
