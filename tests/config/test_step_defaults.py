"""Limits of a step that the user does not set are those of the device."""

import pytest

from octavo.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("device_type", "options", "expected"),
    [
        ("cpu", {}, (64, 512, False)),
        ("cpu", {"is_offline": True}, (64, 1024, False)),
        ("cpu", {"max_num_seqs": 1025, "is_offline": True}, (1025, 1025, False)),
        ("cpu", {"max_num_batched_tokens": 32}, (32, 32, False)),
        ("cpu", {"async_scheduling": True}, (64, 512, True)),
        ("cuda", {}, (256, 8192, True)),
        ("cuda", {"is_offline": True}, (256, 8192, True)),
        ("cuda", {"max_num_seqs": 8}, (8, 8192, True)),
        ("cuda", {"max_num_seqs": 9000}, (9000, 9000, True)),
        ("cuda", {"max_num_batched_tokens": 512}, (256, 512, True)),
        ("cuda", {"max_num_batched_tokens": 100}, (100, 100, True)),
        (
            "cuda",
            {"max_num_seqs": 64, "max_num_batched_tokens": 512, "async_scheduling": False},
            (64, 512, False),
        ),
    ],
)
def test_unset_limits_are_those_of_device(device_type, options, expected):
    config = SchedulerConfig(**options).resolved(device_type)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.async_scheduling) == expected
    assert config.resolved() == config.resolved("cuda") == config, "explicit values win"


def test_requested_drafts_disable_async_scheduling_by_default():
    for speculative, ahead in (
        (SpeculativeConfig(), True),
        (SpeculativeConfig(method="none"), True),
        (SpeculativeConfig(method="ngram"), False),
        (SpeculativeConfig(model="octavo-demo-draft"), False),
    ):
        config = EngineConfig(speculative=speculative)
        found = config.scheduler.resolved("cuda", has_drafts=config.speculative.is_requested)
        assert found.async_scheduling is ahead
    with pytest.raises(ConfigError, match="async_scheduling"):
        EngineConfig(scheduler=SchedulerConfig(async_scheduling=True), speculative=SpeculativeConfig(method="ngram"))


def test_explicit_limits_that_contradict_are_refused():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)
