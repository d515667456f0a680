"""`kvfold pretrain`: train a decoder from scratch, with any of kvfold's attentions."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result, given_options
from kvfold.cli.training_flags import OUTPUT_OPTIONS, add_data, add_machine, add_output, add_schedule, add_stopping
from kvfold.progress import Progress

SCHEDULE = {
    "learning_rate": 1e-3,
    "warmup": 0.02,
    "decay": 0.98,
    "decay_type": "cosine",
    "floor": 0.1,
    "weight_decay": 0.1,
}
"""The defaults of `kvfold.lab.pretrain`, for the help."""

SIZES = {
    "hidden_size": "width of the model",
    "num_hidden_layers": "layers",
    "num_attention_heads": "query heads",
    "intermediate_size": "width of the SwiGLU",
    "vocab_size": "embeddings, at least as many as the tokenizer has tokens",
    "head_dim": "width of a head (default: 64)",
    "max_position_embeddings": "positions (default: the sequence length)",
    "num_key_value_heads": "key/value heads, of gqa and gta",
    "kv_lora_rank": "cached latent elements, all latent heads together, of mla, gla, glaq, mlra (default: 4 head dims)",
    "latent_heads": "latents that share these, of gla and glaq (default: 2)",
    "branches": "of mlra, 2 or 4 (default: 4)",
    "q_lora_rank": "rank of the query latent, of mla, gla, glaq, mlra (default: no query latent)",
    "qk_rope_head_dim": "rotary dims of these (default: half a head dim)",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", type=str, help="the folder of the run; the model comes to lie in RUN/model"
    )
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="a YAML recipe with any of the flags below; flags override it"
    )
    _add_model(parser)
    add_data(parser)
    parser.add_argument(
        "--tokenizer",
        type=str,
        metavar="T",
        help="bpe, made for the training text, bytes, or a model whose tokenizer is taken (default: bpe)",
    )
    add_schedule(parser, "AdamW with a linear warm-up, a constant rate and a decay", SCHEDULE)
    add_stopping(parser)
    add_machine(parser)
    add_output(parser)


def _add_model(parser: ArgumentParser) -> None:
    model = parser.add_argument_group("model", "transformers' Llama with another attention")
    model.add_argument(
        "--attention", type=str, metavar="NAME", help="mha, mqa, gqa, gta, mla, gla, glaq or mlra (see docs/lab.md)"
    )
    for name, text in SIZES.items():
        model.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    model.add_argument("--rope-theta", type=float, metavar="F", help="base of the rotary frequencies (default: 10000)")
    model.add_argument("--biases", action="store_true", help="biases in latent attention")
    model.add_argument("--zero-outputs", action="store_true", help="output and down projections begin at zero")
    model.add_argument(
        "--scaled-latents", action="store_true", help="norms of latents begin at (width / rank)^1/2 instead of 1"
    )
    model.add_argument("--init-std", type=float, metavar="F", help="of all weights but the norms' (default: 0.02)")
    for name, text in (("latent_norm", "no RMSNorm of latents"), ("tie_word_embeddings", "two matrices of embeddings")):
        model.add_argument(f"--no-{name.replace('_', '-')}", dest=name, action="store_false", default=None, help=text)


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.lab import pretrain

    given = given_options(options, (name for name in vars(options) if name not in OUTPUT_OPTIONS))
    given |= {name: options[name] for name in ("latent_norm", "tie_word_embeddings") if options[name] is not None}
    return pretrain(
        options.run, resume=options.resume, overwrite=options.overwrite, progress=progress, **given
    ).to_dict()


def show(result: Result) -> None:
    from kvfold.report.tables import show_training

    show_training(result)


COMMAND = Command(
    name="pretrain",
    summary="train a small decoder from scratch, with any attention",
    usage="RUN --attention NAME --data SOURCE ... [options]",
    description=(
        "Train a new decoder with MHA, MQA, GQA, GTA, MLA, GLA or MLRA on text and write the run to the folder RUN: "
        "the loss of every step (curve.jsonl), checkpoints, and in the end the model (RUN/model). A killed run goes on "
        "with --resume, with the same result. To compare several, see kvfold ablate."
    ),
    example=(
        "kvfold pretrain tiny --attention gla --hidden-size 128 --num-hidden-layers 4 --num-attention-heads 4 \\\n"
        "    --head-dim 32 --intermediate-size 384 --vocab-size 2048 --data default --steps 500 --sequence-length 128\n"
        "kvfold generate tiny/model --prompt 'The cell'"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)
