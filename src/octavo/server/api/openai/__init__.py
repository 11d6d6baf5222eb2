"""OpenAI's API: completions, chat completions, responses, embeddings. Fields have OpenAI's and vLLM's names."""
