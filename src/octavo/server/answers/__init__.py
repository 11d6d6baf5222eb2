"""Turn prompts into answers; split them into reasoning, content and calls."""
