"""The public classes, with vLLM's signatures."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from octavo.build import build_engine
from octavo.compatibility import accept_arguments
from octavo.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_GROUP_SIZE,
    DEFAULT_PACKED_CACHE_BYTES,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
)
from octavo.config import scheduling_policy as parse_policy
from octavo.engine.async_llm import AsyncEngine
from octavo.engine.embedding import embedding
from octavo.engine.llm_engine import Engine
from octavo.errors import ConfigError, RequestError
from octavo.outputs import EmbeddingOutput, EmbeddingRequestOutput
from octavo.runtime.progress import LoadingProgress, RequestProgress
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.startup.launch import launch_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo.data.events import EventSink
    from octavo.engine.input_processor import Prompt
    from octavo.engine.tokenizer import Tokenizer
    from octavo.kv_transfer import StoreFactory
    from octavo.outputs import RequestOutput

    Params = SamplingParams | Sequence[SamplingParams] | None


class LLMEngine(Engine):
    """An engine built from configurations. The caller runs the steps.

    device: See `DeviceConfig`. sink: Receives the events (`octavo.data.events`). kv_store, progress: See
    `octavo.build`. Raises `ConfigError` and `ModelError`.
    """

    def __init__(
        self,
        model_config: ModelConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        device: str | None = None,
        *,
        cache_config: CacheConfig | None = None,
        device_config: DeviceConfig | None = None,
        speculative_config: SpeculativeConfig | None = None,
        kv_transfer_config: KVTransferConfig | None = None,
        kv_events_config: KVEventsConfig | None = None,
        kv_store: StoreFactory | None = None,
        sink: EventSink | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if isinstance(scheduler_config, CacheConfig):
            raise ConfigError(
                "LLMEngine takes configurations as keyword arguments: LLMEngine(model_config, cache_config=...)"
            )
        config = EngineConfig(
            model=model_config or ModelConfig(),
            cache=cache_config or CacheConfig(),
            scheduler=scheduler_config or SchedulerConfig(),
            device=device_config or DeviceConfig(device=device),
            speculative=speculative_config or SpeculativeConfig(),
            kv_transfer=kv_transfer_config or KVTransferConfig(),
            kv_events=kv_events_config or KVEventsConfig(),
        )
        built = build_engine(config, sink=sink, progress=progress, kv_store=kv_store)
        super().__init__(built.client, built.input_processor, built.output_processor, built.clock)


class AsyncLLM(AsyncEngine):
    """Streams answers to many concurrent requests on an event loop. The engine runs in a separate process.

        async with await AsyncLLM.launch(EngineConfig(model=ModelConfig(model="Qwen/Qwen3-0.6B"))) as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32), "first"):
                print(output.outputs[0].text)

    If the engine's process dies, its requests end with `EngineRestartingError`, and the process is restarted.
    """

    @classmethod
    async def launch(cls, config: EngineConfig | None = None, *, max_unread_outputs: int | None = None) -> Self:
        """Start an engine, and return once it has loaded its model. Needs the packages of octavo[server].

        max_unread_outputs: See `AsyncEngine`. Raises `ConfigError` and `ModelError`.
        """
        loading = asyncio.get_running_loop().run_in_executor(None, launch_engine, config or EngineConfig())
        try:
            engine = await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_shut_down)
            raise
        return cls(engine, max_unread_outputs=max_unread_outputs)

    async def __aenter__(self) -> Self:
        """Return this engine."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Shut down on a thread. Open streams end with `EngineDeadError`."""
        await asyncio.to_thread(self.shutdown)


def _shut_down(loading: asyncio.Future[Engine]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        threading.Thread(target=loading.result().shutdown, name="octavo-shutdown").start()


class LLM:
    """Answers batches of prompts in this process. Arguments have vLLM's names. All except `model` are keywords.

        llm = LLM("Qwen/Qwen2.5-0.5B-Instruct")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))
        print(outputs[0].outputs[0].text)

    The model
      model: directory in Hugging Face layout, GGUF file, hub id, or None for the built-in model.
      tokenizer: directory or hub id of a tokenizer.
      skip_tokenizer_init: True to accept and return only token ids.
      dtype: type of weights, "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
      quantization: "int8", "int4", "int4_all" or "fp8". Weights are rounded at load.
      group_size: input features per scale in int4.
      packed_cache_bytes: disk space for packed weights, which later starts read.
      max_model_len: maximum tokens of prompt and answer, by default the checkpoint's.
      load_format: "auto", "safetensors", or "dummy" for random weights.
      generation_config: source of sampling defaults, "auto" (the checkpoint) or "vllm".
      chat_template: Jinja template, as text or a file. seed: base for the seeds of requests without a seed.

    Steps
      max_num_seqs: maximum sequences in a step, by default 64, on a GPU 256.
      max_num_batched_tokens: maximum tokens in a step, by default 1,024, on a GPU 8,192.
      enable_chunked_prefill: True to compute long prompts in chunks.
      long_prefill_token_threshold: maximum tokens of one prompt in a step, or 0 for no limit.
      scheduling_policy: "fcfs", "priority", "deadline" or "fair".

    The KV cache
      block_size: tokens in a block. enable_prefix_caching: True to compute a shared prefix once.
      kv_cache_memory_bytes: size in bytes, by default half of the free memory, at most 4 GiB.
      num_gpu_blocks_override: size in blocks. kv_cache_dtype: "auto", "int8" or "fp8".
      kv_disk_dir: directory of a store, which processes may share. kv_disk_bytes: its maximum size.
      kv_mooncake: address of a Mooncake master.
      kv_transfer_config: a `KVTransferConfig` or a mapping, instead of the three options above.
      kv_events_config: a `KVEventsConfig` or a mapping, to publish the prefix cache's contents. Needs octavo[server].

    Speculation and the device
      speculative_config: a `SpeculativeConfig`, or a mapping such as {"method": "none"}.
      device: "cpu" or "cuda", by default CUDA if present. kernels: "auto", "cpu", "triton", "reference", ...
      isa: instruction set of the CPU kernels, or "auto" for the best. num_threads: by default one per core.
      enforce_eager: True for no CUDA graphs.

    Further arguments: fields of `SchedulerConfig`, `CacheConfig` and `DeviceConfig` (mixed_step_ms is 0 by default),
    and vLLM's arguments in `octavo.compatibility`.

    Raises `ConfigError` and `ModelError`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        quantization: str | None = None,
        group_size: int = DEFAULT_GROUP_SIZE,
        packed_cache_bytes: int = DEFAULT_PACKED_CACHE_BYTES,
        seed: int | None = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = SchedulingPolicy.FCFS,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_dtype: str = "auto",
        load_format: str = "auto",
        generation_config: str = "auto",
        chat_template: str | None = None,
        device: str | None = None,
        kernels: str = "auto",
        isa: str = "auto",
        num_threads: int | None = None,
        enforce_eager: bool = False,
        kv_disk_dir: str | None = None,
        kv_disk_bytes: int | None = None,
        kv_mooncake: str | None = None,
        kv_transfer_config: KVTransferConfig | Mapping[str, Any] | None = None,
        kv_events_config: KVEventsConfig | Mapping[str, Any] | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        scheduler_options = {"is_offline": True, "mixed_step_ms": 0.0, **_take_fields(others, SchedulerConfig)}
        cache_options = _take_fields(others, CacheConfig)
        device_options = _take_fields(others, DeviceConfig)
        accept_arguments(others)
        with LoadingProgress() as progress:
            self.llm_engine = LLMEngine(
                ModelConfig(
                    model=model,
                    tokenizer=tokenizer,
                    skip_tokenizer_init=skip_tokenizer_init,
                    dtype=dtype,
                    quantization=quantization,
                    group_size=group_size,
                    packed_cache_bytes=packed_cache_bytes,
                    seed=seed or 0,
                    max_model_len=max_model_len,
                    load_format=load_format,
                    generation_config=generation_config,
                    chat_template=chat_template,
                ),
                SchedulerConfig(
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    policy=parse_policy(scheduling_policy),
                    enable_chunked_prefill=enable_chunked_prefill,
                    long_prefill_token_threshold=long_prefill_token_threshold,
                    **scheduler_options,
                ),
                cache_config=CacheConfig(
                    block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size,
                    num_gpu_blocks=num_gpu_blocks_override,
                    kv_cache_memory_bytes=kv_cache_memory_bytes,
                    kv_cache_dtype=kv_cache_dtype,
                    enable_prefix_caching=enable_prefix_caching,
                    **cache_options,
                ),
                device_config=DeviceConfig(
                    device=device,
                    kernels=kernels,
                    isa=isa,
                    num_threads=num_threads,
                    enforce_eager=enforce_eager,
                    **device_options,
                ),
                speculative_config=SpeculativeConfig.parse(speculative_config),
                kv_transfer_config=KVTransferConfig.parse(
                    kv_transfer_config,
                    disk_dir=None if kv_disk_dir is None else Path(kv_disk_dir),
                    disk_bytes=kv_disk_bytes,
                    mooncake=kv_mooncake,
                ),
                kv_events_config=KVEventsConfig.parse(kv_events_config),
                progress=progress,
            )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's default parameters, otherwise vLLM's."""
        return self.llm_engine.input_processor.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer. Raises `RequestError` after skip_tokenizer_init."""
        return cast("Tokenizer", self.llm_engine.input_processor.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or many prompts. Returns the outputs in the order of the prompts.

        prompts: A prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. sampling_params: One for
        all prompts, or a list. use_tqdm: True to show progress on terminals. priority: One for each prompt. If a prompt
        is invalid, raises `RequestError` and answers no prompt. If one request fails later, only its output has an
        `error`.
        """
        one = isinstance(prompts, str) or hasattr(prompts, "keys") or (bool(prompts) and isinstance(prompts[0], int))
        batch = cast("list[Prompt]", [prompts] if one else list(prompts))
        per_prompt = self._per_prompt(sampling_params, len(batch))
        with RequestProgress(len(batch), enabled=use_tqdm) as on_output:
            outputs = self.llm_engine.generate_batch(batch, per_prompt, on_output=on_output, priorities=priority)
        return list(outputs.values())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or many conversations, which the chat template renders.

        If sampling_params is None, only the checkpoint's max_tokens or the context length limits an answer.
        add_generation_prompt: True to begin an answer. continue_final_message: True to continue the last message.
        chat_template_kwargs: Further variables of the template. Other arguments and errors: See `generate`.
        """
        one = bool(messages) and hasattr(messages[0], "keys")
        conversations = cast("list[Sequence[Mapping[str, Any]]]", [messages] if one else list(messages))
        render = self.llm_engine.input_processor.chat_prompt
        prompts = [
            render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        if sampling_params is None:
            sampling_params = self.llm_engine.input_processor.default_sampling_params(
                max_tokens=self.llm_engine.input_processor.model_info.generation_defaults.get("max_tokens")
            )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling: str | None = None,
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt in `outputs.embedding`, in the order of the prompts.

        pooling: "last" or "mean" of the hidden states after the final norm, or None for the checkpoint's. normalize:
        True to scale the vectors to length 1. Raises `RequestError`.
        """
        kind = self.llm_engine.input_processor.model_info.choose_pooling(pooling)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=kind, detokenize=False)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(embedding(output, normalize=normalize).tolist()),
                output.prompt_token_ids,
                output.num_cached_tokens,
            )
            for output in self.generate(prompts, params, use_tqdm=use_tqdm)
        ]

    def reset_prefix_cache(self) -> bool:
        """Wait for saves, and drop all cached KV. Returns False and drops nothing if requests or saves are open."""
        self.llm_engine.finish_transfers()
        return self.llm_engine.core.scheduler.reset_prefix_cache()

    def _per_prompt(self, params: Params, num_prompts: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.get_default_sampling_params()] * num_prompts
        if len(params) != num_prompts:
            raise RequestError(f"{num_prompts} prompts but {len(params)} sampling_params", parameter="sampling_params")
        return [final_only(each) for each in params]


def final_only(params: SamplingParams) -> SamplingParams:
    """Return a copy that requests only final outputs."""
    return params.replace(output_kind=RequestOutputKind.FINAL_ONLY)


def _take_fields(
    arguments: dict[str, Any], config: type[SchedulerConfig | CacheConfig | DeviceConfig]
) -> dict[str, Any]:
    names = {each.name for each in fields(config)} - {"policy", "num_gpu_blocks"}
    return {name: arguments.pop(name) for name in sorted(names & arguments.keys())}
