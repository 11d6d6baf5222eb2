"""Use `octavo serve` with the `openai` package: a whole answer, a stream, many concurrent requests, an error.

pip install openai
octavo serve &                            # ready in some seconds
python examples/openai_client.py [--base-url http://127.0.0.1:8000/v1] [--question "What is 12 + 30?"]
"""

from __future__ import annotations

import argparse
import asyncio
import time

import openai


def answer_whole(client: openai.OpenAI, model: str, question: str) -> None:
    """Send one request and print the whole answer."""
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=64
    )
    choice = reply.choices[0]
    print(f"whole:     {choice.message.content!r}  ({choice.finish_reason}; {reply.usage})")


def answer_streamed(client: openai.OpenAI, model: str, question: str) -> None:
    """Print the same answer piece by piece; the last event has the usage."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    print("streamed:  ", end="")
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="|", flush=True)
        if chunk.usage is not None:
            print(f"  ({chunk.usage.completion_tokens} tokens)")


async def answer_many(base_url: str, api_key: str, model: str, count: int) -> None:
    """Send many requests concurrently. They are computed in one batch, much faster than one after the other."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        start = time.perf_counter()
        replies = await asyncio.gather(
            *(
                client.completions.create(model=model, prompt=f"{number} + {number} =", max_tokens=16, seed=number)
                for number in range(count)
            )
        )
    num_tokens = sum(reply.usage.completion_tokens for reply in replies if reply.usage is not None)
    print(f"many:      {count} requests, {num_tokens} tokens in {time.perf_counter() - start:.2f} s")


def ask_wrongly(client: openai.OpenAI, model: str) -> None:
    """Send an invalid value, which raises a `BadRequestError` that names the field."""
    try:
        client.completions.create(model=model, prompt="hello", temperature=-1)
    except openai.BadRequestError as error:
        print(f"refused:   {error.param}: {error.message}")


def main() -> None:
    """Run all examples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="what the server was given as --api-key")
    parser.add_argument("--question", default="What is 12 + 30?")
    parser.add_argument("--num-requests", type=int, default=16)
    options = parser.parse_args()
    with openai.OpenAI(base_url=options.base_url, api_key=options.api_key, max_retries=6) as client:  # it may load
        model = client.models.list().data[0].id
        print(f"model:     {model}")
        answer_whole(client, model, options.question)
        answer_streamed(client, model, options.question)
        asyncio.run(answer_many(options.base_url, options.api_key, model, options.num_requests))
        ask_wrongly(client, model)


if __name__ == "__main__":
    main()
