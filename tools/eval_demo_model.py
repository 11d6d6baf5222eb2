"""Examine octavo's built-in model on held-out questions: exact match per task, greedy decoding.

Training never sees these questions (see `demo_data`). An answer counts only if it equals the expected text exactly.
Stories, rhymes and small talk have no single right answer and are not counted. For questions with tools (see
`demo_tools`) the output also has the rates of right decisions to call, right names and right arguments.

With --quantization or --kv-cache-dtype int8 the same questions are asked with rounded weights, or keys and values. The
output then also has the mean KL divergence of the next token's distribution from that of the original model, over all
tokens of the held-out answers.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import demo_data
import demo_tools
from demo_tokenizer import render

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

EPILOG = """
examples:
  python tools/eval_demo_model.py                                    100 questions per task through octavo
  python tools/eval_demo_model.py --min-overall 0.90 --min-task 0.75 exit 1 when the model falls short
  python tools/eval_demo_model.py --backend transformers --show 3    compare, and print three mistakes per task
  python tools/eval_demo_model.py --quantization int4                what rounding the weights costs
"""
MAX_TOKENS = 192


@dataclass(frozen=True)
class Rounding:
    """What octavo rounds: the weights (as `--quantization` does, or None), and keys and values ("int8" or "auto")."""

    quantization: str | None = None
    group_size: int = 32
    kv_cache_dtype: str = "auto"


def answer_with_octavo(model: str, examples: list[demo_data.Example], rounding: Rounding = Rounding()) -> list[str]:
    """Return octavo's greedy answers."""
    from octavo import LLM, SamplingParams  # noqa: PLC0415  the backend not chosen need not be installed

    llm = LLM(model=model, **asdict(rounding))
    render_prompt = llm.llm_engine.input_processor.chat_prompt
    prompts = [render_prompt(example.prompt(), tools=example.tools) for example in examples]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    return [output.outputs[0].text for output in outputs]


def answer_with_transformers(model: str, examples: list[demo_data.Example], batch: int = 64) -> list[str]:
    """Return greedy answers of Hugging Face transformers, in left-padded batches of similar length."""
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    network: Any = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    render_prompt = functools.partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    texts = [render_prompt(example.prompt(), tools=example.tools) for example in examples]
    answers = [""] * len(texts)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([texts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False)
        ids = network.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        decoded = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in zip(chosen, decoded, strict=True):
            answers[index] = text
    return answers


def divergence(model: str, examples: list[demo_data.Example], rounding: Rounding) -> tuple[float, float]:
    """Return the mean KL divergence of the rounded from the plain model in nats per token, and their top-1 agreement.

    Both read every held-out conversation with its right answer; the tokens of the answer are counted.
    """
    from octavo.engine.tokenizer import Tokenizer  # noqa: PLC0415

    tokenizer = Tokenizer.from_directory(Path(model))
    rows, counted = [], []
    for example in examples:
        head = tokenizer.encode(render(example.prompt(), generation_prompt=True, tools=example.tools))
        rows.append([*head, *tokenizer.encode(example.answer + "<|im_end|>")])
        counted.append(len(rows[-1]) - len(head))
    plain, rounded = (logits_of(model, rows, counted, each) for each in (Rounding(), rounding))
    sums = [0.0, 0.0]
    for exact, other in zip(plain, rounded, strict=True):
        exact_log, other_log = exact.log_softmax(-1), other.log_softmax(-1)
        sums[0] += (exact_log.exp() * (exact_log - other_log)).sum().item()
        sums[1] += (exact.argmax(-1) == other.argmax(-1)).sum().item()
    return sums[0] / sum(counted), sums[1] / sum(counted)


def logits_of(model: str, rows: list[list[int]], counted: list[int], rounding: Rounding) -> list[Tensor]:
    """Return the float64 logits that predict the last `counted` tokens of each row."""
    import torch  # noqa: PLC0415

    from octavo.kernels import AttentionBatch, create_kernels  # noqa: PLC0415
    from octavo.models.loader import load_model  # noqa: PLC0415
    from octavo.models.registry import read_architecture  # noqa: PLC0415
    from octavo.models.weight_source import FolderWeights  # noqa: PLC0415
    from octavo.worker.kv_cache import PagedKVCache  # noqa: PLC0415

    device, size = torch.device("cpu"), max(map(len, rows))
    architecture = read_architecture(Path(model))
    network = load_model(
        FolderWeights(Path(model)),
        architecture,
        create_kernels(device),
        dtype=architecture.dtype,
        device=device,
        max_model_len=size,
        quantization=rounding.quantization,
        group_size=rounding.group_size,
    )
    cache = PagedKVCache(
        architecture.kv_layout,
        num_blocks=[1],
        block_size=size,
        dtype=network.dtype if rounding.kv_cache_dtype == "auto" else torch.int8,
        device=device,
    )
    logits = []
    for row, count in zip(rows, counted, strict=True):
        positions = torch.arange(len(row))
        batch = AttentionBatch(
            query_start=torch.tensor([0, len(row)], dtype=torch.int32),
            seq_lens=torch.tensor([len(row)], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            positions=positions,
            slot_mapping=positions,
            block_size=size,
        )
        hidden = network.forward(torch.tensor(row), batch, cache)
        logits.append(network.compute_logits(hidden[-count - 1 : -1].contiguous()).double())
    return logits


def backends() -> dict[str, Callable[[str, list[demo_data.Example]], list[str]]]:
    """Return the ways of answering questions, by name."""
    return {"octavo": answer_with_octavo, "transformers": answer_with_transformers}


def grade(examples: list[demo_data.Example], answers: list[str], show: int = 0) -> dict[str, float]:
    """Return the share of exact answers per task; print up to `show` mistakes of each."""
    right: dict[str, int] = {}
    asked: dict[str, int] = {}
    for example, answer in zip(examples, answers, strict=True):
        correct = answer.strip() == example.answer
        asked[example.task] = asked.get(example.task, 0) + 1
        right[example.task] = right.get(example.task, 0) + correct
        if not correct and asked[example.task] - right[example.task] <= show:
            print(f"{example.task}: {example.question!r}\n  expected {example.answer!r}\n  got      {answer!r}")
    return {task: right[task] / asked[task] for task in asked}


def grade_calls(examples: list[demo_data.Example], answers: list[str]) -> dict[str, float]:
    """Return the rate of right decisions to call and, if a call is needed, those of right names and whole calls."""
    asked = [
        (calls_in(example.answer), calls_in(answer))
        for example, answer in zip(examples, answers, strict=True)
        if example.tools and example.task != "result"
    ]
    due = [pair for pair in asked if pair[0]]
    return {
        "decision": sum(bool(expected) == bool(got) for expected, got in asked) / len(asked),
        "names": sum(names_of(expected) == names_of(got) for expected, got in due) / len(due),
        "arguments": sum(expected == got for expected, got in due) / len(due),
    }


def calls_in(answer: str) -> list[Any]:
    """Return the calls of an answer; None for a call that is not JSON."""
    calls: list[Any] = []
    for part in answer.split("<tool_call>")[1:]:
        try:
            calls.append(json.loads(part.partition("</tool_call>")[0]))
        except ValueError:
            calls.append(None)
    return calls


def names_of(calls: list[Any]) -> list[Any]:
    """Return the names in calls."""
    return [call.get("name") if isinstance(call, dict) else None for call in calls]


def examination(count: int, seed: int) -> list[demo_data.Example]:
    """Return held-out questions of every task, `count` of each."""
    found = [each for task in demo_data.CHECKABLE_TASKS for each in demo_data.questions(task, count, seed)]
    found += [each for task in demo_tools.TOOL_TASKS for each in demo_tools.questions(task, count, seed)]
    assert all(example.held_out for example in found)
    return found


def print_table(scores: dict[str, float], overall: float, count: int) -> None:
    """Print the accuracy of each task and of all."""
    for task, score in scores.items():
        print(f"{task:<14}{score:8.1%}")
    print(f"{'overall':<14}{overall:8.1%}   ({count} held-out questions per task)")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    packaged = Path(__file__).resolve().parent.parent / "src" / "octavo" / "assets" / "demo"
    parser.add_argument("--model", default=str(packaged), help="model folder (default: the packaged model)")
    parser.add_argument("--questions", type=int, default=100, help="held-out questions per task (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="which held-out questions (default 0)")
    parser.add_argument("--backend", choices=sorted(backends()), default="octavo", help="who answers (default octavo)")
    parser.add_argument(
        "--quantization", choices=("int8", "int4", "int4_all"), help="how octavo rounds the weights (default: not)"
    )
    parser.add_argument("--group-size", type=int, default=32, help="features that share a scale of int4 (default 32)")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "int8"), default="auto", help="how octavo keeps keys and values (auto)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--show", type=int, default=0, help="print up to this many mistakes per task")
    parser.add_argument("--min-overall", type=float, default=0.0, help="exit 1 below this overall share, as 0.90")
    parser.add_argument("--min-task", type=float, default=0.0, help="exit 1 when any task is below this share")
    parser.add_argument("--min-calls", type=float, default=0.0, help="exit 1 when calls are right less often than this")
    args = parser.parse_args()
    args.rounding = Rounding(args.quantization, args.group_size, args.kv_cache_dtype)
    if args.rounding != Rounding() and args.backend != "octavo":
        parser.error("--quantization and --kv-cache-dtype are octavo's")
    return args


def main() -> int:
    """Ask, grade, print; the exit status says whether the limits were met."""
    args = parse_arguments()
    examples = examination(args.questions, args.seed)
    if args.rounding != Rounding():
        answers = answer_with_octavo(args.model, examples, args.rounding)
    else:
        answers = backends()[args.backend](args.model, examples)
    scores = grade(examples, answers, args.show)
    overall = sum(scores.values()) / len(scores)
    report: dict[str, Any] = {"overall": overall, "tasks": scores, "questions": args.questions, "backend": args.backend}
    report["calls"] = calls = grade_calls(examples, answers)
    if args.rounding != Rounding():
        report["kl_nats"], report["top_agreement"] = divergence(args.model, examples, args.rounding)
    if args.json:
        print(json.dumps(report | asdict(args.rounding)))
    else:
        print_table(scores, overall, args.questions)
        for what, share in calls.items():
            print(f"{what:<14}{share:8.1%}   of calls of tools right")
        if args.rounding != Rounding():
            print(f"KL divergence {report['kl_nats']:.5f} nats a token; the likeliest token is the same for ", end="")
            print(f"{report['top_agreement']:.2%} of the answers' tokens")
    short = overall < args.min_overall or min(scores.values()) < args.min_task
    short = short or min(calls.values()) < args.min_calls
    if short:
        print("the model falls short of the limits asked for", file=sys.stderr)
    return int(short)


if __name__ == "__main__":
    sys.exit(main())
