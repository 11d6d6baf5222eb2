"""Answers to JSON schemas: the number of valid ones, and the time of a token's mask.

    python benchmarks/structured_outputs.py                       # 200 schemas, the built-in model
    python benchmarks/structured_outputs.py --model DIR --schemas 50

Schemas are the hard ones of tests/json_schemas.py, and generated ones up to --schemas. Each is answered alone and in a
batch with all of them, and both answers must have the same tokens. The time of a mask is that of advancing the grammar
by the last token and of computing the allowed tokens; "share of a step" compares it with the time of its steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.structured_output.grammars import Matcher

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from json_schemas import HARD, generate


def main() -> None:
    """Generate and check answers, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint with a tokenizer (default: the built-in model)")
    parser.add_argument("--schemas", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--max-tokens", type=int, default=1000, help="of an answer (default: 1000)")
    arguments = parser.parse_args()
    schemas = [*HARD.values(), *(generate(seed) for seed in range(arguments.schemas))][: arguments.schemas]
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(json=schema), seed=seed, max_tokens=arguments.max_tokens
        )
        for seed, schema in enumerate(schemas)
    ]
    prompts = [f"Answer number {number}: " for number in range(len(schemas))]
    options: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False}
    llm = LLM(arguments.model, **options)
    llm.generate(prompts[0], params[0], use_tqdm=False)  # reads the vocabulary
    seconds = measure_masks()
    start = time.perf_counter()
    crowd = [output.outputs[0] for output in llm.generate(prompts, params)]
    wall_s = time.perf_counter() - start
    costs = sorted(seconds)
    alone = [
        llm.generate(prompt, each, use_tqdm=False)[0].outputs[0] for prompt, each in zip(prompts, params, strict=True)
    ]
    result = {
        "schemas": len(schemas),
        "valid": sum(is_valid(output.text, schema) for output, schema in zip(crowd, schemas, strict=True)),
        "cut_off": sum(output.finish_reason != "stop" for output in crowd),
        "alone_is_the_same": sum(a.token_ids == b.token_ids for a, b in zip(alone, crowd, strict=True)),
        "tokens": sum(len(output.token_ids) for output in crowd),
        "mask_us": {
            "median": round(1e6 * statistics.median(costs), 1),
            "mean": round(1e6 * statistics.mean(costs), 1),
            "p99": round(1e6 * costs[int(0.99 * len(costs))], 1),
            "most": round(1e6 * costs[-1], 1),
        },
        "share_of_a_step": round(sum(costs) / wall_s, 3),
    }
    print(json.dumps(result))
    if result["valid"] != len(schemas) or result["alone_is_the_same"] != len(schemas):
        sys.exit(1)


def measure_masks() -> list[float]:
    """Record from now on the time of each mask, including the advance over the token before it; return the list."""
    seconds: list[float] = []
    advance, allowed = Matcher.advance, Matcher.allowed

    def timed_advance(self: Matcher, token_ids: Any) -> None:
        start = time.perf_counter()
        advance(self, token_ids)
        seconds.append(time.perf_counter() - start)

    def timed_allowed(self: Matcher) -> Any:
        start = time.perf_counter()
        mask = allowed(self)
        seconds[-1] += time.perf_counter() - start
        return mask

    Matcher.advance, Matcher.allowed = timed_advance, timed_allowed  # type: ignore[method-assign]
    return seconds


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Return True if an answer is JSON that conforms to its schema."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    main()
