"""Answer a few questions in one batch with the built-in model: `make demo`."""

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
    """Print questions and answers, and how many tokens of a repeated answer were drafted."""
    llm = LLM()
    params = SamplingParams(temperature=0, max_tokens=64)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = llm.chat(conversations, params)
    for question, output in zip(QUESTIONS, answers, strict=True):
        print(f"> {question}\n  {output.outputs[0].text}")

    # A repeated question: the first answer drafts the second, so one step yields several tokens.
    stats = llm.llm_engine.stats
    num_drafted, num_accepted = stats.drafts.num_draft_tokens, stats.drafts.num_accepted_tokens
    [again] = llm.chat(conversations[-1], params)
    num_drafted = stats.drafts.num_draft_tokens - num_drafted
    num_accepted = stats.drafts.num_accepted_tokens - num_accepted
    is_same = again.outputs[0].token_ids == answers[-1].outputs[0].token_ids
    print(
        f"The last question once more: {'the same' if is_same else 'other'} {len(again.outputs[0].token_ids)} tokens. "
        f"{num_drafted} tokens were drafted, and {num_accepted} of them were accepted (docs/speculation.md)."
    )


if __name__ == "__main__":
    main()
