"""Generate answers, and split them into reasoning, content and tool calls."""
