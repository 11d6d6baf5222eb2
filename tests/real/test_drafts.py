"""A real model's answers (SmolLM2, copying and narrating) do not change with speculation or async scheduling."""

import pytest
from scripted_drafts import verify_all

from octavo import LLM, SamplingParams
from octavo.sampling_params import StructuredOutputsParams

TEXT = "The quick brown fox jumps over the lazy dog. The lazy dog sleeps in the warm sun. The quick brown fox is tired."
CHATS = [
    [{"role": "user", "content": f"Repeat this text exactly, word by word: {TEXT}"}],
    [{"role": "user", "content": f"Repeat this text, but write cat instead of dog: {TEXT}"}],
    [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    [{"role": "user", "content": "Write the numbers from one to thirty, separated by commas."}],
    [{"role": "user", "content": 'Give me a JSON object with the keys "name" and "name of the father".'}],
]


def test_speculative_decoding_keeps_answers_of_real_model(real_model):
    params = [
        SamplingParams(temperature=index % 2 * 0.7, seed=index, max_tokens=48, logprobs=2)
        for index in range(len(CHATS))
    ]
    answers = []
    # "suffix" drafts less often, because three tokens have to match.
    for method, least in (("none", None), ("ngram", 20), ("suffix", 12), ("quantized", 20)):
        config = {"method": method, "num_speculative_tokens": 6}
        options = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 8}
        llm = LLM(str(real_model("smollm2")), speculative_config=config, **options)
        verify_all(llm.llm_engine)
        outputs = [output.outputs[0] for output in llm.chat(CHATS, params, use_tqdm=False)]
        answers.append([(each.token_ids, each.logprobs, each.text) for each in outputs])
        assert answers[-1] == answers[0]
        assert least is None or llm.llm_engine.core.metrics.stats.drafts.num_drafts > least


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ([{}, {"stop": ["."]}], 40),
        ([{}, {"structured_outputs": StructuredOutputsParams(regex=r"[A-Z][a-z ]{20,60}\.")}], 1),
    ],
    ids=["some stop early", "some follow a grammar, which all wait for"],
)
def test_async_scheduling_keeps_answers_of_real_model(real_model, options, least):
    """Many requests, with prompts in several chunks."""
    params = [
        SamplingParams(temperature=index % 2 * 0.7, seed=index, max_tokens=40, logprobs=2, **options[index % 2])
        for index in range(2 * len(CHATS))
    ]
    answers, num_ahead = [], 0
    for ahead in (False, True):
        llm = LLM(
            str(real_model("smollm2")),
            speculative_config={"method": "none"},
            async_scheduling=ahead,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=256 << 20,
            max_num_seqs=8,
        )
        core = llm.llm_engine.core
        decide = core.scheduler.schedule

        def counted(decide=decide, core=core):
            nonlocal num_ahead
            num_ahead += core.scheduler.in_flight is not None
            return decide()

        core.scheduler.schedule = counted
        outputs = [output.outputs[0] for output in llm.chat(CHATS * 2, params, use_tqdm=False)]
        answers.append([(each.token_ids, each.logprobs, each.text, each.finish_reason) for each in outputs])
        core.executor.shutdown()
    assert answers[1] == answers[0]
    assert num_ahead >= least


def test_target_model_as_draft_model_has_all_drafts_accepted(real_model):
    directory = str(real_model("smollm2"))
    config = {"method": "draft_model", "model": directory, "num_speculative_tokens": 4}
    llm = LLM(directory, speculative_config=config, kv_cache_memory_bytes=256 << 20, max_num_seqs=8)
    verify_all(llm.llm_engine)
    params = [SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=40) for index in range(len(CHATS))]
    metrics = [output.metrics for output in llm.chat(CHATS, params, use_tqdm=False)]
    assert sum(each.num_accepted_tokens for each in metrics) == sum(each.num_draft_tokens for each in metrics) > 100
