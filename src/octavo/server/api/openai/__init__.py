"""OpenAI's API: completions, chat completions, responses, embeddings. Names of fields are OpenAI's and vLLM's."""
