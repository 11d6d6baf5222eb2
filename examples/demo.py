"""Answer a few questions at once with the model inside the package: `make demo`."""

from __future__ import annotations

from octavo import LLM, SamplingParams

QUESTIONS = [
    "What is 27 + 45?",
    "Sort these words: pear, apple, fig",
    "What is the capital of France?",
    "Reverse these words: red, green, blue",
    "Turn this into JSON: Maria is 34 years old and lives in Oslo.",
]


def main() -> None:
    """Print question and answer pairs."""
    llm = LLM()
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(
        QUESTIONS, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64)), strict=True
    ):
        print(f"> {question}\n  {output.outputs[0].text}")


if __name__ == "__main__":
    main()
