"""`engine_kwargs` of Ray Serve LLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import CacheConfig, EngineConfig, KVTransferConfig, ModelConfig, SchedulerConfig, ServerConfig
from octavo.errors import ConfigError
from octavo.ray.serve_arguments import read_arguments


def read(**arguments) -> tuple[EngineConfig, ServerConfig]:
    return read_arguments(arguments, model="./m", name="served")


def test_names_are_those_of_options(tmp_path):
    engine, server = read(
        num_gpu_blocks_override=9,
        scheduling_policy="fair",
        kv_disk_dir=str(tmp_path),
        speculative_method="none",
        tensor_parallel_size=2,
        request_timeout=5.0,
        tool_call_parser="hermes",
        api_keys="keys.toml",
    )
    assert engine.model == ModelConfig(model="./m", served_model_name="served")
    assert engine.cache == CacheConfig(num_gpu_blocks=9)
    assert engine.scheduler == SchedulerConfig(policy="fair")
    assert engine.kv_transfer == KVTransferConfig(disk_dir=tmp_path)
    assert (engine.speculative.method, engine.device.tensor_parallel_size) == ("none", 2)
    assert server == ServerConfig(
        served_model_names=("served",),
        request_timeout_s=5.0,
        tool_call_parser="hermes",
        api_keys_file=Path("keys.toml"),
    )


def test_configurations_may_be_mappings(tmp_path):
    engine, _ = read(kv_transfer_config={"disk_dir": str(tmp_path)}, speculative_config={"method": "ngram"})
    assert engine.kv_transfer.disk_dir == tmp_path
    assert engine.speculative.method == "ngram"
    with pytest.raises(ConfigError, match="exclude each other"):
        read(kv_transfer_config={"disk_dir": str(tmp_path)}, kv_disk_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="exclude each other"):
        read(speculative_config={"method": "ngram"}, speculative_method="ngram")


def test_arguments_of_vllm_are_accepted_with_a_warning():
    with pytest.warns(UserWarning, match="gpu_memory_utilization"):
        read(gpu_memory_utilization=0.9)


@pytest.mark.parametrize("name", ["prot", "ssl_certfile", "allowed_host", "dashboard", "log_level", "model"])
def test_unknown_argument_or_one_of_listening_is_refused(name):
    with pytest.raises(ConfigError, match=f"unknown argument '{name}'"):
        read(**{name: "x"})


def test_invalid_value_is_refused():
    with pytest.raises(ConfigError, match="block_size"):
        read(block_size=0)
