"""Continue a prompt with an original or a converted model."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, set_seed

from kvfold.errors import OptionError
from kvfold.modeling import load_model
from kvfold.texts import check_vocabulary


def generate(
    model: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
) -> str:
    """Load `model` and return its continuation of `prompt`, without the prompt.

    Args:
        model: anything `load_model` takes.
        prompt: the text to continue.
        max_new_tokens: tokens at most; generation also ends where the model ends it.
        temperature: 0 for the likeliest token at each step; above, tokens are sampled.
        seed: of the sampling.
        chat: put the prompt into the model's chat template first.

    Raises:
        OptionError: an empty prompt, a number out of range, or `chat` with a model that has no chat template.
        CheckpointError: the model cannot be loaded.
    """
    _check(prompt, max_new_tokens, temperature, seed)
    network, tokenizer = load_model(model)
    return continue_prompt(
        network, tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, chat=chat
    )


@torch.no_grad()
def continue_prompt(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
) -> str:
    """`generate` with a model and tokenizer that are in memory already."""
    _check(prompt, max_new_tokens, temperature, seed)
    if chat and not tokenizer.chat_template:
        raise OptionError("chat was asked for, but the tokenizer has no chat template: leave it off.")
    text: Any = prompt
    if chat:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    # A chat template writes its own special tokens.
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not chat, return_token_type_ids=False)
    if not inputs["input_ids"].numel():
        raise OptionError(f"the prompt {prompt!r} gives no tokens: give some text to continue.")
    check_vocabulary(inputs["input_ids"], model.config.vocab_size)
    inputs = inputs.to(model.device)
    set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else GREEDY
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=_padding(tokenizer), **sampling)
    continuation: Any = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return continuation


LEAST_TEMPERATURE = 0.01
"""Below it sampling overflows."""
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""The sampling settings that many checkpoints carry are unset, or transformers warns that they have no effect."""


def _check(prompt: str, max_new_tokens: int, temperature: float, seed: int) -> None:
    if not prompt:
        raise OptionError("the prompt is empty: give some text to continue.")
    if max_new_tokens < 1:
        raise OptionError(f"max_new_tokens must be at least 1, not {max_new_tokens}.")
    if temperature < 0 or 0 < temperature < LEAST_TEMPERATURE:
        raise OptionError(f"temperature must be 0, or {LEAST_TEMPERATURE} or above, not {temperature}.")
    if not 0 <= seed < 2**32:
        raise OptionError(f"seed must be between 0 and {2**32 - 1}, not {seed}.")


def _padding(tokenizer: PreTrainedTokenizerBase) -> Any:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
