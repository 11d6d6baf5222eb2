"""Starts an engine. Its core runs in another process, so this process does not import torch."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.assets import BUILT_IN_DRAFT, BUILT_IN_MODEL
from octavo.config import EngineConfig, ModelConfig, ModelInfo
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.input_processor import InputProcessor
from octavo.engine.llm_engine import Engine
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.models.weight_bytes import weight_bytes
from octavo.sampling_params import SamplingParams
from octavo.startup.checkpoint import open_checkpoint
from octavo.startup.draft_checkpoint import find_draft_checkpoint
from octavo.structured_output.grammars import GrammarCompiler, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.engine.tokenizer import Tokenizer
    from octavo.models.architecture import Architecture
    from octavo.startup.checkpoint import Checkpoint


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve. text: Checkpoint of tokenizer and chat template."""

    checkpoint: Checkpoint
    text: Checkpoint
    architecture: Architecture
    max_model_len: int

    @classmethod
    def find(cls, config: ModelConfig) -> ServedModel:
        """Find the configured model. Raises `ConfigError` and `ModelError`."""
        checkpoint = text = open_checkpoint(config.model or BUILT_IN_MODEL, weights=config.load_format != "dummy")
        if config.tokenizer is not None and not config.skip_tokenizer_init:
            text = open_checkpoint(config.tokenizer, weights=False)
        architecture = checkpoint.read_architecture()
        if not config.skip_tokenizer_init:
            text.check_tokenizer()
        max_model_len = resolve_max_model_len(config, architecture)
        return cls(checkpoint, text, architecture.within(max_model_len), max_model_len)


def launch_engine(
    config: EngineConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Engine:
    """Start a process for the core, load the tokenizer meanwhile, and return the engine.

    progress: called with (done, total) bytes of packed weights. meanwhile: called while the process loads; its error
    ends the start. Raises `ConfigError` and `ModelError`.
    """
    from octavo.engine.remote_core import RemoteCore  # noqa: PLC0415 - only for servers

    served, path = ServedModel.find(config.model), config.model
    draft = find_draft_checkpoint(config.speculative, config.model, served)
    # -P: no imports from the current directory.
    command = [sys.executable, "-P", "-m", "octavo.startup.engine_main"]
    # Pass paths, because a hub id may refer to other files after a restart.
    if config.model.model is not None:
        config = replace(config, model=replace(config.model, model=str(served.checkpoint.path)))
    if config.model.tokenizer is not None:
        config = replace(config, model=replace(config.model, tokenizer=str(served.text.path)))
    if draft is not None and config.speculative.model not in (None, BUILT_IN_DRAFT):
        config = replace(config, speculative=replace(config.speculative, model=str(draft.weights.path)))

    def prepare() -> tuple[InputProcessor, OutputProcessor]:
        if meanwhile is not None:
            meanwhile()
        return make_processors(path, served)

    core = RemoteCore(command, config)
    return Engine(core, *core.start(prepare, progress), time.monotonic)


def make_processors(config: ModelConfig, served: ServedModel) -> tuple[InputProcessor, OutputProcessor]:
    """Create the processors of inputs and outputs."""
    tokenizer = template = None
    if not config.skip_tokenizer_init:
        tokenizer = served.text.read_tokenizer()
        template = _chat_template(config, served, tokenizer)
    if served.architecture.text_part_of is not None:
        logger.warning(
            "%s is a model of text and images; octavo serves its text part and refuses images",
            served.architecture.text_part_of,
        )
    info = _model_info(config, served, tokenizer)
    return InputProcessor(tokenizer, info, config.seed, template), OutputProcessor(tokenizer, time.monotonic)


def make_grammars(config: ModelConfig, served: ServedModel) -> GrammarCompiler | None:
    """Create the grammar compiler, or None without a tokenizer."""
    if config.skip_tokenizer_init:
        return None

    def read() -> Vocabulary:
        tokenizer = served.text.read_tokenizer()
        return Vocabulary(
            text=tokenizer.backend.to_str(),
            num_ids=tokenizer.vocab_size,
            eos_token_ids=_eos_token_ids(served, tokenizer),
            token_id=tokenizer.token_id,
            added_ids=tokenizer.added_ids,
        )

    return GrammarCompiler(read, served.architecture.vocab_size)


def resolve_max_model_len(model_config: ModelConfig, architecture: Architecture) -> int:
    """Return the configured length, by default the checkpoint's. Raises `ConfigError` if it is too large."""
    longest = architecture.max_context_tokens
    path = model_config.max_model_len
    if path is not None and path > longest:
        raise ConfigError(f"max_model_len {path} is more than the {longest} positions that this checkpoint supports")
    return longest if path is None else path


def _model_info(model_config: ModelConfig, served: ServedModel, tokenizer: Tokenizer | None) -> ModelInfo:
    checkpoint, architecture = served.checkpoint, served.architecture
    name = model_config.served_model_name or model_config.model or BUILT_IN_MODEL
    generation = checkpoint.read_generation_defaults()
    defaults = generation.sampling if model_config.generation_config == "auto" else {}
    try:
        SamplingParams(**defaults)  # type: ignore[arg-type]  # checks the values
    except RequestError as error:
        raise ModelError(
            f"{generation.path}: {error}; correct the file, or ignore it with generation_config='vllm'"
        ) from error
    embeddings, described = checkpoint.read_embedding_config(), checkpoint.read_config()
    return ModelInfo(
        name=name,
        vocab_size=architecture.vocab_size,
        max_model_len=served.max_model_len,
        eos_token_ids=_eos_token_ids(served, tokenizer),
        generation_defaults=defaults,
        pooling=embeddings.pooling,
        pooling_problem=embeddings.problem,
        has_head=architecture.has_head,
        has_recurrent_layers=bool(architecture.kv_layout.states),
        hidden_size=architecture.hidden_size,
        model_type=str(described.get("model_type", "")),
        architectures=tuple(map(str, described.get("architectures") or ())),
        num_parameters=architecture.num_parameters,
        weight_bytes=weight_bytes(
            architecture, architecture.dtype, quantization=model_config.quantization, group_size=model_config.group_size
        ),
        quantization_level=checkpoint.weights.quantization_level,
        file_type=checkpoint.weights.file_type,
    )


def _eos_token_ids(served: ServedModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    checkpoint, architecture = served.checkpoint, served.architecture
    eos = set(architecture.eos_token_ids) | set(checkpoint.read_generation_defaults().eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    outside = {token_id for token_id in eos if not 0 <= token_id < architecture.vocab_size}
    if outside:
        logger.warning(
            "%s has EOS ids outside the vocabulary, which cannot be generated: %s", checkpoint.path, sorted(outside)
        )
    return frozenset(eos - outside)


def _chat_template(config: ModelConfig, served: ServedModel, tokenizer: Tokenizer) -> ChatTemplate | None:
    chosen = config.chat_template
    if chosen is None:
        stored_template = served.text.read_chat_template(tokenizer.special_tokens)
        return stored_template or served.checkpoint.read_chat_template(tokenizer.special_tokens)
    looks_like_text = "{" in chosen or "\n" in chosen
    if not looks_like_text and not Path(chosen).is_file():
        raise ConfigError(f"chat_template {chosen!r} is neither a file nor the text of a template")
    text = chosen if looks_like_text else Path(chosen).read_text(encoding="utf-8")
    return ChatTemplate(text, tokenizer.special_tokens)
