"""`kvfold serve`: start the server of the runtime that an export was made for."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("export", metavar="EXPORT", type=str, help="a folder or .gguf file that kvfold export made")
    parser.add_argument("--host", type=str, default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="TCP port (default: 8000)")
    parser.add_argument(
        "--python",
        type=str,
        metavar="PATH",
        help="interpreter of the environment in which the runtime is installed, such as venv/bin/python (default: "
        "this one)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command; do not run it")


def run(options: Namespace, progress: Progress) -> Result:
    import shlex
    import signal
    import subprocess
    import sys

    from kvfold.export import serve_command

    command = serve_command(
        options.export, host=options.host, port=options.port, python=options.python or sys.executable
    )
    if options.dry_run:
        return {"command": command, "exit_code": None}
    print(shlex.join(command), file=sys.stderr, flush=True)
    server = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    return {"command": command, "exit_code": server.wait()}


def show(result: Result) -> None:
    import shlex

    if result["exit_code"] is None:
        print(shlex.join(result["command"]))
    elif result["exit_code"]:
        print(f"the server ended with code {result['exit_code']}")


COMMAND = Command(
    name="serve",
    summary="start the server of the runtime that an export was made for",
    usage="EXPORT [--host HOST] [--port N] [--python PATH] [--dry-run]",
    description=(
        "Print and run the command with which the runtime of EXPORT serves it as OpenAI's API does: transformers "
        "serve, llama-server (or the server in xllamacpp), vLLM's or SGLang's, with settings that compute the right "
        "thing. Ctrl-C ends it. Exit code 1 if the server ended with an error."
    ),
    example=(
        "kvfold serve smollm2-mla.gguf --port 8080\n"
        "kvfold serve smollm2-vllm --python vllm-env/bin/python\n"
        "kvfold serve smollm2-deepseek --dry-run"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
    passed=lambda result: not result["exit_code"],
)
