"""`kvfold generate`: continue a prompt."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL_HELP)
    parser.add_argument("--prompt", type=str, metavar="TEXT", required=True, help="the text to continue (required)")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", default=64, help="tokens at most (default: 64)")
    parser.add_argument(
        "--temperature", type=float, metavar="F", default=0.0, help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the sampling (default: 0)")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.evaluate import generate

    text = generate(
        options.model,
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        chat=options.chat,
    )
    return {"model": options.model, "prompt": options.prompt, "text": text}


def show(result: Result) -> None:
    print(result["text"])


COMMAND = Command(
    name="generate",
    summary="continue a prompt",
    usage="MODEL --prompt TEXT [options]",
    description="Continue a prompt with an original or a converted model.",
    example='kvfold generate smollm2-mla --prompt "Why is the sky blue?" --chat --temperature 0.7',
    add_arguments=add_arguments,
    run=run,
    show=show,
)
