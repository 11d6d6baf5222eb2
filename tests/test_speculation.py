"""Tokens and log probabilities with speculation are `==` to those without it, for all drafts and schedules."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import pytest
from alone_and_crowd import has_swapped, needs_kernels
from kernels_available import kv_precision, precision
from scripted_drafts import ScriptedProposer, let_propose, verify_all

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.assets import BUILT_IN_DRAFT, built_in_model_path
from octavo.build import build_engine
from octavo.config import EngineConfig, SpeculativeConfig
from octavo.data.events import DraftsVerified, KVLoadEnded
from octavo.journal.replay import replay
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.sampling_params import StructuredOutputsParams

pytestmark = needs_kernels
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [  # after most other texts the built-in model repeats itself, and every draft is accepted
    "Once upon a time there was a little fox who",
    CHAT.format("Repeat after me: one two three one two three one two"),
    CHAT.format("What is 12 + 30?"),
    CHAT.format("The old lighthouse " * 12),
    "What",
]
WAYS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.0, "logprobs": None},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 8, "logprobs": None},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"temperature": 1.1, "typical_p": 0.8},
    {"temperature": 1.0, "logit_bias": {67: 4.0, 68: 3.0}, "seed": 9, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(60, 120)), "seed": 1},
    {"temperature": 0.9, "stop": ["e", "o "], "min_tokens": 4, "seed": 2},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex=r"([a-f]{2,3} ){3,9}"), "seed": 3},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(json={"type": "array", "maxItems": 9})},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(choice=["yes and no", "yes"]), "seed": 4},
    {"temperature": 1.0, "n": 3, "seed": 5},
    {"temperature": 0.8, "n": 2, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "seed": 6},
]
NUM_TOKENS = 28


@dataclass(frozen=True)
class Run:
    """How requests are computed, and with which drafts.

    method: of the proposer, see `CONFIGS`; "uncut" ignores grammars.
    """

    name: str
    method: str = "scripted"
    num_drafts: int = 4
    share_right: float = 0.5
    max_num_seqs: int = 32
    budget: int = 512
    threshold: int = 0
    num_blocks: int | None = None
    block_size: int = 16
    swap_space_bytes: int = 0
    rounds: int = 1
    batching: str = "mixed"
    has_policy: bool = False  # otherwise every draft is verified


CONFIGS: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": BUILT_IN_DRAFT},
    "quantized": {"method": "quantized"},
    "suffix_and_model": {"method": "suffix", "model": BUILT_IN_DRAFT},
    "itself": {"method": "draft_model", "model": str(built_in_model_path())},  # its drafts are right
}
FEW_BLOCKS = {"block_size": 4, "num_blocks": 80, "max_num_seqs": 12}
UNCUT = Run("uncut", "uncut", num_drafts=3, share_right=0.7)
RUNS = [
    Run("no_drafts", num_drafts=0),
    Run("all_right", num_drafts=8, share_right=1.0),
    Run("all_wrong", num_drafts=2, share_right=0.0),
    Run("half", num_drafts=5),
    Run("policy", num_drafts=8, has_policy=True),
    Run("one_at_a_time", num_drafts=1, max_num_seqs=1),
    Run("chunks", threshold=5, budget=40, num_drafts=6, share_right=0.8),
    Run("warm", rounds=2, num_drafts=3, share_right=0.9),
    Run("preempted", **FEW_BLOCKS, share_right=0.8),
    Run("swapped", **FEW_BLOCKS, swap_space_bytes=64 << 20, share_right=0.8),
    Run("ngram", "ngram"),
    Run("ngram_preempted", "ngram", **FEW_BLOCKS, num_drafts=8),
    Run("suffix_warm", "suffix", num_drafts=8, rounds=2),
    Run("suffix_preempted", "suffix", **FEW_BLOCKS, num_drafts=8),
]
MODEL_RUNS = [
    Run("plain", num_drafts=8),
    Run("one_at_a_time", num_drafts=5, max_num_seqs=1),
    Run("policy", num_drafts=6, has_policy=True),
    Run("chunks", threshold=5, budget=40, num_drafts=6),
    Run("warm", rounds=2, num_drafts=3),
    Run("preempted", **FEW_BLOCKS),
    Run("swapped", **FEW_BLOCKS, swap_space_bytes=64 << 20, num_drafts=7),
    Run("prefill_first", **FEW_BLOCKS, threshold=7, budget=48, batching="prefill_first", num_drafts=1),
]
MODEL_METHODS = ["itself", "draft_model", "quantized", "suffix_and_model"]
FORMATS = ["bfloat16", "int8", "int4", "bfloat16 with int8 KV"]


def make_requests(count: int) -> list[tuple[str, SamplingParams]]:
    """Return requests with every combination of options and texts."""
    ways = itertools.cycle(WAYS)
    defaults = {"max_tokens": NUM_TOKENS, "logprobs": 2}
    return [
        (TEXTS[i % len(TEXTS)], SamplingParams(**{**defaults, "ignore_eos": "structured_outputs" not in way, **way}))
        for i, way in zip(range(count), ways, strict=False)
    ]


def make_engine(
    number_format: str, run: Run, speculative: SpeculativeConfig | None = None, sink=None, kv_store=None
) -> LLMEngine:
    engine = LLMEngine(
        ModelConfig(**precision(number_format)),
        cache_config=CacheConfig(
            block_size=run.block_size,
            num_gpu_blocks=run.num_blocks or 8192 // run.block_size,
            swap_space_bytes=run.swap_space_bytes,
            **kv_precision(number_format),
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=run.max_num_seqs,
            max_num_batched_tokens=run.budget,
            long_prefill_token_threshold=run.threshold,
            preemption="swap" if run.swap_space_bytes else "auto",
            batching=run.batching,
            mixed_step_ms=0.0,
            min_tokens_to_cache=4,
        ),
        device_config=DeviceConfig(device="cpu", kernels="cpu"),
        speculative_config=speculative or SpeculativeConfig(method="none"),
        kv_store=kv_store,
        sink=sink,
    )
    if not run.has_policy:
        verify_all(engine)
    return engine


def answers(engine: LLMEngine, requests) -> list[list[tuple]]:
    """Return all outputs of each request. They arrive three at a time, between steps."""
    told, pending = {}, list(enumerate(requests))
    while pending or engine.has_unfinished_requests():
        for index, (prompt, params) in pending[:3]:
            engine.add_request(str(index), prompt, params)
        del pending[:3]
        for output in engine.step():
            if output.finished:
                assert output.error is None
                told[int(output.request_id)] = output
    return [
        [
            (each.token_ids, each.logprobs, each.text, each.finish_reason, each.stop_reason, told[i].prompt_logprobs)
            for each in told[i].outputs
        ]
        for i in range(len(requests))
    ]


@functools.cache
def expected(number_format: str, count: int) -> tuple[list[list[tuple]], dict[str, list[int]]]:
    """Return the outputs of each request alone without speculation, and all tokens of each output."""
    engine = make_engine(number_format, Run("alone", max_num_seqs=1))
    requests = make_requests(count)
    told = answers(engine, requests)
    prompts = [engine.input_processor.tokenizer.encode(prompt) for prompt, _ in requests]
    sequences = {}
    for i, outputs in enumerate(told):
        for j, output in enumerate(outputs):
            sequences[str(i) if len(outputs) == 1 else f"{i}#{j}"] = prompts[i] + output[0]
    return told, sequences


class Verified:
    """Counts drafts, accepted drafts, and tokens from a store."""

    def __init__(self) -> None:
        self.num_drafted = self.num_accepted = self.num_loaded = 0

    def emit(self, event) -> None:
        if isinstance(event, KVLoadEnded):
            self.num_loaded += event.num_tokens
        if isinstance(event, DraftsVerified):
            self.num_drafted += event.num_drafted
            self.num_accepted += event.num_accepted


def check(run: Run, number_format: str, count: int, kv_store=None) -> int:
    """Compute the requests with drafts and compare; check that the events happened that the run is for.

    Return the number of tokens from a store.
    """
    told, sequences = expected(number_format, count)
    verified, config = Verified(), None
    if run.method in CONFIGS:
        rounding = {"quantization": precision(number_format).get("quantization")} if run.method == "itself" else {}
        config = SpeculativeConfig(**CONFIGS[run.method], num_speculative_tokens=run.num_drafts, **rounding)
    engine = make_engine(number_format, run, config, verified, kv_store)
    if config is None:
        proposer = ScriptedProposer(sequences, run.num_drafts, run.share_right)
        let_propose(engine, proposer, cut=run.method != "uncut")
    requests = make_requests(count)
    for number in range(run.rounds):
        # A request without a seed gets one from its arrival number, which a second round does not repeat.
        for index, got in enumerate(answers(engine, requests)):
            if not number or requests[index][1].seed is not None or requests[index][1].is_greedy:
                assert got == told[index], f"request {index} differs in {run.name}"
    stats = engine.core.metrics.stats
    assert engine.core.scheduler.kv_cache_manager.pool.usage == 0.0
    if run.method == "suffix":
        engine.step()  # reports the last end
        kept = engine.core.executor.worker.proposer._answers
        assert len(kept) == run.rounds * sum(params.n for _, params in requests), "each once"
    assert (stats.num_preemptions > 0) == (run.num_blocks is not None)
    assert has_swapped(engine) == (run.swap_space_bytes > 0)
    assert stats.prefix_cache_hits > 0.4 * stats.prefix_cache_queries or run.rounds == 1
    while engine.core.has_work():  # until all saves have ended
        engine.step()
    if not run.num_drafts:
        assert verified.num_drafted == 0
        return verified.num_loaded
    share = verified.num_accepted / verified.num_drafted
    if run.method == "itself":
        assert share == 1.0, "its keys and values are those of the target, wherever they come from"
    elif config is not None:
        assert 0.02 < share < 1
    else:
        assert {0.0: share == 0.0, 1.0: share > 0.95}.get(run.share_right, 0.02 < share < 0.95), share
    return verified.num_loaded


@pytest.mark.sweep(64)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_speculation_does_not_change_outputs(run):
    check(run, "bfloat16", 30)


def test_drafts_that_violate_grammar_do_not_change_outputs():
    check(UNCUT, "bfloat16", 30)


class WrongButAllowed(ScriptedProposer):
    """Proposes the other one of two tokens: a grammar of both allows each draft, and the model rejects it."""

    def guess(self, request_id: str, num_known: int) -> list[int]:
        drafts = self._sequences[request_id][num_known : num_known + self.num_speculative_tokens]
        return [sum(self.two) - each for each in drafts]


def test_rejected_drafts_are_rolled_back_in_grammar():
    """The grammar ends after 24 characters: an engine that counts rejected drafts reaches its end too early."""
    tokenizer = make_engine("bfloat16", Run("alone")).input_processor.tokenizer
    two = [tokenizer.encode(letter)[-1] for letter in "ab"]
    grammar = StructuredOutputsParams(regex="[ab]{24}")
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=20, allowed_token_ids=two, structured_outputs=grammar)
        for seed in range(3)
    ]
    requests = [("Once", each) for each in params]
    alone = answers(make_engine("bfloat16", Run("alone", max_num_seqs=1)), requests)
    sequences = {str(i): tokenizer.encode("Once") + outputs[0][0] for i, outputs in enumerate(alone)}
    assert {token for outputs in alone for token in outputs[0][0]} <= set(two)
    verified = Verified()
    engine = make_engine("bfloat16", Run("wrong"), sink=verified)
    proposer = WrongButAllowed(sequences, 4, 0.0)
    proposer.two = two
    let_propose(engine, proposer)
    assert answers(engine, requests) == alone
    assert (verified.num_accepted, verified.num_drafted > 100) == (0, True)


@pytest.mark.turn(8)
@pytest.mark.sweep(24)
@pytest.mark.parametrize("method", ["scripted", "ngram"])
@pytest.mark.parametrize("number_format", FORMATS[1:])
def test_speculation_does_not_change_outputs_in_any_dtype(number_format, method):
    check(Run("few", method, num_drafts=4, share_right=0.7, **FEW_BLOCKS), number_format, 18)


@pytest.mark.turn(8)
@pytest.mark.sweep(128)
@pytest.mark.parametrize("method", MODEL_METHODS)
@pytest.mark.parametrize("run", MODEL_RUNS, ids=lambda run: run.name)
def test_draft_model_does_not_change_outputs(run, method):
    check(replace(run, method=method), "bfloat16", 30)


@pytest.mark.turn(8)
@pytest.mark.sweep(112)
@pytest.mark.parametrize("method", MODEL_METHODS)
@pytest.mark.parametrize("number_format", ["float32", *FORMATS[1:]])
def test_draft_model_does_not_change_outputs_in_any_dtype(number_format, method):
    if method == "quantized" and number_format == "int4":
        pytest.skip("it is in int4 already")
    check(Run("few", method, num_drafts=4, **FEW_BLOCKS), number_format, 18)


@pytest.mark.sweep(32)
@pytest.mark.parametrize("method", MODEL_METHODS)
@pytest.mark.parametrize("run", [MODEL_RUNS[0], MODEL_RUNS[5]], ids=lambda run: run.name)
def test_draft_model_does_not_change_outputs_after_kv_load(run, method):
    pool = GlobalKVPool(5000)
    for name in ("saves", "loads"):
        store = functools.partial(MemoryStore, pool, name)
        num_loaded = check(replace(run, method=method, block_size=4), "bfloat16", 15, store)
    assert num_loaded >= 30


def test_earlier_answers_are_drafted_only_for_their_cache_salt():
    """Repeated with the same salt it takes fewer steps; with another salt, drafts are those of an engine without
    history.
    """
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=8)
    engine, fresh = (make_engine("bfloat16", Run("salts"), config) for _ in range(2))
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    def ask(engine: LLMEngine, salt: str | None) -> tuple[list[int], list[list[int]]]:
        """Return the answer, and the drafts of each step."""
        engine.add_request("a", TEXTS[0], params, cache_salt=salt)
        drafts: list[list[int]] = []
        while True:
            outputs = engine.step()
            if outputs and outputs[0].finished:
                engine.step()
                return outputs[0].outputs[0].token_ids, drafts
            drafts += [list(request.spec_token_ids) for request in engine.core.scheduler.running]

    answer, alone = ask(fresh, None)
    assert ask(engine, "alice") == (answer, alone)
    assert ask(engine, "bob") == (answer, alone)
    assert ask(engine, None) == (answer, alone)
    for salt in ("alice", "bob", None):
        again, drafts = ask(engine, salt)
        assert again == answer
        assert len(drafts) <= len(alone) / 2


def test_recorded_run_with_drafts_replays_without_mismatch(tmp_path):
    path = tmp_path / "run.journal"
    config = EngineConfig(
        cache=CacheConfig(num_gpu_blocks=40), speculative=SpeculativeConfig(method="ngram"), record=path
    )
    engine = build_engine(config)
    engine.generate_batch(TEXTS, [SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)] * len(TEXTS))
    engine.core.scheduler.close()
    result = replay(path)
    assert result.mismatches == []
    verified = [event for event in result.log.events if isinstance(event, DraftsVerified)]
    assert sum(event.num_drafted for event in verified) > 0  # their number depends on step times


@pytest.mark.slow
@pytest.mark.parametrize("number_format", FORMATS[1:])
@pytest.mark.parametrize("run", [*RUNS, UNCUT], ids=lambda run: run.name)
def test_every_speculation_run_is_exact_in_every_dtype(run, number_format):
    check(run, number_format, 30)


@pytest.mark.slow
@pytest.mark.parametrize("max_num_seqs", [1, 4, 32])
@pytest.mark.parametrize("share_right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_drafts", range(9))
def test_any_number_of_drafts_does_not_change_outputs(num_drafts, share_right, max_num_seqs):
    run = Run("wide", num_drafts=num_drafts, share_right=share_right, max_num_seqs=max_num_seqs)
    check(run, "bfloat16", 45)


@pytest.mark.slow
@pytest.mark.parametrize("max_num_seqs", [1, 4, 32])
@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize("method", MODEL_METHODS)
def test_any_number_of_model_drafts_does_not_change_outputs(method, num_drafts, max_num_seqs):
    check(Run("wide", method, num_drafts=num_drafts, max_num_seqs=max_num_seqs), "bfloat16", 45)


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@pytest.mark.parametrize("share_right", [0.5, 1.0])
@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_drafts_with_short_memory_do_not_change_outputs(num_drafts, share_right, batching):
    for swap_space_bytes in (0, 64 << 20):
        run = Run(
            "short",
            "uncut",
            num_drafts,
            share_right,
            **FEW_BLOCKS,
            swap_space_bytes=swap_space_bytes,
            threshold=7,
            budget=48,
            batching=batching,
        )
        check(run, "bfloat16", 45)
