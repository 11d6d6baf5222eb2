"""Families with recurrent layers, which ranks do not compute yet."""

RECURRENT = frozenset(
    {
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
