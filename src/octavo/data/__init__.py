"""Plain data that crosses rooms: requests, what a step computes and gave, events. Standard library only."""
