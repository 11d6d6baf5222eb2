"""The public facade with a tiny random checkpoint: a script written for vLLM's offline API runs."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shutil
import threading
from pathlib import Path

import pytest
from kernels_available import COMPILED
from kv_event_subscriber import AllBlocksCleared, Contents, Subscriber
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import octavo.llm
from octavo import (
    LLM,
    AsyncLLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    KVTransferConfig,
    LLMEngine,
    ModelConfig,
    ModelError,
    RequestError,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
)
from octavo.compatibility import ACCEPTED_ARGUMENTS
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.sampling_params import RequestOutputKind

README = Path(__file__).parents[1] / "README.md"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
GENERATION = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": [1, 2]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = write_checkpoint(
        tmp_path_factory.mktemp("llm") / "model", tiny_config("Qwen2ForCausalLM", max_position_embeddings=256), std=0.1
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {token: index + 1 for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(
        model=str(checkpoint), dtype="float32", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64,
        block_size=16, enable_prefix_caching=True, seed=3,
    )  # fmt: skip


def test_generate_returns_outputs_in_prompt_order(llm):
    prompts = ["one", {"prompt": "two"}, {"prompt_token_ids": [5, 6, 7]}]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["one", "two", None]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5, 5]
    assert outputs[2].prompt_token_ids == [5, 6, 7]
    single = llm.generate("one", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert single[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


@pytest.mark.turn(8)
def test_async_llm_gives_same_tokens_as_llm(llm, checkpoint):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    config = EngineConfig(model=ModelConfig(model=str(checkpoint), dtype="float32", max_model_len=128))

    async def last(engine, prompt):
        return [output async for output in engine.generate(prompt, sampling_params=params, request_id=prompt)][-1]

    async def main():
        async with await AsyncLLM.launch(config) as engine:
            outputs = await asyncio.gather(*(last(engine, prompt) for prompt in ("one", "two")))
        assert engine.is_dead
        return outputs

    outputs = asyncio.run(main())
    expected = llm.generate(["one", "two"], params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]


def test_failed_async_llm_launch_raises_model_error(tmp_path):
    with pytest.raises(ModelError, match=str(tmp_path)):
        asyncio.run(AsyncLLM.launch(EngineConfig(model=ModelConfig(model=str(tmp_path)))))


def test_cancelled_async_llm_launch_shuts_engine_down(monkeypatch):
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Engine:
        shutdown = ended.set

    def launch(_config):
        begun.set()
        assert goes_on.wait(30)
        return Engine

    async def main():
        task = asyncio.create_task(AsyncLLM.launch())
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()
        assert await asyncio.to_thread(ended.wait, 30)

    monkeypatch.setattr(octavo.llm, "launch_engine", launch)
    asyncio.run(main())


@pytest.mark.turn(8)
def test_readme_async_snippet_runs(tmp_path, capsys):
    (snippet,) = (
        text
        for text in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
        if "AsyncLLM" in text
    )
    (tmp_path / "snippet.py").write_text(snippet, encoding="utf-8")
    runpy.run_path(str(tmp_path / "snippet.py"), run_name="__main__")
    assert len(capsys.readouterr().out) > len("Once upon a time")


def test_sampling_params_list_applies_to_each_prompt(llm):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 4)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4]
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a", "b", "c"], params, use_tqdm=False)


def test_generation_config_sets_sampling_defaults_and_eos(llm, checkpoint):
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.7, 20, 0.8, 16)
    assert llm.llm_engine.input_processor.model_info.eos_token_ids == {0, 1, 2}
    plain = LLM(model=str(checkpoint), generation_config="vllm", max_model_len=64)
    assert plain.get_default_sampling_params() == SamplingParams()


def test_engine_uses_resolved_scheduler_config(llm, checkpoint):
    config = llm.llm_engine.core.scheduler.config
    assert (config.max_num_mixed_prefill_tokens, config.mixed_step_ms) == (0, 0.0)
    assert config.attention_cost_tokens > 0
    read_along = LLM(model=str(checkpoint), max_model_len=64, mixed_step_ms=None)
    scheduler = read_along.llm_engine.core.scheduler
    assert scheduler.config.mixed_step_ms == 100.0
    assert scheduler.batching.prefill_limit == 128  # of 1024


def test_chat_renders_template_of_checkpoint(llm):
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False)
    assert one.prompt == "<user>hi<a>"
    many = llm.chat([messages, messages], SamplingParams(max_tokens=2), use_tqdm=False)
    assert [output.prompt for output in many] == ["<user>hi<a>"] * 2
    told = [{"role": "developer", "content": "be brief"}, *messages]  # as the server receives it
    (other,) = llm.chat(told, SamplingParams(max_tokens=2), use_tqdm=False)
    assert other.prompt == "<system>be brief<user>hi<a>"
    (whole,) = llm.chat(messages, use_tqdm=False)
    completion = whole.outputs[0]
    assert completion.finish_reason == "stop" or len(whole.prompt_token_ids) + len(completion.token_ids) == 128


def test_equal_seed_repeats_run_and_equal_prompts_differ(checkpoint):
    def run(seed: int) -> list[list[int]]:
        llm = LLM(model=str(checkpoint), seed=seed, max_model_len=64)
        outputs = llm.generate(["x"] * 4, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    first = run(0)
    assert first == run(0)
    assert first != run(1)
    assert len({tuple(tokens) for tokens in first}) == 4


def test_ineffective_vllm_arguments_warn_and_unknown_ones_are_refused(checkpoint):
    with pytest.warns(UserWarning, match="gpu_memory_utilization, pipeline_parallel_size"):
        LLM(model=str(checkpoint), max_model_len=64, gpu_memory_utilization=0.5, pipeline_parallel_size=1)
    for name, accepted in ACCEPTED_ARGUMENTS.items():
        if accepted.values is not None:
            with pytest.raises(ConfigError, match=name):
                LLM(model=str(checkpoint), **{name: "surprise"})
    with pytest.raises(ConfigError, match="no_such_argument"):
        LLM(model=str(checkpoint), no_such_argument=1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": "/no/such/path"}, ModelError, "/no/such/path"),
        ({"dtype": "float8"}, ConfigError, "dtype"),
        ({"quantization": "awq"}, ConfigError, "quantization must be one of int8, int4, int4_all"),
        ({"quantization": "int8", "group_size": 64}, ConfigError, "needs quantization int4 or int4_all, not int8"),
        ({"quantization": "int4_all", "group_size": 48}, ConfigError, "multiple of 32"),
        ({"seed": "x"}, ConfigError, "seed"),
        ({"max_model_len": 0}, ConfigError, "max_model_len"),
        ({"max_model_len": 100_000}, ConfigError, "max_model_len"),
        ({"block_size": 0}, ConfigError, "block_size"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, ConfigError, "max_num_batched_tokens"),
        ({"scheduling_policy": "random"}, ConfigError, "policy"),
        ({"device": "tpu"}, ConfigError, "device"),
        ({"kernels": "magic"}, ConfigError, "kernels"),
        ({"load_format": "pt"}, ConfigError, "load_format"),
        ({"kv_cache_memory_bytes": 10}, ConfigError, "KV block"),
        ({"num_gpu_blocks_override": 10**12}, ConfigError, "KV cache"),
        ({"chat_template": "no-such-file.jinja"}, ConfigError, "chat_template"),
        (
            {"model": "/no/such/path", "speculative_config": {"method": "x"}},
            ConfigError,
            "one of auto, none, ngram, suffix, draft_model, quantized, got 'x'",
        ),
        (
            {"model": "/no/such/path", "speculative_config": {"method": "suffix", "prompt_lookup_max": 3}},
            ConfigError,
            "prompt_lookup_max is a field of method ngram",
        ),
        (
            {"model": "/no/such/path", "kv_transfer_config": {"disk": "x"}},
            ConfigError,
            "a field of kv_transfer_config must be one of",
        ),
        ({"model": "/no/such/path", "kv_transfer_config": "disk"}, ConfigError, "a KVTransferConfig or a mapping"),
        (
            {"model": "/no/such/path", "kv_transfer_config": KVTransferConfig(), "kv_disk_dir": "x"},
            ConfigError,
            "kv_transfer_config and kv_disk_dir exclude each other",
        ),
        (
            {"model": "/no/such/path", "kv_mooncake": "nowhere"},
            ConfigError,
            "mooncake_master, HOST:PORT, got 'nowhere'",
        ),
        (
            {"model": "/no/such/path", "max_batch_total_tokens": 100},
            ConfigError,
            "max_batch_total_tokens = 100 has no effect with admission = optimistic",
        ),
    ],
)
def test_invalid_llm_arguments_raise_specific_error(checkpoint, arguments, error, words):
    with pytest.raises(error) as caught:
        LLM(**{"model": str(checkpoint), "max_model_len": 64, **arguments})
    assert words in str(caught.value)


@pytest.mark.skipif(not COMPILED, reason="plain torch has fp8")
def test_compiled_cpu_kernels_refuse_fp8(checkpoint):
    with pytest.raises(ConfigError, match=r"kernels cpu do not support .* fp8: choose kv_cache_dtype auto or int8,"):
        LLM(model=str(checkpoint), kv_cache_dtype="fp8", kernels="cpu")
    with pytest.raises(ConfigError, match="quantization fp8 needs kernels triton or reference"):
        LLM(model=str(checkpoint), quantization="fp8", kernels="cpu")


def test_reference_kernels_support_fp8_kv_cache(checkpoint):
    made = {}
    for name in ("int8", "fp8_e4m3"):
        llm = LLM(model=str(checkpoint), kv_cache_dtype=name, kernels="reference", max_model_len=64)
        made[name] = llm.llm_engine.capacity
        answer = llm.generate("hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(answer[0].outputs[0].token_ids) == 3
    assert [each.kv_cache_dtype for each in made.values()] == ["int8", "float8_e4m3fn"]
    assert made["int8"].kv_block_bytes == made["fp8_e4m3"].kv_block_bytes


def test_invalid_requests_do_not_stop_engine(llm):
    for prompt, params in (
        ("", None),
        ({"prompt_token_ids": []}, None),
        ({"prompt_token_ids": [512]}, None),
        ("x" * 128, None),
        ({}, None),
        (["a", ""], None),
    ):
        with pytest.raises(RequestError):
            llm.generate(prompt, params, use_tqdm=False)
    assert len(llm.generate("fine", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)) == 1
    assert not llm.llm_engine.core.scheduler.requests


def test_prompt_larger_than_kv_cache_is_refused(checkpoint):
    llm = LLM(model=str(checkpoint), num_gpu_blocks_override=2, block_size=16, max_model_len=128)
    with pytest.raises(RequestError, match="cannot fit"):
        llm.generate({"prompt_token_ids": [5] * 32}, use_tqdm=False)
    params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0)
    (output,) = llm.generate({"prompt_token_ids": [5] * 31}, params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 2


def test_kv_transfer_config_accepts_object_or_mapping(checkpoint, tmp_path):
    given = {"disk_dir": str(tmp_path / "kv"), "disk_bytes": 1 << 28, "num_threads": 1}
    expected = KVTransferConfig(disk_dir=tmp_path / "kv", disk_bytes=1 << 28, num_threads=1)
    assert KVTransferConfig.parse(given) == KVTransferConfig.parse(expected) == expected
    own = {"disk_dir": tmp_path / "kv", "disk_bytes": 1 << 28, "mooncake": None}
    assert KVTransferConfig.parse(None, **own) == KVTransferConfig(disk_dir=tmp_path / "kv", disk_bytes=1 << 28)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answers = []
    for config in (given, expected):
        llm = LLM(str(checkpoint), kv_transfer_config=config, speculative_config=SpeculativeConfig(method="none"))
        assert llm.llm_engine.capacity.speculative_method == "none"
        answers.append(llm.generate("hello " * 20, params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.llm_engine.shutdown()
    assert answers[0] == answers[1]
    assert (tmp_path / "kv").is_dir()


def test_llm_publishes_kv_events(checkpoint, tmp_path):
    ends = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
    config = {"enable_kv_cache_events": True, "endpoint": ends[0], "replay_endpoint": ends[1]}
    llm = LLM(
        str(checkpoint), skip_tokenizer_init=True, block_size=4, num_gpu_blocks_override=8, kv_events_config=config
    )
    engine, params = llm.llm_engine, SamplingParams(max_tokens=1, detokenize=False)
    figures = engine.core.kv_events.figures
    try:
        with Subscriber(*ends) as subscriber:
            llm.generate([{"prompt_token_ids": list(range(start, start + 13))} for start in range(5)], params)
            contents = Contents()
            for batch in subscriber.all_batches(figures.num_batches):
                contents.take(batch)
            assert contents.num_removed
            assert len(contents.blocks) == engine.core.scheduler.kv_cache_manager.pool.num_cached_blocks
            assert llm.reset_prefix_cache()
            assert subscriber.all_batches(figures.num_batches)[-1].events == [AllBlocksCleared()]
    finally:
        engine.shutdown()
    assert engine.core.kv_events._publisher._context.closed


def test_params_is_alias_of_sampling_params(checkpoint):
    engine = LLMEngine(ModelConfig(model=str(checkpoint)))
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    answers = [
        engine.generate("a", sampling_params=params),
        engine.generate("a", params=params),
        engine.generate("a", params),
        *engine.generate_batch(["a"], sampling_params=params).values(),
        *engine.generate_batch(["a"], params=[params]).values(),
        *engine.generate_batch(["a"], [params]).values(),
    ]
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    assert len(answers[0].outputs[0].token_ids) == 3
    for generate, prompt in ((engine.generate, "a"), (engine.generate_batch, ["a"])):
        with pytest.raises(RequestError, match="two names of one argument"):
            generate(prompt, params, params=params)


def test_llm_engine_runs_with_keyword_configs(checkpoint):
    engine = LLMEngine(
        model_config=ModelConfig(model=str(checkpoint)), scheduler_config=SchedulerConfig(max_num_seqs=4), device=None
    )
    batch = engine.generate_batch(["a", "b"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert sorted(batch) == ["0", "1"]
    engine.add_request("mine", "c", SamplingParams(max_tokens=3, ignore_eos=True))
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    assert 3 <= steps <= 4
    engine.abort_request("mine")


@pytest.mark.parametrize("device", [(), (None,), ("cpu",)])
def test_llm_engine_accepts_positional_configs(checkpoint, device):
    engine = LLMEngine(ModelConfig(model=str(checkpoint)), SchedulerConfig(max_num_seqs=3), *device)
    assert engine.core.scheduler.config.max_num_seqs == 3
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len(engine.generate("a", params).outputs[0].token_ids) == 3


def test_old_positional_config_order_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="configurations as keyword arguments"):
        LLMEngine(ModelConfig(model=str(checkpoint)), CacheConfig(), SchedulerConfig())  # type: ignore[arg-type]


def test_generate_batch_keeps_outputs_of_other_requests(checkpoint):
    engine = LLMEngine(
        model_config=ModelConfig(model=str(checkpoint)), scheduler_config=SchedulerConfig(max_num_seqs=4), device=None
    )
    short = SamplingParams(max_tokens=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("mine", "c", short)
    engine.generate_batch(["a", "b"], SamplingParams(max_tokens=8, ignore_eos=True))
    assert engine.has_unfinished_requests()
    mine = []
    while engine.has_unfinished_requests():
        mine += engine.step()
    assert {output.request_id for output in mine} == {"mine"}
    assert [output.finished for output in mine] == [False, False, True]
    assert sum(len(output.outputs[0].token_ids) for output in mine) == 3


def test_failed_generate_batch_aborts_its_requests(checkpoint):
    engine = LLMEngine(
        model_config=ModelConfig(model=str(checkpoint)), scheduler_config=SchedulerConfig(max_num_seqs=4), device=None
    )
    params = SamplingParams(max_tokens=3, ignore_eos=True)

    def fail(_output):
        raise ZeroDivisionError

    engine.add_request("mine", "c", params)
    with pytest.raises(RequestError):
        engine.generate_batch(["a", "b", {"prompt_token_ids": []}], params)
    with pytest.raises(ZeroDivisionError):
        engine.generate_batch(["a", "b"], params, on_output=fail)
    engine.generate_batch(["a"], params)
    told = []
    while engine.has_unfinished_requests():
        told += engine.step()
    assert {output.request_id for output in told} == {"mine"}
    assert [output.finished for output in told].count(True) == 1
    assert len(told[-1].outputs[0].token_ids) == 3
    assert not engine._given_up


def test_wrong_number_of_priorities_is_refused(checkpoint):
    llm = LLM(model=str(checkpoint), max_model_len=64)
    with pytest.raises(RequestError, match="2 prompts but 1 priorities"):
        llm.generate(["a", "b"], priority=[1], use_tqdm=False)


def test_eos_ids_outside_vocabulary_are_ignored_with_warning(checkpoint, tmp_path, caplog):
    directory = tmp_path / "model"
    shutil.copytree(checkpoint, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 600]}))
    llm = LLM(model=str(directory), max_model_len=64, seed=None)
    assert "600" in caplog.text
    params = SamplingParams(min_tokens=2, max_tokens=4)
    assert llm.generate("x", params)[0].outputs[0].finish_reason in {"stop", "length"}


def test_out_of_range_generation_config_raises_model_error(checkpoint, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(checkpoint, directory)
    (directory / "generation_config.json").write_text(json.dumps({"top_p": 7.0}))
    with pytest.raises(ModelError, match=r"generation_config\.json.*top_p"):
        LLM(model=str(directory), max_model_len=64)
    assert LLM(model=str(directory), max_model_len=64, generation_config="vllm").get_tokenizer().encode("a")


def test_skip_tokenizer_init_accepts_token_ids_only(checkpoint):
    llm = LLM(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=64)
    (output,) = llm.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate("text", use_tqdm=False)
