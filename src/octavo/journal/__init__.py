"""The flight recorder: journals of all calls into the core, which suffice to repeat every decision, and their tools."""
