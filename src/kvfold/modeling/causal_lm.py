"""A Hugging Face causal language model whose attention modules are kvfold's, swapped per instance."""

from types import MethodType
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from kvfold.attention import Attention, LayerContext, build_attention
from kvfold.errors import CheckpointError
from kvfold.families import family_of, head_dim
from kvfold.modeling.configuration import KvfoldConfig


class KvfoldForCausalLM(PreTrainedModel, GenerationMixin):
    """The base family's model with every attention module replaced by the one its spec describes.

    Embeddings, norms, MLPs, experts, masks and the forward pass are the base family's own; parameters keep the base
    names outside attention. Caches are transformers' classes, which then hold latents and rotary keys.
    """

    config: KvfoldConfig
    config_class = KvfoldConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: KvfoldConfig) -> None:
        super().__init__(config)
        text_config = config.base
        base = AutoModelForCausalLM.from_config(text_config, attn_implementation=config._attn_implementation)
        family = family_of(text_config)
        for index, (spec, window) in enumerate(zip(config.specs(), config.windows(), strict=True)):
            context = LayerContext(
                config=base.config,
                layer_idx=index,
                base_pairs=head_dim(text_config) // 2,
                sliding_window=window,
            )
            layer = base.get_submodule(f"{family.layers}.{index}")
            setattr(layer, family.attention, build_attention(spec, context))
        for name, child in base.named_children():
            self.add_module(name, child)
        self.vocab_size = text_config.vocab_size
        self._tied_weights_keys = base._tied_weights_keys
        # The base family's own forward, on this instance: its signature is what generation and trainers inspect.
        self.forward = MethodType(type(base).forward, self)
        self.post_init()

    def __getstate__(self) -> dict[str, Any]:
        # A bound method would be looked up on the unfinished copy, where it is not yet the base family's.
        return self.__dict__ | {"forward": self.forward.__func__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forward = MethodType(state["forward"], self)

    def attention_modules(self) -> list[Attention]:
        """The attention module of each layer, in order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load a converted folder as transformers does, but never with random weights.

        Raises:
            CheckpointError: a tensor is missing, has the wrong shape or is not the model's.
        """
        kwargs["ignore_mismatched_sizes"] = True  # so that the mismatches come back by name
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        refuse_incomplete(pretrained_model_name_or_path, info)
        _refuse_unexpected(pretrained_model_name_or_path, info)
        _check_rotary_index(pretrained_model_name_or_path, model)
        return (model, info) if output_loading_info else model


def refuse_incomplete(source: Any, info: dict[str, Any]) -> None:
    """Refuse what transformers would fill with random weights; `info` is what it reports of a loading.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """
    if names := sorted(info["missing_keys"]):
        raise CheckpointError(f"{source} lacks {_first_of(names)}: it does not fit its config.")
    if mismatches := sorted(info["mismatched_keys"]):
        name, stored, expected = mismatches[0]
        raise CheckpointError(f"{source}: tensor {name} has shape {tuple(stored)}, its config says {tuple(expected)}.")


def _refuse_unexpected(source: Any, info: dict[str, Any]) -> None:
    if names := sorted(info["unexpected_keys"]):
        raise CheckpointError(f"{source} has the unexpected {_first_of(names)}: it does not fit its config.")


def _first_of(names: list[str]) -> str:
    return f"tensor {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _check_rotary_index(source: Any, model: KvfoldForCausalLM) -> None:
    for attention in model.attention_modules():
        index = attention.rotary_index
        if index.numel() and not (0 <= int(index.min()) and int(index.max()) < attention.context.base_pairs):
            raise CheckpointError(
                f"{source}: rotary_index of layer {attention.layer_idx} points outside the "
                f"{attention.context.base_pairs} frequencies of the base model."
            )


AutoConfig.register(KvfoldConfig.model_type, KvfoldConfig)
AutoModelForCausalLM.register(KvfoldConfig, KvfoldForCausalLM)
