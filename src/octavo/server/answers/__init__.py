"""Turn prompts into answers, and split their text into reasoning, content and tool calls."""
