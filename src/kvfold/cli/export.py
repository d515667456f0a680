"""`kvfold export`: write a conversion in the form that stock runtimes load."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help="folder of a conversion (convert --target deepseek)")
    parser.add_argument("out", metavar="OUT", type=str, help="the folder to write, for llama.cpp a .gguf file")
    parser.add_argument(
        "--format",
        type=str,
        metavar="F",
        help="deepseek (a folder) or gguf (a file for llama.cpp) (default: gguf where OUT ends in .gguf)",
    )
    parser.add_argument(
        "--runtime",
        type=str,
        metavar="NAME",
        help="transformers, llamacpp, vllm or sglang: what the export is for (default: llamacpp for gguf, else "
        "transformers)",
    )
    parser.add_argument("--type", type=str, metavar="T", help="of weights in a .gguf: f32 (default), bf16, f16 or q8_0")
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="fold biases that the runtime has no slot for into the weights, nearly the same; the loss is told",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists, once the new one is whole")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.export import export

    return export(
        options.model,
        options.out,
        format=options.format,
        runtime=options.runtime,
        type=options.type,
        approximate=options.approximate,
        overwrite=options.overwrite,
        progress=progress,
    ).to_dict()


def show(result: Result) -> None:
    from kvfold.report.tables import show_export

    show_export(result)


COMMAND = Command(
    name="export",
    summary="write a conversion in the form that stock runtimes load",
    usage="MODEL OUT [--format F] [--runtime NAME] [--type T] [--approximate] [--overwrite]",
    description=(
        "Write a latent model as a dense DeepSeek, which stock transformers, llama.cpp, vLLM and SGLang load without "
        "custom code and of which they cache the latent alone. Where a runtime takes only certain widths, the export "
        "is padded with zeros, and the table says what that costs."
    ),
    example=(
        "kvfold convert smollm2 smollm2-mla --cache-ratio 0.3125 --target deepseek\n"
        "kvfold export smollm2-mla smollm2-deepseek\n"
        "kvfold export smollm2-mla smollm2-mla.gguf --type q8_0"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)
