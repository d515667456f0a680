"""The config of a kvfold model: the base model's own config and one attention spec per layer."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from kvfold.attention import AttentionSpec, spec_from_dict
from kvfold.errors import CheckpointError, OptionError
from kvfold.families import family_of


class KvfoldConfig(PreTrainedConfig):
    """Config of `KvfoldForCausalLM`.

    Args:
        text_config: the base model's config, a family of `kvfold.families`. The name is transformers' own for the part
            that caches, losses and generation read.
        attention: one attention spec as a dict for all layers, or a list with one per layer.

    Raises:
        OptionError: the attention specs contradict each other or the base config.
    """

    model_type = "kvfold"
    # The name and form in which transformers looks for the parts of a composite config.
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012  # pyright: ignore[reportAssignmentType]

    text_config: dict | PreTrainedConfig | None = None
    attention: dict | list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            values = dict(self.text_config)
            self.text_config = AutoConfig.for_model(values.pop("model_type", "llama"), **values)
        elif not isinstance(self.text_config, PreTrainedConfig):
            if self.text_config is not None or self.attention is not None:
                raise CheckpointError("the kvfold config has no 'text_config': restore the base model's config.")
            # transformers builds defaults to write configs as differences
            self.text_config = AutoConfig.for_model("llama")
        if isinstance(self.attention, dict):
            self.attention = [self.attention] * self.base.num_hidden_layers
        self.tie_word_embeddings = self.base.tie_word_embeddings
        super().__post_init__(**kwargs)

    @property
    def base(self) -> PreTrainedConfig:
        """The base model's config, an object in every config that is built."""
        assert isinstance(self.text_config, PreTrainedConfig)
        return self.text_config

    def specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer, checked against the base config."""
        base = self.base
        if not self.attention or not isinstance(self.attention, list):
            raise CheckpointError("the kvfold config has no 'attention': add one spec, or one per layer.")
        if len(self.attention) != base.num_hidden_layers:
            raise CheckpointError(
                f"the kvfold config has {len(self.attention)} attention specs for {base.num_hidden_layers} layers."
            )
        try:
            specs = tuple(spec_from_dict(values) for values in self.attention)
        except OptionError as error:
            raise CheckpointError(f"the kvfold config is damaged: {error}") from error
        for layer, spec in enumerate(specs):
            for field in ("hidden_size", "num_attention_heads"):
                if getattr(spec, field) != getattr(base, field):
                    raise CheckpointError(
                        f"the kvfold config contradicts itself: {field} of layer {layer} is {getattr(spec, field)} in "
                        f"'attention' and {getattr(base, field)} in 'text_config'."
                    )
        return specs

    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens, None where a query sees everything."""
        return family_of(self.base).sliding_windows(self.base)

    # The numbers that training and evaluation tools read from any model's config.
    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.base.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.base.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        return self.base.num_attention_heads

    @property
    def max_position_embeddings(self) -> int:
        return self.base.max_position_embeddings
