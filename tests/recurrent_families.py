"""Families with recurrent layers, which ranks and Triton do not compute yet."""

RECURRENT = frozenset({"GraniteMoeHybridForCausalLM", "Qwen3_5ForCausalLM"})
