"""Tensors: what a `SchedulerOutput` asks for is computed here, in one batched forward for everything scheduled."""
