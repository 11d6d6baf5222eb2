"""octavo over HTTP: the OpenAI API in front of one engine."""
