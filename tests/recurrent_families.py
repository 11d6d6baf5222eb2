"""Families with recurrent layers, which ranks and Triton do not compute yet."""

RECURRENT = frozenset({"GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "Qwen3_5ForCausalLM"})
